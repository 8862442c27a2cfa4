"""Losses after which a job goes on re-routed, without a new layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    STAGES,
    check,
    stays_re_routed,
)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(30))
def test_random_deaths_after_which_it_goes_on_re_routed(reference, tmp_path: Path, seed: int) -> None:
    world = World(reference[0], STAGES, seed, tmp_path, go_on=True)
    stays_re_routed(world)
    check(world, reference)


@pytest.mark.parametrize("seed", range(12))
def test_several_deaths_among_three_pipelines_leave_it_re_routed(
    reference, tmp_path: Path, seed: int
) -> None:
    world = World(reference[0], STAGES | {"c": [(0, 3), (3, 4)]}, seed, tmp_path, go_on=True)
    stays_re_routed(world, 4)
    check(world, reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_random_deaths_after_which_it_goes_on_re_routed(reference, tmp_path: Path, seed: int) -> None:
    test_random_deaths_after_which_it_goes_on_re_routed(reference, tmp_path, seed)
