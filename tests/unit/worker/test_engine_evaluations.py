"""Evaluations while the exact engine trains: the same numbers whatever dies, and training with the bits that
it has without.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from oobleckd.host.checkpoint import complete
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.parts import Counters, Flags
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.runtime.faults import POINTS
from tests.helpers.engine import World
from tests.helpers.engine_jobs import ELSEWHERE, GOAL, SCHEDULES, Reference, check, survivable
from tests.helpers.evaluations import HEADS, ROUNDS, Evaluated, check_all, on_texts, sums_told, world_of

ALONE = {"x": [(0, 4)]}
VICTIMS = ("a0/0", "a1/0", "b0/0", "b1/0", "b2/0")
REACHED = ("forward", "reduce", "reduced", "commit", "updated")


@pytest.fixture(scope="module")
def evaluated(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """On one device, without failures."""
    folder = tmp_path_factory.mktemp("evaluated")
    world = World(on_texts(reference[0], folder), ALONE, 0, folder)
    world.run()
    check(world, reference)
    return world.job, reference, world.evaluations


def deaths(world: World, count: int = 2) -> None:
    """Arm up to ``count``, most of them in evaluations, that leave a copy of every layer."""
    points = [point for point in POINTS if point not in ELSEWHERE]
    dead: set[str] = set()
    for _ in range(count):
        able = [d for d in world.live() if d not in dead and survivable(world, dead | {d})]
        if able:
            victim = world.random.choice(able)
            dead.add(victim)
            point = world.random.choice([*REACHED, *points])
            world.nodes[victim].faults.arm(point, world.random.choice(ROUNDS))


def test_one_device(evaluated: Evaluated, tmp_path: Path) -> None:
    found = evaluated[2]
    assert list(found) == [(step, number) for step in (0, 2, 4, 5) for number in (0, 1)]
    assert [(each.source, each.targets) for each in found[0, 0]] == [("letters", 3 * 30), ("digits", 30)]
    assert [(each.source, each.targets) for each in found[0, 1]] == [("digits", 2 * 30)]
    assert len({each.loss_sum for step in (0, 5) for n in (0, 1) for each in found[step, n]}) == 6
    assert sums_told(evaluated[0], tmp_path) == found


@pytest.mark.thin(6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("redundant", [False, True])
def test_many_devices(evaluated: Evaluated, tmp_path: Path, schedule: str, redundant: bool) -> None:
    world = world_of(evaluated, tmp_path, 3, schedule, redundant=redundant)
    world.run()
    check_all(world, evaluated)
    assert world.redone == world.forwards_again == 0


@pytest.mark.thin(10)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("point", REACHED)
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_at_every_point(
    evaluated: Evaluated, tmp_path: Path, point: str, victim: str, go_on: bool
) -> None:
    seed = zlib.crc32(f"{point} {victim} {go_on}".encode()) % 1000
    world = world_of(evaluated, tmp_path, seed, go_on=go_on)
    world.nodes[victim].faults.arm(point, ROUNDS[seed % len(ROUNDS)])
    world.run()
    if point != "reduce" or victim in HEADS:
        assert (victim, point) in world.fired
    check_all(world, evaluated)


@pytest.mark.thin(25)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("redundant", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random_deaths(
    evaluated: Evaluated, tmp_path: Path, seed: int, redundant: bool, schedule: str
) -> None:
    world = world_of(evaluated, tmp_path, seed, schedule, redundant=redundant, go_on=seed % 2 == 1)
    deaths(world)
    world.run()
    check_all(world, evaluated)


def test_losses_that_nobody_heard_are_computed_again(evaluated: Evaluated, tmp_path: Path) -> None:
    world = world_of(evaluated, tmp_path, 1)
    head = world.nodes["a1/0"].executor
    while not head.machine.now.board.ledger.done[3]:
        for device in world.live():
            world.nodes[device].executor.advance()
        world.deliver_late()
    assert not head.machine.exchange.contributed
    world.kill("a1/0")
    world.run()
    check_all(world, evaluated)
    assert world.forwards_again > 0
    assert world.redone == 0


def test_no_graph_is_kept(evaluated: Evaluated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on to the next hop, and the loss, hang on nothing."""
    ran, outs = Passes._ran_forward, []

    def watched(self: Passes, task, out) -> None:
        if self.board.evaluates:
            outs.append(out)
            assert not self.graphs
        ran(self, task, out)

    monkeypatch.setattr(Passes, "_ran_forward", watched)
    world = world_of(evaluated, tmp_path, 0)
    world.run()
    assert len(outs) == 4 * (3 * 2 + 3 * 3)
    assert not any(out.requires_grad for out in outs)


def test_nobody_waits_for_samples_behind_an_evaluation(evaluated: Evaluated, tmp_path: Path) -> None:
    world = World(evaluated[0], ALONE, 0, tmp_path)
    world.run()
    assert world.corpus.num_waits == 0


def test_a_resumed_job_goes_on_in_the_middle_of_an_evaluation(evaluated: Evaluated, tmp_path: Path) -> None:
    world = world_of(evaluated, tmp_path, 2)
    head = world.nodes["a1/0"].executor
    while head.counters.round < 4:
        for device in world.live():
            world.nodes[device].executor.advance()
        world.deliver_late()
    head.machine.flags = Flags(checkpoint=True)
    world.run()
    check_all(world, evaluated)
    middle, end = Counters(5, 2, 2, evaluated=1), Counters(13, GOAL, GOAL, evaluated=2)
    boundaries = [part.counters for part in world.parts]
    assert boundaries == [middle] * len(world.spec.buckets) + [end] * len(world.spec.buckets)
    parts = sorted((p for p in world.parts if p.counters == middle), key=lambda part: part.bucket)
    folder = complete(
        Path(parts[0].directory), manifest_of(world.job, parts, (world.corpus.inputs.part,)), keep=9
    )
    resumed = World(world.job, ALONE, 0, tmp_path, start=(middle, str(folder)))
    resumed.run()
    _, losses, weights = evaluated[1]
    later = {step: loss for step, loss in losses.items() if step >= 2}
    check(resumed, (world.job, later, weights))
    assert resumed.evaluations == {at: sums for at, sums in evaluated[2].items() if at >= (2, 1)}


@pytest.mark.parametrize("seed", range(2))
def test_a_layout_may_change_in_the_middle(evaluated: Evaluated, tmp_path: Path, seed: int) -> None:
    """All hold behind the first round of an evaluation, and layers are bound anew."""
    world = world_of(evaluated, tmp_path, seed)
    for node in world.nodes.values():
        node.executor.machine.flags = Flags(hold=True)
    world.run()
    assert world.layout.epoch == 2
    check_all(world, evaluated)


def test_what_is_wrong_with_a_loss_is_no_matter_of_training(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said as it is, and no step counts as skipped."""
    passes = Passes._evaluation

    def infinite(self: Passes, work):
        yield from passes(self, work)
        if work.task.last:
            self.reducer.losses[0] = float("inf")

    monkeypatch.setattr(Passes, "_evaluation", infinite)
    world = World(on_texts(reference[0], tmp_path), ALONE, 0, tmp_path)
    world.run()
    check(world, reference)
    assert all(found[0].loss_sum == float("inf") for found in world.evaluations.values())
