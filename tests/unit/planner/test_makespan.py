"""The time of a pipeline in 1F1B, against the dry run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.costs.makespan import busy_s, one_f_one_b_s, stage_bounds_s
from oobleckd.planner.costs.work import StageWork
from oobleckd.planner.schedule import one_f_one_b
from oobleckd.planner.schedules.timeline import dry_run_works


def simulated_s(works: list[StageWork], num: int) -> float:
    names = [f"n{stage}/0" for stage in range(len(works))]
    ops = {name: one_f_one_b(len(works), stage, range(num)) for stage, name in enumerate(names)}
    return dry_run_works(ops, dict(zip(names, works, strict=True))).makespan_s


@st.composite
def pipelines(draw: st.DrawFn) -> list[StageWork]:
    whole = st.integers(0, 9)
    cuts = [0, *draw(st.lists(st.integers(0, 3), max_size=5)), 0]
    return [
        StageWork(draw(whole), draw(whole), draw(whole), cuts[stage + 1], cuts[stage])
        for stage in range(len(cuts) - 1)
    ]


@settings(max_examples=300)
@given(pipelines(), st.integers(0, 25))
def test_as_the_dry_run_has_it(works: list[StageWork], num: int):
    found_s = one_f_one_b_s(works, num)
    if num <= 4 * len(works):
        assert found_s == simulated_s(works, num)
    else:
        assert found_s == pytest.approx(simulated_s(works, num), rel=0.03)


@settings(max_examples=100)
@given(pipelines(), st.integers(1, 20))
def test_going_by_one_stage_is_never_above_it(works: list[StageWork], num: int):
    each = np.array([busy_s(work) for work in works], dtype=float)
    forward = np.array([work.forward_s + work.send_s for work in works], dtype=float)
    run_s = simulated_s(works, num)
    for stage in range(len(works)):
        around = each[:stage].sum(), each[stage + 1 :].sum()
        bound_s = stage_bounds_s(
            forward[stage], (each - forward)[stage], *around, in_flight=len(works) - stage, num=num
        )
        assert bound_s <= run_s


@pytest.mark.parametrize(("num_stages", "num"), [(1, 3), (4, 1), (4, 3), (4, 4), (4, 9), (8, 64)])
def test_equal_stages(num_stages: int, num: int):
    works = [StageWork(1.0, 1.25, 0.75)] * num_stages
    assert one_f_one_b_s(works, num) == simulated_s(works, num) == 3 * (num + num_stages - 1)


def test_a_slow_first_stage_fills_its_wait_with_forwards():
    works = [StageWork(4.0, 4.0, 4.0), StageWork(1.0, 1.0, 1.0), StageWork(1.0, 1.0, 1.0)]
    assert one_f_one_b_s(works, 8) == simulated_s(works, 8) == 8 * 12
