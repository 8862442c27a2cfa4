"""Pre-copies at one source and one target: whatever the rounds come to and in whatever order messages arrive,
the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.parts import Counters, Flags
from oobleckd.worker import sums
from oobleckd.worker.reconfigure.precopy_source import STATE, UPDATE, PreCopySource, Update
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget, is_of
from oobleckd.worker.state.store import Store
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Key
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, check, job, scheduled
from tests.helpers.precopy import NUMBER, TARGET, Late, PreCopyRig

SOURCES = ("a0/0", "b1/0", "b2/0")


def ran(world: World, source: str) -> PreCopyRig:
    """A run of which all was sent ahead from the first boundary on; nothing has arrived yet."""
    rig = PreCopyRig(world, source)
    rig.begin()
    world.run()
    return rig


def kinds(rig: PreCopyRig) -> list[str]:
    return [str(message.key[0]) for message in rig.sent]


@pytest.mark.parametrize("source", SOURCES)
def test_the_target_makes_the_source_s_updates(clipped, tmp_path: Path, source: str) -> None:
    world = World(clipped[0], STAGES, 1, tmp_path)
    rig = ran(world, source)
    check(world, clipped)
    assert kinds(rig) == [STATE] * len(rig.buckets) + [UPDATE] * clipped[0].train.steps
    rig.arrive(rig.sent)
    assert not rig.precopy_target.caught_up
    assert rig.here() is None
    assert rig.replay() == len(rig.sent) + clipped[0].train.steps * (len(rig.buckets) - 1)
    assert rig.precopy_target.caught_up
    rig.check()


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(6))
def test_messages_arrive_late_and_in_any_order(clipped, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    rig = ran(World(clipped[0], STAGES, seed, tmp_path), dice.choice(SOURCES))
    messages = dice.sample(rig.sent, len(rig.sent))
    while messages:
        count = dice.randrange(1, 4)
        rig.arrive(messages[:count])
        messages = messages[count:]
        for _ in range(dice.randrange(4)):
            rig.precopy_target.advance()
    rig.replay()
    rig.check()


@pytest.mark.parametrize("update", ["flushed", "staggered"])
def test_it_begins_anywhere_in_a_round(
    reference, tmp_path: Path, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of the boundary before it, until a device updates: where it did so early, it
    waits for the commit.
    """
    early, advance = set(), Executor.advance
    for seed in range(20):
        world = scheduled(reference, tmp_path, seed, update=update)
        rig, left = PreCopyRig(world, SOURCES[seed % 3]), [random.Random(seed).randrange(60)]

        def counted(self: Executor, rig: PreCopyRig = rig, left: list[int] = left) -> bool:
            left[0] -= self is rig.executor
            if left[0] == 0 and self is rig.executor and not self.machine.finished:
                early.add(self.early is not None)
                precopy_source = rig.begin()
                assert precopy_source.began == (self.early is None)
            return advance(self)

        monkeypatch.setattr(Executor, "advance", counted)
        world.run()
        check(world, reference)
        rig.arrive(rig.sent)
        rig.replay()
        if rig.executor.precopy_source is not None:
            rig.check()
    assert early == ({False, True} if update == "staggered" else {False})


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(6))
def test_updates_that_are_taken_back_are_not_sent(clipped, tmp_path: Path, seed: int) -> None:
    """Staggered updates, and a death in the middle: what is sent is what was committed."""
    source, victim = SOURCES[seed % 3], {"a0/0": "b0/0", "b1/0": "a0/0", "b2/0": "a1/0"}[SOURCES[seed % 3]]
    world = scheduled(clipped, tmp_path, seed, update="staggered")
    world.go_on = True
    rig = PreCopyRig(world, source)
    rig.begin()
    world.nodes[victim].faults.arm(["reduced", "backup", "validate", "commit"][seed % 4], 2 + seed % 3)
    world.run()
    check(world, clipped)
    rig.arrive(rig.sent)
    rig.replay()
    rig.check()


@pytest.mark.parametrize("update", ["flushed", "staggered"])
def test_a_round_that_is_repeated_changes_exponents_alone(
    reference, tmp_path: Path, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "START_EXPONENT", 60)
    changed = msgspec.structs.replace(reference[0], schedule=Schedule(update=update))
    world = World(changed, STAGES, 3, tmp_path)
    rig = ran(world, "b1/0")
    assert rig.executor.counters.round > rig.executor.counters.step
    updates = [message for message in rig.sent if message.key[0] == UPDATE]
    assert any(not message.tensors for message in updates)
    rig.arrive(rig.sent)
    rig.replay()
    rig.check()


