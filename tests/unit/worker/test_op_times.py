"""When a device did what: every task of a round once, in order, and nothing of it in the bits."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.planner.plan import BACKWARD, FORWARD, Range, Route, Segment
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.messages import FromWorker, OpTimes
from oobleckd.protocol.parts import Counters, OpTime
from oobleckd.worker.round import op_times
from oobleckd.worker.round.op_times import Piece, Round, sampled, told
from oobleckd.worker.round.round import Work
from oobleckd.worker.round_machine.tasks import Task
from oobleckd.worker.runtime.timing import DeviceTimer
from oobleckd.worker.sharding.group import ShardGroup
from oobleckd.worker.state.gathered import GatheredLayer
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, check, job

ROUND = Round("a/0", "job", 2, 1, Counters(3, 3, 3))
HOPS = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 4)))


class Watched(World):
    """A world whose devices tell of every round from now on."""

    def watch(self, every: int = 1) -> None:
        self.times: list[tuple[OpTimes, tuple[OpTime, ...]]] = []
        for node in self.nodes.values():
            node.executor.sample_every = every

    def _hear(self, device: str, message: FromWorker) -> None:
        if isinstance(message, OpTimes):
            self.times.append((message, ops_of(message)))
        super()._hear(device, message)


def ops_of(message: OpTimes) -> tuple[OpTime, ...]:
    return msgspec.msgpack.decode(message.ops, type=tuple[OpTime, ...])


def watched(reference, tmp_path: Path, seed: int = 0, every: int = 1, **schedule: Any) -> Watched:
    changed = msgspec.structs.replace(reference[0], schedule=Schedule(**schedule))
    world = Watched(changed, STAGES, seed, tmp_path)
    world.watch(every)
    return world


@pytest.mark.parametrize(("backward", "kinds"), [("fused", "FB"), ("decoupled", "FIW")])
def test_every_task_of_a_round_once(reference, tmp_path: Path, backward: str, kinds: str) -> None:
    world = watched(reference, tmp_path, backward=backward)
    world.run()
    check(world, reference)
    assert len(world.times) == len(world.nodes) * reference[0].train.steps
    hops = {
        (segment.device, position, route.micro_batch, segment.layers.start)
        for route in world.layout.routes
        for position, segment in enumerate(route.segments)
    }
    for message, ops in world.times:
        done = [(op.kind, op.stage, op.micro_batch, op.layer) for op in ops if op.kind != "U"]
        assert len(done) == len(set(done))
        mine = {hop[1:] for hop in hops if hop[0] == message.device}
        assert set(done) == {(kind, *hop) for hop in mine for kind in kinds}
        assert ops[-1].kind == "U"
        assert all(op.start_s <= op.stop_s for op in ops)
        assert all(before.stop_s <= after.start_s for before, after in pairwise(ops))
        assert not any(op.again or op.early for op in ops)
        assert (message.layout, message.epoch, message.repaired) == (1, 1, False)


def test_one_of_so_many_rounds_is_told(reference, tmp_path: Path) -> None:
    world = watched(reference, tmp_path, every=2)
    world.run()
    assert sorted({message.counters.round for message, _ in world.times}) == [0, 2, 4]


def test_a_repaired_round_is_told_always(reference, tmp_path: Path) -> None:
    world = watched(reference, tmp_path, every=1000)
    world.nodes["b1/0"].faults.arm("backward", 2)
    world.run()
    check(world, reference)
    repaired = [(message, ops) for message, ops in world.times if message.counters.round == 2]
    assert repaired
    assert all(message.repaired for message, _ in repaired)
    assert any(op.again for _, ops in repaired for op in ops)
    others = {message.counters.round for message, _ in world.times} - {2}
    assert others == {0}


def test_a_staggered_update_is_marked(reference, tmp_path: Path) -> None:
    world = watched(reference, tmp_path, update="staggered")
    world.run()
    updates = [[op for op in ops if op.kind == "U"] for _, ops in world.times]
    assert all(updates)
    assert any(op.early for ops in updates for op in ops)
    for _, ops in world.times:
        assert {op.kind for op in ops} == {"F", "B", "U"}


def test_nothing_is_told_unless_it_is_asked_for(reference, tmp_path: Path) -> None:
    world = watched(reference, tmp_path, every=0)
    world.nodes["b1/0"].faults.arm("backward", 2)
    world.run()
    assert world.times == []


def task(*redone: int) -> Task:
    mask = (0, 1, 2, 3) if redone else None
    return Task(Route(5, 2, HOPS, mask, redone=redone), 1)


def test_what_had_been_done_is_said_so() -> None:
    new, fresh = task(FORWARD, FORWARD), task()
    pieces = [Piece("F", new, 0.0, 1.0), Piece("B", new, 1.0, 2.0), Piece("F", fresh, 2.0, 3.0)]
    pieces += [Piece("B", task(BACKWARD, BACKWARD), 3.0, 4.0), Piece("S", new, 4.0, 5.0)]
    message = told(ROUND, pieces, DeviceTimer(lambda: 5.0), repaired=True)
    assert message is not None
    assert [op.again for op in ops_of(message)] == [True, False, False, True, False]
    assert [(op.stage, op.micro_batch, op.layer) for op in ops_of(message)] == [(1, 5, 2)] * 5
    assert message.repaired


def test_layers_of_a_forward_pass_ahead_are_one_piece() -> None:
    other = Task(Route(6, 2, HOPS), 1)
    pieces = [Piece("S", task(), 0.0, 1.0), Piece("S", task(), 1.0, 2.0), Piece("S", other, 2.0, 3.0)]
    pieces += [Piece("F", other, 3.0, 4.0), Piece("S", other, 4.0, 5.0)]
    message = told(ROUND, pieces, DeviceTimer(lambda: 5.0), repaired=False)
    assert message is not None
    assert [(op.start_s, op.stop_s) for op in ops_of(message)] == [
        (0.0, 2.0),
        (2.0, 3.0),
        (3.0, 4.0),
        (4.0, 5.0),
    ]


def test_an_op_waits_for_the_weights_of_its_first_layer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where computing a layer takes as long as gathering the next one does."""
    gather_s, gathers = 0.003, dict[int, list[int]]()

    def gather(self: ShardGroup, layer: GatheredLayer, gather: Any = ShardGroup._gather) -> None:
        gathers.setdefault(threading.get_ident(), []).append(layer.layer)
        time.sleep(gather_s)
        gather(self, layer)

    def compute(self: Work, compute: Any = Work.compute) -> bool:
        more = compute(self)
        for node in world.nodes.values():
            if (ahead := node.executor.group._ahead) is not None:
                ahead[1]()
        return more

    monkeypatch.setattr(ShardGroup, "_gather", gather)
    monkeypatch.setattr(Work, "compute", compute)
    world = Watched(job(tmp_path, steps=2), {"a": [(0, 4)]}, 0, tmp_path, devices_per_stage=2)
    world.watch()
    world.run()
    ops = [op for _, told_ops in world.times for op in told_ops]
    assert all(0 <= op.gather_s <= op.stop_s - op.start_s for op in ops)
    waited = [op for op in ops if op.gather_s >= gather_s]
    assert waited == [op for op in ops if op.kind != "U"]
    here = gathers[threading.get_ident()]
    assert len(here) == len(waited)
    assert set(here) == {0, 3}, "of a forward pass, and of a backward pass"


def test_too_many_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_times, "MAX_OPS", 3)
    pieces = [Piece("F", task(), float(i), i + 1.0) for i in range(4)]
    assert told(ROUND, pieces, DeviceTimer(lambda: 5.0), repaired=False) is None
    assert told(ROUND, pieces[1:], DeviceTimer(lambda: 5.0), repaired=False) is not None


def test_which_rounds() -> None:
    assert [round_ for round_ in range(10) if sampled(round_, 4, repaired=False)] == [0, 4, 8]
    assert sampled(3, 4, repaired=True)
    assert not sampled(0, 0, repaired=True)
