"""What a spare does while it waits."""

from __future__ import annotations

import socket
import threading

import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.messages import LoadCompiler, TakePlace
from oobleckd.worker.device.process import wait_for_place
from oobleckd.worker.models import compiled
from oobleckd.worker.runtime.framing import read_frame, write_frame


def test_a_spare_loads_the_compiler_when_it_is_told_to_and_then_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(compiled, "load", lambda: loaded.append(threading.current_thread().name))
    agent, spare = socket.socketpair()
    with agent, spare:
        write_frame(agent, codec.encode(LoadCompiler()))
        write_frame(agent, codec.encode(TakePlace("node-1/0")))
        assert wait_for_place(spare.fileno()) == TakePlace("node-1/0")
        assert read_frame(agent) is not None  # that it is up
    assert len(loaded) == 1
    assert loaded[0] != threading.main_thread().name  # whose priority could not be raised again


def test_a_spare_whose_agent_is_gone_ends() -> None:
    agent, spare = socket.socketpair()
    with spare:
        agent.close()
        with pytest.raises((EOFError, OSError)):
            wait_for_place(spare.fileno())
