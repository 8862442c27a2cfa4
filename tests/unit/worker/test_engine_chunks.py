"""Devices with two stages of a pipeline, under losses."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.runtime.faults import POINTS
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    ELSEWHERE,
    STAGES,
    check,
    random_deaths,
    stays_re_routed,
)

BOTH_V = {name: [(0, 1, 0), (1, 2, 1), (2, 3, 1), (3, 4, 0)] for name in "ab"}
ONE_V = {"a": BOTH_V["a"], "b": STAGES["b"]}
SCHEDULES = [
    {"backward": "fused"},
    {"backward": "decoupled"},
    {"backward": "decoupled", "boundary_memory": 0},
    {"backward": "decoupled", "boundary_memory": 2500},
]


KILLS_V = [
    *((BOTH_V, victim, schedule) for victim in ("a0/0", "a1/0") for schedule in SCHEDULES),
    *((ONE_V, victim, SCHEDULES[1]) for victim in ("a0/0", "a1/0", "b0/0", "b1/0", "b2/0")),
]


def v_world(
    reference, tmp_path: Path, seed: int, stages: Any = BOTH_V, *, go_on: bool = False, **schedule: Any
) -> World:
    changed = msgspec.structs.replace(reference[0], schedule=Schedule(**schedule))
    return World(changed, stages, seed, tmp_path, go_on=go_on)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [BOTH_V, ONE_V])
@pytest.mark.parametrize("seed", range(2))
def test_two_chunks_do_not_show(reference, tmp_path: Path, seed: int, stages: Any, schedule: Any) -> None:
    world = v_world(reference, tmp_path, seed, stages, **schedule)
    world.run()
    check(world, reference)
    assert world.redone == 0


@pytest.mark.thin(8)
@pytest.mark.parametrize("point", ["weights", *(p for p in POINTS if p not in {*ELSEWHERE, "frozen"})])
@pytest.mark.parametrize(("stages", "victim", "schedule"), KILLS_V)
def test_kill_at_every_point_of_two_chunks(
    reference, tmp_path: Path, point: str, stages: Any, victim: str, schedule: Any
) -> None:
    if point == "weights" and schedule["backward"] == "fused":
        return
    seed = zlib.crc32(f"{point} {victim} {schedule}".encode()) % 1000
    world = v_world(reference, tmp_path, seed, stages, **schedule)
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    if point != "checkpoint":
        assert (victim, point) in world.fired
    check(world, reference)
    if (
        stages is BOTH_V and "boundary_memory" not in schedule
    ):  # both hops of the dead are done again, no other
        share = sum(route.touches([victim]) for route in world.first.routes)
        assert world.redone <= share * len(world.first.holdings[victim])


@pytest.mark.parametrize("first", ["a0/0", "a1/0"])
@pytest.mark.parametrize("victim", ["b0/0", "b1/0"])
def test_kill_of_a_frozen_device_of_two_chunks(reference, tmp_path: Path, first: str, victim: str) -> None:
    """The other device of the other pipeline: every layer keeps a copy."""
    if first[1] == victim[1]:
        return
    for seed in range(4):
        world = v_world(reference, tmp_path, seed, backward="decoupled")
        world.nodes[first].faults.arm("backward", 2)
        world.nodes[victim].faults.arm("frozen", 2)
        world.run()
        assert (victim, "frozen") in world.fired
        check(world, reference)


@pytest.mark.thin(8)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("stages", [BOTH_V, ONE_V])
@pytest.mark.parametrize("seed", range(16))
def test_random_deaths_of_two_chunks(reference, tmp_path: Path, seed: int, stages: Any, go_on: bool) -> None:
    world = v_world(reference, tmp_path, seed, stages, go_on=go_on, **SCHEDULES[seed % len(SCHEDULES)])
    if go_on:
        stays_re_routed(world)
    else:
        random_deaths(world)
        world.run()
    check(world, reference)


DEEP_V = {
    "a": [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 4, 2), (4, 5, 1), (5, 6, 0)],
    "b": [(0, 2, 0), (2, 3, 1), (3, 5, 1), (5, 6, 0)],
    "c": [(0, 1), (1, 4), (4, 6)],
}
"""A device with two chunks that are no neighbours, chunks that begin elsewhere in another pipeline, and one
without.
"""


@pytest.mark.thin(8)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_random_deaths_of_chunks_that_are_apart(deep, tmp_path: Path, seed: int, go_on: bool) -> None:
    world = v_world(deep, tmp_path, seed, DEEP_V, go_on=go_on, **SCHEDULES[1 + seed % 3])
    random_deaths(world)
    world.run()
    check(world, deep)


@pytest.mark.thin(6)
@pytest.mark.parametrize("point", ["forward", "backward", "weights", "reduce"])
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "a2/0", "b0/0", "b1/0", "c1/0"])
def test_kill_where_chunks_are_apart(deep, tmp_path: Path, point: str, victim: str) -> None:
    seed = zlib.crc32(f"deep {point} {victim}".encode()) % 1000
    world = v_world(deep, tmp_path, seed, DEEP_V, backward="decoupled")
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    assert (victim, point) in world.fired
    check(world, deep)


@pytest.mark.slow
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("stages", [BOTH_V, ONE_V])
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_many_random_deaths_of_two_chunks(
    reference, tmp_path: Path, seed: int, stages: Any, go_on: bool
) -> None:
    test_random_deaths_of_two_chunks(reference, tmp_path, seed, stages, go_on)
