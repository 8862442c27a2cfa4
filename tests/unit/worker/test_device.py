"""A device in the middle of a task: what it answers at once, and what waits for the task's end."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from oobleckd.host import urgency
from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.protocol import codec
from oobleckd.protocol.datamessages import Identified, Identify, InputsChanged
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.message import Message
from oobleckd.protocol.messages import (
    Decide,
    Deploy,
    DeviceFailed,
    Emptied,
    Flag,
    Held,
    Progress,
    Ready,
    Release,
    Report,
    Resume,
    StepDone,
)
from oobleckd.protocol.nodemessages import DeviceUp
from oobleckd.protocol.parts import Counters, DeviceInfo, Flags
from oobleckd.tokens.manifest import TOKENS
from oobleckd.worker.agent.outbox import peek
from oobleckd.worker.data import inputs
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.device import device, layouts, reading
from oobleckd.worker.device.agent_link import DeviceLink
from oobleckd.worker.device.context import DeviceContext
from oobleckd.worker.models import Layer
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.framing import read_frame, write_frame
from oobleckd.worker.runtime.yielding_lock import YieldingLock
from tests.helpers.prepared import prepared

TIMEOUT_S = 60.0
ME = "n/0"


class Blocked:
    """Forward passes that begin, and end when they are let go."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.compute = compute
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.begun.set()
        assert self.go.wait(TIMEOUT_S)
        return self.compute(*args)


