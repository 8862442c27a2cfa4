"""The referee of decoupled schedules, itself against every order."""

import random

import pytest

from benchmarks.optimum import shortest
from benchmarks.schedules import random_works
from tests.unit.planner.brute import shortest_s


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_stages", "num"), [(2, 3), (3, 2)])
def test_the_optimum_is_that_of_all_orders(num_stages: int, num: int, seed: int):
    works = random_works(random.Random(seed), num_stages, num)
    best_s = shortest_s(works, num)
    verdict = shortest(works, num, horizon_s=4 * best_s, limit_s=60)
    assert verdict.found_s == pytest.approx(best_s)
    assert verdict.min_s == pytest.approx(best_s, rel=1e-3)
