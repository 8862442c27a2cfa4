"""Whether bubbles suffice: known optima are possible, a unit less is not, and what a planner finds is never
called impossible.
"""

from __future__ import annotations

import pytest

from benchmarks.possible import Step, least, possible
from benchmarks.rerouted import LOST, UNIT_S, Case, losses, suffice
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedules.jobshop import shop_of
from oobleckd.planner.schedules.routed import crossing

LIMIT_S = 120.0


def alone(num: int, stages: int, backwards: tuple[int, ...], room: int = 100) -> Step:
    return Step((num,), stages, frozenset(), 1, backwards, room, 1)


@pytest.mark.parametrize(("num", "stages"), [(1, 3), (4, 2), (6, 4)])
def test_a_pipeline_with_a_whole_backward_takes_what_1f1b_takes(num: int, stages: int) -> None:
    step, best = alone(num, stages, (2,)), (num + stages - 1) * 3
    assert possible(step, best, LIMIT_S) == "yes"
    assert possible(step, best - 1, LIMIT_S) == "no"


def test_weight_gradients_fill_the_end() -> None:
    step = alone(
        4, 2, (1, 1)
    )  # 4 F, 4 I, 4 W a device; the second begins a unit later, the first ends one after it
    assert possible(step, 13, LIMIT_S) == "yes"
    assert possible(step, 12, LIMIT_S) == "no"


def test_memory_bounds_what_flies() -> None:
    assert possible(alone(3, 2, (2,), room=1), 18, LIMIT_S) == "yes", "one after the other"
    assert possible(alone(3, 2, (2,), room=1), 17, LIMIT_S) == "no"


def test_who_computes_for_the_dead_is_free() -> None:
    step = Step((2, 2, 2), 1, frozenset({(0, 0)}), 1, (2,), 10, 1)
    assert possible(step, 9, LIMIT_S) == "yes"
    assert possible(step, 8, LIMIT_S) == "no"


@pytest.mark.parametrize("kind", ["fused", "decoupled"])
@pytest.mark.parametrize("what", ["one", "two stages", "one stage twice"])
def test_what_the_planner_finds_is_possible_and_nothing_below_the_bound(kind: str, what: str) -> None:
    case = Case(3, 4, 12, losses(3, 4)[what], kind)
    shop = shop_of(layout_of(case.plan(), 1, case.stages), case.setup())
    ours = round(crossing(shop).step_s / UNIT_S)
    assert possible(case.units(), ours, LIMIT_S) == "yes"
    assert least(case.units()) <= ours
    assert possible(case.units(), least(case.units()) - 1, LIMIT_S) == "no"


@pytest.mark.parametrize(
    ("pipelines", "stages", "num", "what", "best"),
    [
        (3, 6, 16, "one", 33),
        (3, 8, 16, "two stages", 39),
        (4, 6, 32, "one", 42),
        (4, 8, 32, "two stages", 48),
    ],
)
def test_the_planner_reaches_what_is_possible(
    pipelines: int, stages: int, num: int, what: str, best: int
) -> None:
    """A search from the rules' orders alone stays a unit above these: where stages are alike most of its
    moves change nothing.
    """
    case = Case(pipelines, stages, num, losses(pipelines, stages)[what], "fused")
    shop = shop_of(layout_of(case.plan(), 1, case.stages), case.setup())
    assert round(crossing(shop).step_s / UNIT_S) == best
    assert possible(case.units(), best - 1, LIMIT_S) == "no"


def test_when_bubbles_suffice() -> None:
    case = Case(3, 6, 16, losses(3, 6)["one"], "fused")
    plain_s = 33 * UNIT_S
    assert suffice(case, plain_s, plain_s * (1 + LOST), plain_s, LIMIT_S) == "yes", "ours is one"
    assert suffice(case, plain_s, plain_s * 1.2, plain_s, LIMIT_S) == "yes", "another is"
    assert suffice(case, plain_s, plain_s * 1.2, plain_s * 1.1, LIMIT_S) == "no"
    fewer = Case(3, 6, 8, losses(3, 6)["one"], "fused")
    assert suffice(fewer, 24 * UNIT_S, 25 * UNIT_S, 12 * UNIT_S, LIMIT_S) == "no"
