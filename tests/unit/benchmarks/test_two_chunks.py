"""Schedules of devices with two stages against the optimum of a mixed-integer program."""

from __future__ import annotations

import random

import pytest

from benchmarks.optimum import shortest
from oobleckd.planner.costs.work import StageWork
from oobleckd.planner.schedules.decoupled import best_orders
from oobleckd.planner.schedules.orders import min_makespan_s, run
from oobleckd.planner.schedules.pipe import Pipe

WITHIN = 1.08


def random_works(dice: random.Random, num_devices: int) -> list[StageWork]:
    """Uneven stages; from room for hardly two micro-batches up to no limit."""
    room = dice.choice([0, 28, 36, 48])
    half, last = num_devices - 1, 2 * num_devices - 1
    return [
        StageWork(
            *(dice.randint(2, 9) for _ in range(3)),
            0 if stage in {half, last} else dice.choice([0, 1]),
            0 if stage in {0, half + 1} else dice.choice([0, 1]),
            activation_bytes=dice.choice([8, 10, 12]),
            kept_bytes=dice.choice([5, 7, 8]),
            limit_bytes=room,
        )
        for stage in range(2 * num_devices)
    ]


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_is_much_shorter(seed: int, num_devices: int) -> None:
    works = random_works(random.Random(f"{seed} {num_devices}"), num_devices)
    pipe = Pipe.of(works, 2)
    found = run(pipe, best_orders(pipe, 2))
    assert found is not None
    verdict = shortest(works, 2, found.makespan_s, 20.0, 2)
    assert verdict.found_s <= found.makespan_s + 1e-6 <= WITHIN * verdict.min_s
    assert min_makespan_s(pipe, 2) <= verdict.found_s + 1e-6