def test_a_round_that_is_skipped_changes_counters_alone(
    reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(sums.empty([(1,)], True, torch.device("cpu")))  # as on this machine
    add, rounds = kind.add, set[int]()
    world = World(reference[0], STAGES, 2, tmp_path)

    def add_with_nan(self, grads, exponents, num_contributions):
        executor = world.nodes["a1/0"].executor
        if executor.counters.round == 2 and any(part is self for part in executor.reducer.parts.values()):
            rounds.add(executor.counters.round)
            grads = [torch.full_like(grads[0], torch.nan), *grads[1:]] if grads else grads
        return add(self, grads, exponents, num_contributions)

    monkeypatch.setattr(kind, "add", add_with_nan)
    rig = ran(world, "b2/0")
    assert rounds == {2}
    assert rig.executor.counters.applied == rig.executor.counters.step - 1
    rig.arrive(rig.sent)
    rig.replay()
    rig.check()


@pytest.mark.parametrize("exact", [True, False])
def test_floating_point_sums_are_no_other(tmp_path: Path, exact: bool) -> None:
    rig = ran(World(job(tmp_path, exact=exact), STAGES, 0, tmp_path), "b1/0")
    rig.arrive(rig.sent)
    rig.replay()
    rig.check()


def test_what_is_missing_is_not_there(reference, tmp_path: Path) -> None:
    rig = ran(World(reference[0], STAGES, 0, tmp_path), "a0/0")
    lost = next(message for message in rig.sent if message.key[0] == UPDATE and message.key[3] == 3)
    rig.arrive([message for message in rig.sent if message is not lost])
    rig.replay()
    assert rig.here() is None
    assert rig.precopy_target.round == 3
    assert rig.precopy_target.caught_up  # as far as is known there
    rig.arrive([lost])
    assert not rig.precopy_target.caught_up
    rig.replay()
    rig.check()


def test_a_stream_ends_after_its_rounds_and_says_so(reference, tmp_path: Path) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "a0/0")
    precopy_source = rig.begin(rounds=2)
    assert precopy_source.sent_to(TARGET) == frozenset(rig.buckets)
    world.run()
    assert kinds(rig) == [STATE] * len(rig.buckets) + [UPDATE] * 2
    assert precopy_source.sent_to(TARGET) == frozenset()
    rig.arrive(rig.sent)
    rig.replay()
    assert rig.here() is None


def test_a_broken_link_ends_it_too(reference, tmp_path: Path) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "a0/0")
    precopy_source = rig.begin()
    world.run()
    assert precopy_source.sent_to(TARGET) == frozenset(rig.buckets)
    precopy_source.broken.add(TARGET)
    assert precopy_source.sent_to(TARGET) == frozenset()
    before = len(rig.sent)
    executor = rig.executor
    precopy_source.committed(executor.counters, executor.counters, executor.store, {}, hold=False)
    assert len(rig.sent) == before


