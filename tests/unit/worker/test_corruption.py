"""One flipped bit in a real engine: found at the next vote, by everybody, and its device can be named
(docs/corruption.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from oobleckd.core import blame
from oobleckd.core.blame import Dispute
from oobleckd.protocol.corruption import Fingerprints
from oobleckd.protocol.messages import Corrupted, FromWorker, StepDone
from oobleckd.worker.device.flip import flip
from oobleckd.worker.messaging.gather import Gathered
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.round_machine.commands import SendVote
from oobleckd.worker.round_machine.commit import ReplicasDisagree
from oobleckd.worker.sums.guard import MeansChanged, SumsChanged
from oobleckd.worker.training.executor import Executor
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, Reference, check, job, scheduled

THREE = {**STAGES, "c": [(0, 4)]}
FLIP_AT = 2
"""The round in which a bit flips."""


class Watched(World):
    """A world in which a device has a bit flipped, and that keeps what is told of a step."""

    truth: dict[int, Fingerprints]

    def _hear(self, device: str, message: FromWorker) -> None:
        if isinstance(message, StepDone) and message.fingerprints is not None:
            self.truth[message.counters.step] = message.fingerprints
        super()._hear(device, message)

    def flip(self, victim: str, how: str, after: int = 0, act: Callable[[str, Reducer], bool] = flip) -> None:
        """When ``victim`` has done ``after`` pieces of work of the round, or as soon then as there is
        something to flip.
        """
        executor = self.nodes[victim].executor
        advance = executor.advance
        flipped: list[int] = []
        done = 0

        def flipping() -> bool:
            nonlocal done
            here = executor.counters.round == FLIP_AT
            worked = advance()
            done += here and worked
            due = executor.counters.round == FLIP_AT and done >= after
            if due and not flipped and act(how, executor.reducer):
                flipped.append(FLIP_AT)
            return worked

        executor.advance = flipping  # type: ignore[method-assign]

    def _in(self, device, act):
        return super()._in(device, (lambda e: e.advance()) if act is Executor.advance else act)


def truth(reference, tmp_path: Path, step: int) -> Fingerprints:
    """What the bits must be: of a run in which nothing flips, on other stages."""
    world = Watched(reference[0], {"a": [(0, 3), (3, 4)], "b": [(0, 4)]}, 1, tmp_path)
    world.truth = {}
    for node in world.nodes.values():
        node.executor.check.recheck = step
    world.run()
    check(world, reference)
    return world.truth[step]


@pytest.mark.thin(6)
@pytest.mark.parametrize("how", ["flip-weight", "flip-moment"])
@pytest.mark.parametrize("victim", ["a1/0", "b0/0", "c0/0"])
@pytest.mark.parametrize("seed", range(3))
def test_with_three_copies_most_holders_name_it(
    reference, tmp_path: Path, victim: str, how: str, seed: int
) -> None:
    world = Watched(reference[0], THREE, seed, tmp_path)
    world.flip(victim, how)
    with pytest.raises(ReplicasDisagree) as caught:
        world.run()
    assert world.nodes[victim].executor.counters.step in {FLIP_AT, FLIP_AT + 1}
    assert blame.outvoted(caught.value.odds) == (victim,)


@pytest.mark.thin(6)
@pytest.mark.parametrize("victim", ["a1/0", "b0/0", "c0/0"])
@pytest.mark.parametrize("after", range(1, 6))
def test_whenever_it_flips_between_a_forward_and_its_backward_too(
    reference, tmp_path: Path, victim: str, after: int
) -> None:
    world = Watched(reference[0], THREE, 0, tmp_path)
    world.flip(victim, "flip-weight", after)
    with pytest.raises(ReplicasDisagree) as caught:
        world.run()
    assert blame.outvoted(caught.value.odds) == (victim,)


@pytest.mark.thin(6)
@pytest.mark.parametrize("how", ["flip-weight", "flip-moment"])
@pytest.mark.parametrize("victim", ["a1/0", "b0/0", "b2/0"])
@pytest.mark.parametrize("seed", range(3))
def test_with_two_copies_what_comes_out_again_names_it(
    reference, tmp_path: Path, victim: str, how: str, seed: int
) -> None:
    """Also where the wrong weight was used before it was found: nobody has updated with what came of it."""
    world = Watched(reference[0], STAGES, seed, tmp_path)
    world.flip(victim, how)
    with pytest.raises(ReplicasDisagree) as caught:
        world.run()
    step = max(node.executor.counters.step for node in world.nodes.values())
    assert blame.outvoted(caught.value.odds) == ()
    assert blame.refuted(Dispute(step, caught.value.odds), truth(reference, tmp_path, step)) == (victim,)


def flip_copy(_: str, reducer: Reducer) -> bool:
    """Flip a bit of the first copy in bfloat16 that layers of the device compute with."""
    leaf = next(leaf for state in reducer.store.buckets.values() for leaf in state.rounded.values())
    leaf.data.view(torch.int16).view(-1)[0] ^= 1 << 6
    return True


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("bf16")
    world = World(job(folder, precision="bf16"), THREE, 0, folder)
    world.run()
    return world.job, world.losses, world.weights()


@pytest.mark.parametrize(("victim", "after"), [("a1/0", 0), ("b1/0", 1), ("c0/0", 1)])
def test_a_copy_of_a_weight_that_is_not_what_it_rounds_to_is_found(
    bf16, tmp_path: Path, victim: str, after: int
) -> None:
    """The weight itself is right, all the while."""
    world = Watched(bf16[0], THREE, 0, tmp_path)
    world.flip(victim, "", after, flip_copy)
    with pytest.raises(ReplicasDisagree) as caught:
        world.run()
    assert world.nodes[victim].executor.counters.round == FLIP_AT
    assert blame.outvoted(caught.value.odds) == (victim,)


def test_what_flips_in_a_copy_behind_the_digest_is_gone_with_the_update(bf16, tmp_path: Path) -> None:
    world = World(bf16[0], THREE, 0, tmp_path)
    executor = world.nodes["b1/0"].executor
    send = executor._send_vote

    def flipping(command: SendVote) -> None:
        assert flip_copy("", executor.reducer)
        send(command)

    executor._send_vote = flipping  # type: ignore[method-assign]
    world.run()
    check(world, bf16)


@pytest.mark.parametrize("victim", ["a1/0", "b0/0", "b2/0"])
@pytest.mark.parametrize("seed", range(3))
def test_a_sum_that_changes_before_it_is_contributed_is_found_by_its_device(
    reference, tmp_path: Path, victim: str, seed: int
) -> None:
    world = Watched(reference[0], STAGES, seed, tmp_path)
    world.flip(victim, "flip-sum")
    with pytest.raises(SumsChanged):
        world.run()
    assert world.nodes[victim].executor.counters.round == FLIP_AT


@pytest.mark.thin(6)
@pytest.mark.parametrize("victim", ["a1/0", "b0/0", "c0/0"])
@pytest.mark.parametrize("seed", range(3))
def test_a_mean_that_changes_after_it_is_made_is_found_by_its_device_where_it_is_given(
    reference, tmp_path: Path, victim: str, seed: int
) -> None:
    """With three copies: those who were given it would outvote who is right."""
    world = Watched(reference[0], THREE, seed, tmp_path)
    world.flip(victim, "flip-mean")
    with pytest.raises((MeansChanged, ReplicasDisagree)) as caught:
        world.run()
    if isinstance(caught.value, ReplicasDisagree):  # one that it keeps, as the second maker, and updates with
        assert blame.outvoted(caught.value.odds) == (victim,)
        assert {odd.what for odd in caught.value.odds} == {"state"}
    else:
        assert world.nodes[victim].executor.counters.round == FLIP_AT


@pytest.mark.parametrize("victim", ["a1/0", "b0/0"])
def test_a_mean_that_changes_after_it_is_made_is_found_with_two_copies(
    reference, tmp_path: Path, victim: str
) -> None:
    world = Watched(reference[0], STAGES, 1, tmp_path)
    world.flip(victim, "flip-mean")
    with pytest.raises(ReplicasDisagree) as caught:
        world.run()
    step = max(node.executor.counters.step for node in world.nodes.values())
    assert step == FLIP_AT + 1
    assert blame.refuted(Dispute(step, caught.value.odds), truth(reference, tmp_path, step)) == (victim,)


@pytest.mark.thin(6)
@pytest.mark.parametrize("stages", [STAGES, THREE], ids=["two-copies", "three-copies"])
@pytest.mark.parametrize("victim", ["a1/0", "b0/0", "b1/0"])
@pytest.mark.parametrize("check_every", [1, 2])
def test_sums_that_are_added_up_wrongly_are_found_and_named_by_what_comes_out_again(
    reference, tmp_path: Path, stages: Any, victim: str, check_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of what others have contributed flips where the mean is made of it, in a compared step."""
    make = Reducer._make

    def made(self: Reducer, bucket: int, gathered: Gathered) -> None:
        if self.exchange.device == victim and self.step == FLIP_AT and bucket == min(self.store.buckets):
            parts = gathered.parts()
            wrong = [tensor.clone() for tensor in parts[0]]
            wrong[0].view(-1)[0] += 1 << 20
            with monkeypatch.context() as patch:
                patch.setattr(Gathered, "parts", lambda _: [wrong, *parts[1:]])
                make(self, bucket, gathered)
        else:
            make(self, bucket, gathered)

    monkeypatch.setattr(Reducer, "_make", made)
    tolerance = msgspec.structs.replace(reference[0].fault_tolerance, check_every=check_every)
    world = Watched(msgspec.structs.replace(reference[0], fault_tolerance=tolerance), stages, 5, tmp_path)
    with pytest.raises(ReplicasDisagree) as caught:
        world.run()
    assert world.nodes[victim].executor.counters.step == FLIP_AT
    assert {(odd.what, len(odd.said)) for odd in caught.value.odds} == {("means", 2)}
    assert blame.outvoted(caught.value.odds) == ()
    monkeypatch.undo()
    found = truth(reference, tmp_path, FLIP_AT)
    assert blame.refuted(Dispute(FLIP_AT, caught.value.odds), found) == (victim,)


