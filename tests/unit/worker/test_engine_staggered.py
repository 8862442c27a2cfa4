"""Updates made before all votes are in: the same bits, whatever is taken back."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.parts import Flags, Vote
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    STAGES,
    check,
    job,
    random_deaths,
    scheduled,
)


def staggered(clipped, tmp_path: Path, seed: int, **more: Any) -> World:
    return scheduled(clipped, tmp_path, seed, update="staggered", **more)


@pytest.mark.thin(6)
@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("seed", range(4))
def test_a_staggered_update_does_not_show(clipped, tmp_path: Path, seed: int, backward: str) -> None:
    world = staggered(clipped, tmp_path, seed, backward=backward)
    world.run()
    check(world, clipped)


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "point", ["forward", "backward", "reduced", "backup", "update", "validate", "commit", "updated"]
)
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b0/0", "b2/0"])
def test_kill_in_a_staggered_step(clipped, tmp_path: Path, point: str, victim: str) -> None:
    world = staggered(clipped, tmp_path, zlib.crc32(f"{point} {victim}".encode()) % 1000)
    world.nodes[victim].faults.arm(point, 3)
    world.run()
    if not clipped[0].optimizer.clip_norm:
        assert (victim, point) in world.fired
    check(world, clipped)


@pytest.mark.thin(8)
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_deaths_in_staggered_steps(clipped, tmp_path: Path, seed: int, go_on: bool) -> None:
    backward = ["fused", "decoupled"][seed % 2]
    changed = msgspec.structs.replace(clipped[0], schedule=Schedule(update="staggered", backward=backward))
    world = World(changed, STAGES, seed, tmp_path, go_on=go_on)
    random_deaths(world)
    world.run()
    check(world, clipped)


def test_no_early_update_while_tasks_of_the_round_are_left(tmp_path: Path) -> None:
    """After a loss attempts may pass through a device that has reduced all it holds: they need its weights as
    they are.
    """
    world = World(job(tmp_path, {"update": "staggered"}), STAGES, 0, tmp_path)
    machine = world.nodes["a0/0"].executor.machine
    machine.predictor.saw(True)
    vote = Vote({}, {}, nan=False, overflow=False, flags=Flags())
    assert not machine._may_hurry(vote)
    machine.now.board.begin((), ())
    assert machine._may_hurry(vote)
