"""Devices that hold their successors' layers, under losses: the bits stay, and forward passes that were run
ahead are used.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from oobleckd.worker import sums
from oobleckd.worker.runtime.faults import POINTS
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    ELSEWHERE,
    GOAL,
    check,
    ran_ahead,
    random_deaths,
    redundant,
    stays_re_routed,
)

VICTIMS = ["a0/0", "a1/0", "b0/0", "b1/0", "b2/0"]
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"backward": "decoupled"},
    {"update": "staggered"},
    {"backward": "decoupled", "update": "staggered"},
    {"redundant_memory": 0},
    {"redundant_memory": 30_000},
    {"boundary_memory": 0},
]


@pytest.mark.thin(6)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_redundant_layers_do_not_show(reference, tmp_path: Path, seed: int, schedule: Any) -> None:
    world = redundant(reference, tmp_path, seed, **schedule)
    world.run()
    check(world, reference)
    assert world.redone == world.forwards_again == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("point", [p for p in POINTS if p not in {*ELSEWHERE, "frozen"}])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("go_on", [False, True])
def test_kill_at_every_point(reference, tmp_path: Path, point: str, victim: str, go_on: bool) -> None:
    world = redundant(
        reference,
        tmp_path,
        zlib.crc32(f"{point} {victim}".encode()) % 1000,
        go_on=go_on,
        redundant_memory="1MiB",
    )
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    if not point.startswith("checkpoint"):  # not every device has a bucket to write
        assert (victim, point) in world.fired
    check(world, reference)
    share = sum(route.touches([victim]) for route in world.first.routes)
    own = len(world.first.holdings[victim]) - len(world.first.redundant[victim])
    assert world.redone <= share * own


@pytest.mark.thin(8)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_deaths(reference, tmp_path: Path, seed: int, go_on: bool, schedule: Any) -> None:
    world = redundant(reference, tmp_path, seed, go_on=go_on, **schedule)
    if go_on:
        stays_re_routed(world)
    else:
        random_deaths(world)
        world.run()
    check(world, reference)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_many_random_deaths(reference, tmp_path: Path, seed: int, go_on: bool, schedule: Any) -> None:
    test_random_deaths(reference, tmp_path, seed, go_on, schedule)


@pytest.mark.thin(6)
@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("victim", ["b0/0", "b1/0", "b2/0"])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_run_ahead_is_not_run_again(
    reference, tmp_path: Path, seed: int, victim: str, backward: str
) -> None:
    """Its predecessor goes on with the backward of every micro-batch that the dead one had begun."""
    world = redundant(reference, tmp_path, seed, go_on=True, backward=backward)
    ran_ahead(world)
    heir = {"b0/0": "b2/0", "b1/0": "b0/0", "b2/0": "b1/0"}[victim]
    waiting = list(world.nodes[heir].executor.now.board.redundant_done)
    mine = [route for route in world.first.routes if route.touches([victim])]
    assert {task.route.micro_batch for task in waiting} == {route.micro_batch for route in mine}
    world.kill(victim)
    world.run()
    check(world, reference)
    assert world.redone > 0
    assert world.forwards_again == 0
    assert world.detours is not None
    assert all(
        heir in {segment.device for segment in route.segments} and not route.touches([victim])
        for route in world.detours.routes
    )


def test_without_them_forwards_are_run_again(reference, tmp_path: Path) -> None:
    world = redundant(reference, tmp_path, 0, go_on=True, redundant_memory=0)
    ran_ahead(world)
    world.kill("b1/0")
    world.run()
    check(world, reference)
    assert world.forwards_again > 0


def test_the_bound_holds(reference, tmp_path: Path) -> None:
    """Room for some passes: what is held stays within it at all times, and some are run."""
    limit, held, ran = 60_000, [], set()
    world = redundant(reference, tmp_path, 1, redundant_memory=limit)
    advance = World._in

    def watched(self: World, device: str, act: Any) -> bool:
        found = advance(self, device, act)
        now = self.nodes[device].executor.now
        held.append(now.redundant_forwards.held_bytes)
        ran.update((device, task.layers) for task in now.board.redundant_done)
        return found

    world._in = watched.__get__(world)  # type: ignore[method-assign]
    world.run()
    check(world, reference)
    assert ran
    assert 0 < max(held) <= limit


@pytest.mark.parametrize("seed", range(4))
def test_overflow_and_death(reference, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales so large that the first rounds overflow: redundant layers squeeze theirs with everybody."""
    monkeypatch.setattr(sums, "START_EXPONENT", 60)
    calm = redundant(reference, tmp_path, seed)
    calm.run()
    world = redundant(reference, tmp_path, seed, go_on=bool(seed % 2))
    random_deaths(world)
    world.run()
    assert world.losses == calm.losses
    ours, theirs = world.weights(), calm.weights()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_replicas_are_current_after_every_step(reference, tmp_path: Path) -> None:
    """Parameters, moments and exponents of redundant layers are those of the device that computes, to the
    bit.
    """
    world = redundant(reference, tmp_path, 3)
    world.run()
    for bucket in range(len(world.spec.buckets)):
        copies = [
            world.nodes[device].executor.store.buckets[bucket]
            for device in world.live()
            if bucket in world.nodes[device].executor.store.buckets
        ]
        assert len(copies) >= 4
        for copy in copies[1:]:
            assert copy.exponents == copies[0].exponents
            assert all(map(torch.equal, copy.tensors(), copies[0].tensors()))
    assert sorted(world.losses) == list(range(GOAL))