class Slow:
    """A transport on which the last messages of a state have not left yet when all are told to hold; ``left``
    have.
    """

    def __init__(self, rig: PreCopyRig, left: int) -> None:
        self.rig, self.left = rig, left
        rig.world.recall = self.recall  # type: ignore[method-assign]

    def recall(self, source: str, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        assert (source, peer) == (self.rig.source, TARGET)
        states = [message for message in self.rig.sent if message.key[0] == STATE]
        taken = [message.key for message in states[self.left :] if unwanted(message.key)]
        self.rig.sent = [message for message in self.rig.sent if message.key not in taken]
        return taken


@pytest.mark.parametrize("left", range(4))
def test_what_has_not_left_when_all_hold_is_no_part_of_it(reference, tmp_path: Path, left: int) -> None:
    """The rest gets the last update, and is the state of that boundary."""
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "b1/0")
    precopy_source, _ = rig.begin(), Slow(rig, left)
    for node in world.nodes.values():
        node.executor.machine.flag(Flags(hold=True))
    world._held_early = lambda: False  # type: ignore[method-assign]
    world.run()
    executor = rig.executor
    assert (executor.counters.step, executor.holding) == (1, True)
    there = rig.buckets[:left]
    assert precopy_source.sent_to(TARGET) == frozenset(there)
    updates = [msgspec.msgpack.decode(each.meta, type=Update) for each in rig.sent if each.key[0] == UPDATE]
    assert [tuple(update.exponents) for update in updates] == [there] * bool(there)
    rig.arrive(rig.sent)
    rig.replay()
    assert rig.precopy_target.caught_up == (left >= len(rig.buckets))
    for bucket in rig.buckets:
        state = rig.precopy_target.state_at(bucket, executor.counters)
        assert (state is not None) == (bucket in there)
        if state is not None:
            pairs = zip(state.tensors(), executor.store.buckets[bucket].tensors(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_beside_an_accelerator_all_waits_in_the_host_s_memory(reference, tmp_path: Path) -> None:
    """Until all have stopped; "meta" stands for the accelerator, on which nothing is computed but where
    tensors are.
    """
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "b1/0")
    store = Store(world.spec, torch.device("meta"))
    precopy_target = PreCopyTarget(
        NUMBER, world.job, store, rig.messenger, dict.fromkeys(rig.buckets, "b1/0")
    )
    rig.begin()
    world.run()
    rig.arrive(rig.sent[:-1])
    while precopy_target.advance():
        pass
    assert precopy_target.caught_up
    assert precopy_target.round == 0
    states = [precopy_target.state_at(bucket, Counters()) for bucket in rig.buckets]
    assert all(tensor.device.type == "meta" for state in states for tensor in state.tensors())
    rig.arrive(rig.sent[-1:])
    while precopy_target.advance(stopped=True):
        pass
    assert precopy_target.round == rig.executor.counters.round
    state = precopy_target.state_at(rig.buckets[0], rig.executor.counters)
    assert state is not None
    assert all(tensor.device.type == "meta" for tensor in state.tensors())
    assert all(param.requires_grad for param in state.params)


def test_nothing_is_taken_back_whose_update_is_on_its_way(reference, tmp_path: Path) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "b1/0")
    precopy_source, _ = rig.begin(), Slow(rig, 0)
    world.run()  # it holds at the end, many updates later
    assert precopy_source.sent_to(TARGET) == frozenset(rig.buckets)
    rig.arrive(rig.sent)
    rig.replay()
    rig.check()


def test_who_holds_begins_nothing(reference, tmp_path: Path) -> None:
    """In the stop it is copied as it is."""
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "b1/0")
    executor = rig.executor
    precopy_source = PreCopySource(NUMBER, "b1/0", executor.messenger, {TARGET: list(rig.buckets)}, 9)
    precopy_source.committed(executor.counters, executor.counters, executor.store, {}, hold=True)
    assert not precopy_source.began
    assert not rig.sent


def test_what_is_given_up_is_taken_back(reference, tmp_path: Path) -> None:
    rig = PreCopyRig(World(reference[0], STAGES, 0, tmp_path), "b1/0")
    rig.begin()
    Slow(rig, 1)
    rig.executor.end_precopy()
    assert len(rig.sent) == 1
    assert rig.executor.precopy_source is None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    monkeypatch.setattr(Late, "made", [])
    monkeypatch.setattr("oobleckd.worker.reconfigure.precopy_source.Hosted", Late)
    return Late.made


def test_a_copy_that_takes_its_time_leaves_before_the_updates_of_it(
    reference, tmp_path: Path, late: list[Late]
) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "b1/0")
    precopy_source = rig.begin()
    assert not rig.sent
    assert precopy_source.sent_to(TARGET) == frozenset()
    world.run()
    assert kinds(rig)[: len(rig.buckets) + 1] == [STATE] * len(rig.buckets) + [UPDATE]
    assert late[0].settled == 1, "the weights changed while they were copied"
    rig.arrive(rig.sent)
    rig.replay()
    rig.check()


def test_a_copy_that_comes_in_the_middle_of_a_step_leaves_at_once(
    reference, tmp_path: Path, late: list[Late]
) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, "b1/0")
    precopy_source = rig.begin()
    late[0].come()
    assert kinds(rig) == [STATE] * len(rig.buckets)
    assert precopy_source.sent_to(TARGET) == frozenset(rig.buckets)


def test_a_copy_that_comes_too_late_does_not_leave(reference, tmp_path: Path, late: list[Late]) -> None:
    rig = PreCopyRig(World(reference[0], STAGES, 0, tmp_path), "b1/0")
    precopy_source = rig.begin()
    rig.executor.end_precopy()
    late[0].come()
    assert not rig.sent
    assert precopy_source.sent_to(TARGET) == frozenset()


def test_messages_of_precopies_that_are_over_are_known() -> None:
    assert is_of((STATE, NUMBER, 0), NUMBER)
    assert is_of((UPDATE, NUMBER - 1, "a/0", 3), NUMBER)
    assert not is_of((STATE, NUMBER + 1, 0), NUMBER)
    assert not is_of(("T", 1, 0), NUMBER)
