"""Two device processes and real links between them: one trains, its layers are copied to the other meanwhile,
and both go on together.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment, Transfer
from oobleckd.protocol import codec
from oobleckd.protocol.datamessages import Identified
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.messages import (
    Deploy,
    DeviceFailed,
    Emptied,
    Flag,
    Held,
    PreCopied,
    PreCopy,
    Ready,
    Release,
    Resume,
    StepDone,
)
from oobleckd.protocol.parts import Counters, Flags, Peer
from oobleckd.worker.agent.outbox import peek
from oobleckd.worker.device import device, layouts
from oobleckd.worker.device.agent_link import DeviceLink
from oobleckd.worker.device.context import DeviceContext
from oobleckd.worker.models import ModelSpec, load_spec
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.framing import read_frame
from tests.unit.worker.test_device import TIMEOUT_S, Agent, job

SOURCE, TARGET = "n/0", "m/0"
EVERY = Range(0, 4)
SECRET = "5e" * 32
ENDLESS = 100_000


@dataclass
class Pair:
    """Both processes with their agents' ends."""

    processes: dict[str, device.DeviceProcess]
    agents: dict[str, Listener]
    tmp_path: Path
    evaluation: Eval

    @property
    def peers(self) -> dict:
        return {name: process.transport.peer for name, process in self.processes.items()}

    def deploy(
        self, epoch: int, devices: list[str], counters: Counters, source: str, precopied: int = 0
    ) -> None:
        spec = job(self.tmp_path)
        train = msgspec.structs.replace(spec.train, steps=ENDLESS)
        spec = msgspec.structs.replace(spec, train=train, eval=self.evaluation)
        routes = tuple(Route(mb, epoch, (Segment(devices[mb % len(devices)], EVERY),)) for mb in range(2))
        transfers = self.transfers if source == "copy" else ()
        layout = Layout(epoch, 4, {name: Layers((EVERY,)) for name in devices}, routes)
        for name in devices:
            self.agents[name].say(
                Deploy(
                    name,
                    epoch,
                    "job",
                    spec,
                    layout,
                    counters,
                    source,
                    transfers,
                    self.peers,
                    "",
                    SECRET,
                    precopied,
                )
            )

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(Transfer(layer, SOURCE, TARGET, 1) for layer in EVERY.layers())

    def prepare(self, number: int, rounds: int = ENDLESS) -> None:
        spec = self.processes[SOURCE].executor.job
        for name in (SOURCE, TARGET):
            peers = {other: peer for other, peer in self.peers.items() if other != name}
            self.agents[name].say(PreCopy(name, number, "job", spec, self.transfers, rounds, peers, SECRET))

    def resume(self, epoch: int, devices: list[str]) -> None:
        for name in devices:
            self.agents[name].say(Resume(name, epoch, epoch))

    def hold(self, epoch: int, devices: list[str]) -> Counters:
        for name in devices:
            self.agents[name].say(Flag(name, epoch, Flags(hold=True)))
        held = {self.agents[name].hear(Held).counters for name in devices}
        assert len(held) == 1
        return held.pop()

    def check_equal(self) -> None:
        ours, theirs = (self.processes[name].executor.store.buckets for name in (SOURCE, TARGET))
        assert ours.keys() == theirs.keys()
        for bucket, state in ours.items():
            assert state.exponents == theirs[bucket].exponents
            pairs = zip(state.tensors(), theirs[bucket].tensors(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


class Listener(Agent):
    """Reads whatever its device says, as a real agent does, so that no device waits for it to be heard."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        self.frames: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError, EOFError):
            while (data := read_frame(self.sock)) is not None:
                self.frames.put(data)

    def hear(self, *kinds: type) -> Any:
        while True:
            data = self.frames.get(timeout=TIMEOUT_S)
            if peek(data).type in {kind.__struct_config__.tag for kind in kinds}:
                return codec.decode_from_worker(data)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The first trains alone; the second has no job. The parameter: what the job evaluates, if anything."""
    monkeypatch.setattr(device, "DeviceLink", partial(DeviceLink, on_closed=lambda: None))
    with ExitStack() as ends:
        processes, agents = {}, {}
        for name in (SOURCE, TARGET):
            ours, theirs = socket.socketpair()
            ends.enter_context(ours)
            place = DeviceContext(name, "cpu", "host", "127.0.0.1", tmp_path)
            process = processes[name] = device.DeviceProcess(place, theirs.detach(), ActivityPage())
            ends.callback(process.transport.close)
            ends.callback(process.link.close)
            threading.Thread(target=process.run, daemon=True).start()
            agents[name] = Listener(ours)
        pair = Pair(processes, agents, tmp_path, getattr(request, "param", Eval()))
        pair.deploy(1, [SOURCE], Counters(), "init")
        agents[SOURCE].hear(Ready)
        pair.resume(1, [SOURCE])
        agents[SOURCE].hear(StepDone)
        yield pair
        for name, agent in agents.items():
            agent.say(Release(name, "job", "d.1"))
            agent.hear(Emptied)


@pytest.mark.parametrize(
    "pair", [Eval(), Eval(every=1, sequences=8, held_out=0.5)], ids=["steps", "evaluations"], indirect=True
)
def test_layers_are_copied_while_the_source_trains_and_the_stop_copies_none(pair: Pair) -> None:
    """Most rounds evaluate where there are evaluations: two after each step."""
    pair.prepare(7)
    precopied = pair.agents[TARGET].hear(PreCopied)
    assert precopied.number == 7
    before = pair.agents[SOURCE].hear(StepDone).counters.step
    for _ in range(5):
        pair.agents[SOURCE].hear(StepDone)  # it goes on
    counters = pair.hold(1, [SOURCE])
    assert counters.step > before
    pair.deploy(2, [SOURCE, TARGET], counters, "copy", precopied=7)
    ready = pair.agents[TARGET].hear(Ready)
    assert (ready.epoch, ready.copied_bytes) == (2, 0)
    assert ready.staged_bytes > 0
    pair.agents[SOURCE].hear(Ready)
    pair.resume(2, [SOURCE, TARGET])
    pair.agents[TARGET].hear(StepDone)
    pair.agents[TARGET].hear(StepDone)
    pair.hold(2, [SOURCE, TARGET])
    pair.check_equal()
    assert pair.processes[TARGET].precopy_target is None
    assert pair.processes[SOURCE].executor.precopy_source is None


def test_a_stream_that_ended_before_the_stop_costs_the_copy(pair: Pair) -> None:
    pair.prepare(7, rounds=3)
    pair.agents[TARGET].hear(PreCopied)
    for _ in range(5):
        pair.agents[SOURCE].hear(StepDone)
    counters = pair.hold(1, [SOURCE])
    pair.deploy(2, [SOURCE, TARGET], counters, "copy", precopied=7)
    ready = pair.agents[TARGET].hear(Ready)
    assert ready.copied_bytes > 0
    assert ready.staged_bytes == 0
    pair.agents[SOURCE].hear(Ready)
    pair.resume(2, [SOURCE, TARGET])
    pair.agents[TARGET].hear(StepDone)
    pair.hold(2, [SOURCE, TARGET])
    pair.check_equal()


def test_a_precopy_that_is_given_up_leaves_nothing(pair: Pair) -> None:
    pair.prepare(7)
    pair.agents[TARGET].hear(PreCopied)
    spec = pair.processes[SOURCE].executor.job
    for name in (SOURCE, TARGET):
        pair.agents[name].say(PreCopy(name, 7, "job", spec, (), 0, {}, ""))
    pair.prepare(8)  # what follows is heard after it
    assert pair.agents[TARGET].hear(PreCopied).number == 8
    assert pair.processes[SOURCE].executor.precopy_source.number == 8
    assert pair.processes[TARGET].precopy_target.number == 8


def test_links_to_strangers_are_made_anew_but_for_the_plan_that_is_precopied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = pair.processes[SOURCE].transport
    named: list[set[str]] = []
    configure = transport.configure

    def noted(peers: dict[str, Peer], secret: bytes, anew: frozenset[str]) -> None:
        named.append(set(anew))
        configure(peers, secret, anew)

    monkeypatch.setattr(transport, "configure", noted)
    pair.prepare(7)
    pair.agents[TARGET].hear(PreCopied)
    counters = pair.hold(1, [SOURCE])
    for epoch, precopied in ((2, 0), (3, 7)):
        pair.deploy(epoch, [SOURCE, TARGET], counters, "copy", precopied=precopied)
        for name in (SOURCE, TARGET):
            assert pair.agents[name].hear(Ready).epoch == epoch
    assert named == [{TARGET}, {TARGET}, set()]
    pair.resume(3, [SOURCE, TARGET])
    pair.agents[TARGET].hear(StepDone)
    pair.deploy(4, [SOURCE, TARGET], pair.hold(3, [SOURCE, TARGET]), "copy")
    assert pair.agents[SOURCE].hear(Ready).epoch == 4
    assert named[-1] == set()


def preload(pair: Pair, spec: Job) -> None:
    pair.agents[TARGET].say(PreCopy(TARGET, 0, "job", spec, (), 0, {}, "", preload=True))


def test_who_has_preloaded_has_only_the_copies_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    begin = device.DeviceProcess._begin_job

    def noted(process: device.DeviceProcess, *args: Any) -> Any:
        begun.append(process.context.device)
        return begin(process, *args)

    monkeypatch.setattr(device.DeviceProcess, "_begin_job", noted)
    preload(pair, pair.processes[SOURCE].executor.job)
    said = pair.agents[TARGET].hear(Identified)
    assert said.inputs == pair.processes[SOURCE].reading.inputs
    assert said.canary
    pair.agents[SOURCE].hear(StepDone)  # it goes on
    preload(pair, pair.processes[SOURCE].executor.job)  # said twice, it is done once
    counters = pair.hold(1, [SOURCE])
    pair.deploy(2, [SOURCE, TARGET], counters, "copy")
    ready = pair.agents[TARGET].hear(Ready)
    assert ready.copied_bytes > 0
    assert ready.canary == said.canary
    assert begun == [TARGET]
    pair.agents[SOURCE].hear(Ready)
    pair.resume(2, [SOURCE, TARGET])
    pair.agents[TARGET].hear(StepDone)
    pair.hold(2, [SOURCE, TARGET])
    pair.check_equal()


def test_what_is_pre_copied_is_not_ended_by_a_preload(pair: Pair) -> None:
    pair.prepare(7)
    pair.agents[TARGET].hear(PreCopied)
    preload(pair, pair.processes[SOURCE].executor.job)
    counters = pair.hold(1, [SOURCE])
    pair.deploy(2, [SOURCE, TARGET], counters, "copy", precopied=7)
    ready = pair.agents[TARGET].hear(Ready)
    assert ready.copied_bytes == 0
    assert ready.staged_bytes > 0


def test_who_cannot_load_the_job_yet_ends_it_only_where_it_is_deployed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, tries = pair.processes[SOURCE].executor.job, []

    def load(job: Job) -> ModelSpec:
        tries.append(job)
        if len(tries) != 2:
            raise UserError("model.checkpoint: /m: not readable", "make it readable")
        return load_spec(job)

    monkeypatch.setattr(layouts, "load_spec", load)
    preload(pair, spec)
    preload(pair, spec)  # of the first nothing is left
    first = pair.agents[TARGET].hear(Identified, DeviceFailed)
    assert isinstance(first, Identified)
    pair.agents[TARGET].say(Release(TARGET, "job", "d.0"))
    pair.agents[TARGET].hear(Emptied)
    counters = pair.hold(1, [SOURCE])
    pair.deploy(2, [SOURCE, TARGET], counters, "copy")
    failed = pair.agents[TARGET].hear(Ready, DeviceFailed)
    assert (failed.error, len(tries)) == ("model.checkpoint: /m: not readable", 3)


def test_who_cannot_read_the_text_says_so_before_it_is_deployed(pair: Pair) -> None:
    spec = pair.processes[SOURCE].executor.job
    gone = msgspec.structs.replace(spec.data, path=str(pair.tmp_path / "none"))
    preload(pair, msgspec.structs.replace(spec, data=gone))
    failed = pair.agents[TARGET].hear(Identified, DeviceFailed)
    assert isinstance(failed, DeviceFailed)
    assert failed.unread
    assert pair.processes[TARGET].executor is None
