"""What a spare does while it waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.job import Job
from oobleckd.protocol.nodemessages import LayersLoaded, LoadLayers, SpareUp, TakePlace
from oobleckd.worker.device import compiling
from oobleckd.worker.device.process import Loading, wait_for_place
from oobleckd.worker.models import compiled
from oobleckd.worker.runtime.framing import read_frame, write_frame
from tests.helpers.models import small_job

JOB = small_job("gpt2", train={"compile": True})


def test_a_spare_loads_layers_when_it_is_told_to_and_then_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[tuple[str, bool, Job]] = []

    def load(_compiling: object, _device: object, job: Job, is_wanted: Callable[[], bool]) -> int:
        loaded.append((threading.current_thread().name, is_wanted(), job))
        return 2

    monkeypatch.setattr(compiling, "load_kept", load)
    loading = Loading("cpu", tmp_path)
    agent, spare = socket.socketpair()
    with agent, spare:
        write_frame(agent, codec.encode(LoadLayers(JOB)))
        write_frame(agent, codec.encode(TakePlace("node-1/0")))
        assert wait_for_place(spare.fileno(), loading) == TakePlace("node-1/0")
        assert read_frame(agent) == codec.encode(SpareUp())
        assert read_frame(agent) == codec.encode(LayersLoaded(2))
    assert loading.compiling is not None  # which the place goes on with
    ((thread, was_wanted, job),) = loaded
    assert job == JOB
    assert was_wanted  # it is to stop after what it is at
    assert thread != threading.main_thread().name  # whose priority could not be raised again


def test_a_spare_that_cannot_load_is_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: object) -> int:
        raise RuntimeError("no room")

    monkeypatch.setattr(compiling, "load_kept", load)
    loading = Loading("cpu", tmp_path)
    assert loading.load(JOB, lambda: False) == 0
    assert loading.compiling is None
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_spare_of_a_card_loads_the_compiler_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(compiled, "load", lambda: loaded.append("compiler"))
    loading = Loading("cuda", tmp_path)
    assert loading.load(JOB, lambda: False) == 0
    assert loaded == ["compiler"]
    assert loading.compiling is None


def test_a_spare_whose_agent_is_gone_ends(tmp_path: Path) -> None:
    agent, spare = socket.socketpair()
    with spare:
        agent.close()
        with pytest.raises((EOFError, OSError)):
            wait_for_place(spare.fileno(), Loading("cpu", tmp_path))
