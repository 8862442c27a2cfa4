"""The referee of steps over routes that cross, itself against the pipelines that the other one knows, and
against bounds.
"""

import msgspec
import pytest

from benchmarks.crossed import shortest_period, shortest_step
from benchmarks.optimum import shortest
from benchmarks.rerouted import Case
from oobleckd.planner.costs.work import stage_works
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedules.jobshop import Shop, shop_of
from oobleckd.planner.schedules.routed import crossing, min_s

TIMES = ((0.03, 0.05, 0.02), (0.04, 0.03, 0.04))


def shop_with(case: Case) -> Shop:
    return shop_of(layout_of(case.plan(), 1, case.stages), case.setup())


@pytest.mark.parametrize("room", [1000, 1800, 2000, 4000])
@pytest.mark.parametrize("num", [2, 3])
def test_without_a_loss_it_agrees_with_the_referee_of_pipelines(num: int, room: int):
    case = Case(1, 2, num, (), "decoupled", TIMES)
    setup = msgspec.structs.replace(case.setup(), device_memory_bytes=18 + room)
    works = stage_works(
        [segment.layers for segment in case.plan().pipelines[0].segments],
        setup.profile,
        setup.device_memory_bytes,
    )
    theirs = shortest(works, num, 1.0, 30.0)
    ours = shortest_step(shop_of(layout_of(case.plan(), 1, 2), setup), 1.0, 30.0)
    assert ours.found_s == pytest.approx(theirs.found_s, rel=1e-4)


@pytest.mark.parametrize("kind", ["fused", "decoupled", "staggered"])
def test_the_planner_is_at_the_optimum_of_a_small_loss(kind: str):
    case = Case(2, 2, 2, ((0, 1),), kind, TIMES)
    shop = shop_with(case)
    staggered = kind == "staggered"
    ours_s = crossing(shop, staggered=staggered).step_s
    search = shortest_period if staggered else shortest_step
    verdict = search(shop, 1.01 * ours_s, 30.0)
    assert verdict.found_s == pytest.approx(ours_s, rel=1e-4)
    assert min_s(shop, staggered=staggered) <= verdict.found_s * (1 + 1e-6)