class Agent:
    """The agent's end of the device's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(TIMEOUT_S)

    def say(self, message: Message) -> None:
        write_frame(self.sock, codec.encode(message))

    def hear(self, *kinds: type) -> Any:
        """The next message of one of ``kinds``."""
        while True:
            data = read_frame(self.sock)
            assert data is not None
            if peek(data).type in {
                kind.__struct_config__.tag for kind in kinds
            }:  # a DeviceUp is for the agent alone
                return codec.decode_from_worker(data)

    def up(self) -> DeviceInfo:
        """Where the device says next that it stands."""
        while True:
            data = read_frame(self.sock)
            assert data is not None
            if peek(data).type == "DeviceUp":
                return msgspec.msgpack.decode(data, type=DeviceUp).info


def job(tmp_path: Path) -> Job:
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 40)
    config = {
        "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 128, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    return parse_job({
        "name": "tiny", "model": {"family": "gpt2", "config": config},
        "data": {"source": "text", "path": str(tmp_path / "text")},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "sequence": 16},
        "checkpoint": {"dir": str(tmp_path / "ckpt")},
    })  # fmt: skip


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Of a device process in this one, that has a job of one device and was told to get ready for it."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(device, "DeviceLink", partial(DeviceLink, on_closed=lambda: None))
    place = DeviceContext(ME, "cpu", "host", "127.0.0.1", tmp_path)
    with ours, ExitStack() as ends:
        process = device.DeviceProcess(place, theirs.detach(), ActivityPage())
        ends.callback(process.transport.close)
        ends.callback(process.link.close)
        threading.Thread(target=process.run, daemon=True).start()
        agent = Agent(ours)
        agent.say(deploy(1, job(tmp_path)))
        agent.hear(Ready)
        yield agent


def deploy(epoch: int, spec: Job) -> Deploy:
    """All of a model for one device."""
    every = Range(0, 4)
    routes = tuple(Route(micro_batch, epoch, (Segment(ME, every),)) for micro_batch in range(2))
    layout = Layout(epoch, 4, {ME: Layers((every,))}, routes)
    return Deploy(ME, epoch, "job", spec, layout, Counters(), "init", (), {}, "", "")


def test_a_report_is_answered_while_a_layer_computes(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(Layer.__call__)
    monkeypatch.setattr(Layer, "__call__", lambda *args: blocked(*args))  # noqa: PLW0108 - a method, to be bound
    agent.say(Resume(ME, 1, 1))
    assert blocked.begun.wait(TIMEOUT_S)
    agent.say(Report(ME, 2, 1, ()))
    progress = agent.hear(Progress)
    assert not blocked.go.is_set()
    assert (progress.epoch, progress.counters.round) == (2, 0)
    assert not any(progress.done.values())
    blocked.go.set()
    agent.say(Decide(ME, 2, 0, None, (), {}, hold=False, hold_now=False))
    assert agent.hear(StepDone).counters.step == 0
    assert agent.hear(Held).finished


def test_a_resume_of_another_round_is_not_heeded(agent: Agent) -> None:
    """It was said twice, and the first one led on to the next hold."""
    agent.say(Resume(ME, 1, 1, 7))
    agent.say(Flag(ME, 1, Flags(hold=True)))
    agent.say(Resume(ME, 1, 1, 0))
    held = agent.hear(Held, StepDone)
    assert held.counters.round == 0  # it is a StepDone: of a round that the second one began
    assert agent.hear(Held).counters.round == 1
    agent.say(Resume(ME, 1, 1, 0))
    agent.say(Resume(ME, 1, 1, 1))
    assert agent.hear(Held, StepDone).counters.round == 1
    assert agent.hear(Held).finished


def test_that_it_holds_shows_in_the_next_hello_of_its_agent(agent: Agent) -> None:
    agent.say(Resume(ME, 1, 1, 0))
    agent.hear(StepDone)
    assert agent.hear(Held).finished
    info = agent.up()
    assert (info.holding, info.round) == (True, 2)


def test_that_it_has_dropped_a_job_is_said(agent: Agent, tmp_path: Path) -> None:
    agent.say(Release(ME, "another job", "d.1"))
    assert agent.hear(Emptied).order == "d.1"
    agent.say(deploy(2, job(tmp_path)))  # which it takes for the job that it has
    assert agent.hear(Ready).epoch == 2
    agent.say(Release(ME, "job", "d.2"))
    assert agent.hear(Emptied).order == "d.2"


def test_what_was_lent_for_a_report_is_given_back(agent: Agent) -> None:
    """The loop had it to come soon to where the report can be answered, and computes as others do
    afterwards.
    """
    loop = threading.get_native_id()  # of the thread that made the device

    def lends() -> int:
        urgency.hurry()
        urgency.lend(loop)
        return urgency.priority()

    with ThreadPoolExecutor(1) as other:
        own = other.submit(lends).result()
    assert os.sched_getparam(0).sched_priority == (urgency.LENT if own > urgency.LENT else 0)
    for epoch in (2, 3):  # the answer comes before that, and the next one after it
        agent.say(Report(ME, epoch, 1, ()))
        assert agent.hear(Progress).epoch == epoch
    assert os.sched_getparam(0).sched_priority == 0


def test_a_job_that_begins_anew_finds_its_samples_open(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Job] = []

    def counted(spec: Job) -> Corpus:
        opened.append(spec)
        return open_corpus(spec)

    monkeypatch.setattr(reading, "open_corpus", counted)
    same = job(tmp_path)
    other = msgspec.structs.replace(same, train=msgspec.structs.replace(same.train, seed=1))
    jobs = (("job", same), ("job", same), ("job", other), ("job", other), ("other", other))
    for epoch, (name, spec) in enumerate(jobs, 2):
        agent.say(Release(ME, jobs[max(0, epoch - 3)][0], "d.1"))  # as before a rollback
        agent.say(msgspec.structs.replace(deploy(epoch, spec), job=name))
        assert agent.hear(Ready).epoch == epoch
    assert opened == [other, other]  # of another job the text may have changed meanwhile


def test_a_device_whose_text_changes_goes_no_further_and_says_so_whenever_it_is_asked(
    agent: Agent, tmp_path: Path
) -> None:
    text, same = tmp_path / "text", job(tmp_path)
    right = text.read_bytes()
    with text.open("r+b") as file:
        file.write(b"X")
    changed = agent.hear(InputsChanged)
    assert changed.job == "job"
    assert str(text) in changed.what
    agent.say(Resume(ME, 1, 1))
    agent.say(Report(ME, 2, 1, ()))
    assert agent.hear(Progress, StepDone).counters.step == 0
    assert agent.hear(InputsChanged, StepDone) == changed
    agent.say(Identify(ME, "job", same))
    assert agent.hear(Identified).error == changed.what
    agent.say(Release(ME, "job", "d.1"))
    text.unlink()
    agent.say(Identify(ME, "job", same))
    assert "No such file" in agent.hear(Identified).error
    agent.say(deploy(3, same))
    failed = agent.hear(DeviceFailed)
    assert (failed.unread, failed.cause) == (True, "")
    text.write_bytes(right)
    agent.say(deploy(4, same))
    ready = agent.hear(Ready)
    assert ready.inputs[0].whole == f"{len(right)}-{hashlib.sha256(right).hexdigest()}"
    assert ready.inputs[0].tokens == len(right) // same.train.sequence * same.train.sequence


def test_a_device_finds_prepared_tokens_changed_before_it_trains_on_them(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large folder: nobody reads all of it first."""
    monkeypatch.setattr(inputs, "SMALL_BYTES", 0)
    folder = prepared(tmp_path / "x", [np.arange(4000) % 120], "uint16")
    file = folder / TOKENS
    right = file.read_bytes()
    file.write_bytes(b"X" + right[1:])
    plain = job(tmp_path)
    data = msgspec.structs.replace(plain.data, source="text", tokenizer="/t", prepared=str(folder))
    same = msgspec.structs.replace(plain, data=data)
    agent.say(Release(ME, "job", "d.1"))
    agent.say(msgspec.structs.replace(deploy(2, same), job="tokens"))
    assert agent.hear(Ready).epoch == 2
    agent.say(Resume(ME, 2, 2))
    changed = agent.hear(InputsChanged, StepDone)
    assert (changed.job, changed.counters.step) == ("tokens", 0)
    assert str(file) in changed.what
    agent.say(Report(ME, 3, 2, ()))
    assert agent.hear(Progress, StepDone).counters.step == 0
    agent.say(Release(ME, "tokens", "d.1"))
    agent.say(Identify(ME, "tokens", same))
    assert str(file) in agent.hear(Identified).error
    file.write_bytes(right)
    agent.say(Identify(ME, "tokens", same))
    assert agent.hear(Identified).inputs[0].whole == f"8000-{hashlib.sha256(right).hexdigest()}"


def test_a_turn_is_given_away_aside_and_comes_back() -> None:
    lock, had = YieldingLock(), threading.Event()

    def other() -> None:
        with lock:
            had.set()

    with lock:
        thread = threading.Thread(target=other)
        thread.start()
        assert not had.is_set()
        with lock.released():
            assert had.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    with lock, pytest.raises(ZeroDivisionError), lock.released():
        _ = 1 / 0
    with lock:
        pass


@pytest.mark.parametrize(("source", "times"), [("init", 1), ("copy", 0)])
def test_what_making_weights_took_is_given_back_and_a_recovery_is_not_kept_waiting_for_it(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, times: int
) -> None:
    agent.say(Resume(ME, 1, 1))
    assert agent.hear(Held).finished
    given_back: list[str] = []
    monkeypatch.setattr(layouts, "give_back_memory", lambda: given_back.append(source))
    agent.say(msgspec.structs.replace(deploy(2, job(tmp_path)), source=source))
    assert agent.hear(Ready).epoch == 2
    assert given_back == [source] * times
