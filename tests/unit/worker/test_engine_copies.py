"""The exact engine where gradient sums are copied to peers: losses after which those copies count."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.round.sum_copies import Copies
from oobleckd.worker.round_machine.copies import SumCopy
from oobleckd.worker.transport.mailbox import TensorMessage
from tests.helpers.engine import Died, World
from tests.helpers.engine_jobs import STAGES, Reference, check, job, random_deaths, stays_re_routed

SCHEDULES: dict[str, dict[str, Any]] = {
    "fused": {},
    "decoupled": {"backward": "decoupled"},
    "staggered": {"backward": "decoupled", "update": "staggered"},
    "unkept": {"boundary_memory": 0},
}
FOLDED = {"a": [(0, 1, 0), (1, 2, 1), (2, 3, 1), (3, 4, 0)], "b": [(0, 2), (2, 4)]}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Eight micro-batches, so that a device has several to copy in between; without clipping, so that updates
    can be early.
    """
    tmp_path = tmp_path_factory.mktemp("many")
    spec = job(tmp_path, global_batch=16)
    spec = msgspec.structs.replace(spec, optimizer=msgspec.structs.replace(spec.optimizer, clip_norm=0.0))
    world = World(spec, STAGES, 0, tmp_path)
    world.run()
    return spec, world.losses, world.weights()


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> list[SumCopy]:
    """Every copy that came to count."""
    found: list[SumCopy] = []
    inherit = Reducer.inherit

    def noted(self: Reducer, what: SumCopy, tensors: Any) -> None:
        found.append(what)
        inherit(self, what, tensors)

    monkeypatch.setattr(Reducer, "inherit", noted)
    return found


def copying(many: Reference, tmp_path: Path, seed: int, schedule: dict[str, Any], **options: Any) -> World:
    changed = msgspec.structs.replace(many[0], schedule=Schedule(**{"sum_copies": 3, **schedule}))
    return World(changed, options.pop("stages", STAGES), seed, tmp_path, **options)


@pytest.mark.parametrize("manner", SCHEDULES)
def test_copies_do_not_show(many, tmp_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = Copies._send
    monkeypatch.setattr(
        Copies, "_send", lambda self, *args: (sent.append(self.plan.device), send(self, *args))
    )
    world = copying(many, tmp_path, 1, SCHEDULES[manner])
    world.run()
    check(world, many)
    assert set(sent) == set(world.nodes)
    assert world.redone == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("manner", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_random_deaths(many, tmp_path: Path, seed: int, manner: str) -> None:
    world = copying(many, tmp_path, seed, SCHEDULES[manner])
    random_deaths(world)
    world.run()
    check(world, many)


@pytest.mark.thin(8)
@pytest.mark.parametrize("manner", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_several_deaths_among_three_pipelines(many, tmp_path: Path, seed: int, manner: str) -> None:
    """Whoever inherits may die, too: what it has inherited is in its own copies."""
    stages = STAGES | {"c": [(0, 3), (3, 4)]}
    world = copying(many, tmp_path, seed, SCHEDULES[manner], stages=stages, go_on=True)
    stays_re_routed(world, 4)
    check(world, many)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(10))
def test_random_deaths_where_a_device_has_two_hops(many, tmp_path: Path, seed: int) -> None:
    world = copying(many, tmp_path, seed, SCHEDULES["decoupled"], stages=FOLDED)
    random_deaths(world)
    world.run()
    check(world, many)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(10))
def test_random_deaths_beside_redundant_layers(many, tmp_path: Path, seed: int) -> None:
    world = copying(many, tmp_path, seed, {}, redundant=True)
    random_deaths(world)
    world.run()
    check(world, many)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_random_deaths(many, tmp_path: Path, seed: int) -> None:
    for manner in SCHEDULES:
        test_random_deaths(many, tmp_path, seed, manner)
        test_several_deaths_among_three_pipelines(many, tmp_path, seed, manner)
    test_random_deaths_where_a_device_has_two_hops(many, tmp_path, seed)
    test_random_deaths_beside_redundant_layers(many, tmp_path, seed)


def late_in_its_backward_passes(world: World, victim: str, point: str) -> None:
    """``victim`` dies in round 2, when the weight gradients of three of its four micro-batches are in its
    sums.
    """
    faults, layers = world.nodes[victim].faults, len(world.first.holdings[victim])
    left = itertools.count(-3 * layers)

    def reach(reached: str, round_: int) -> None:
        if (reached, round_) == (point, 2) and next(left) == 0:
            raise Died(point)

    faults.reach = reach  # type: ignore[method-assign]


@pytest.mark.parametrize(("backward", "point"), [("fused", "backward"), ("decoupled", "weights")])
def test_less_is_done_again(
    many, tmp_path: Path, backward: str, point: str, inherited: list[SumCopy]
) -> None:
    redone = {0: 0, 7: 0}
    for copies in redone:
        for seed, victim in enumerate(("a0/0", "a1/0", "b0/0", "b1/0")):
            world = copying(many, tmp_path, seed, {"backward": backward, "sum_copies": copies})
            late_in_its_backward_passes(world, victim, point)
            world.run()
            check(world, many)
            assert world.dead | world.gone == {victim}
            redone[copies] += world.redone
        assert bool(inherited) == bool(copies)
    assert redone[7] < 0.6 * redone[0], redone


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_that_comes_late_does_not_count(many, tmp_path: Path, seed: int) -> None:
    """When its sender was already said to be dead: the decision is made without it."""
    world = copying(many, tmp_path, seed, {"sum_copies": 7})
    deliver, decide = world.deliver, world._decide
    held_up: list[tuple[str, TensorMessage]] = []

    def delivered(source: str, peer: str, message: TensorMessage) -> None:
        if message.key[0] == "C" and source == "a1/0":
            held_up.append((peer, message))
        else:
            deliver(source, peer, message)

    def decided() -> None:
        decide()
        world.late += held_up
        held_up.clear()

    world.deliver, world._decide = delivered, decided  # type: ignore[method-assign]
    late_in_its_backward_passes(world, "a1/0", "backward")
    world.run()
    check(world, many)
    assert world.redone