@pytest.mark.parametrize("update", ["flushed", "staggered"])
def test_everybody_finds_the_same_and_goes_no_further(reference, tmp_path: Path, update: str) -> None:
    world = scheduled(reference, tmp_path, 4, update=update)
    tensor = next(iter(world.nodes["a1/0"].executor.store.buckets.values())).params[0]
    tensor.detach().view(-1).view(torch.int32)[0] ^= 1
    told: dict[str, Corrupted] = {}
    for _ in range(50_000):
        device = world.random.choice(world.live())
        executor = world.nodes[device].executor
        try:
            executor.advance()
        except ReplicasDisagree as error:
            executor.distrust(error)
        world.deliver_late()
        told |= {d: m for d in world.live() for m in world.nodes[d].told if isinstance(m, Corrupted)}
        if len(told) == len(world.live()):
            break
    assert sorted(told) == world.live()
    first = told["a0/0"]
    assert all((message.counters, message.odds) == (first.counters, first.odds) for message in told.values())
    assert all(node.executor.counters.round == 0 and node.executor.holding for node in world.nodes.values())


def test_checks_that_are_off_find_nothing(reference, tmp_path: Path) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    executor = world.nodes["a0/0"].executor
    executor.check.every = 0
    assert executor.check.digests(0, [0]) == executor.check.of_state() == {}
    executor.check.every = 3
    assert [step for step in range(7) if executor.check.digests(step, [0])] == [0, 3, 6]
    executor.check.recheck = 4
    assert executor.check.digests(4, []).keys() == executor.store.buckets.keys()
