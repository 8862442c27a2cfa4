"""The closed form of 1F1B: never above the dry run, equal to it on equal stages, close on most others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.estimate import one_f_one_b_s
from planner.profile import Profile
from planner.schedule import one_f_one_b
from planner.template import templates
from planner.timeline import dry_run_works
from planner.work import StageWork, stage_works
from tests.unit.planner.build import profiles, setup_of


def simulated_s(works: list[StageWork], num: int) -> float:
    names = [f"n{stage}/0" for stage in range(len(works))]
    ops = {name: one_f_one_b(len(works), stage, range(num)) for stage, name in enumerate(names)}
    return dry_run_works(ops, dict(zip(names, works, strict=True))).makespan_s


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 12))
def test_never_above_the_dry_run(data: st.DataObject, num_stages: int, num: int):
    whole = st.integers(0, 9)
    cuts = [0, *(data.draw(st.integers(0, 3)) for _ in range(num_stages - 1)), 0]
    works = [
        StageWork(data.draw(whole), data.draw(whole), data.draw(whole), cuts[stage + 1], cuts[stage])
        for stage in range(num_stages)
    ]
    assert one_f_one_b_s(works, num) <= simulated_s(works, num)


@pytest.mark.parametrize(("num_stages", "num"), [(1, 3), (4, 1), (4, 3), (4, 4), (4, 9), (8, 64)])
def test_equal_stages(num_stages: int, num: int):
    works = [StageWork(1.0, 1.25, 0.75)] * num_stages
    assert one_f_one_b_s(works, num) == simulated_s(works, num) == 3 * (num + num_stages - 1)


@settings(max_examples=50, deadline=None)
@given(profiles(), st.integers(1, 9))
def test_between_the_model_of_templates_and_the_dry_run(profile: Profile, m: int):
    for template in templates(setup_of(profile, num_micro_batches=m, f=0)):
        works = stage_works([stage.layers for stage in template.stages], profile)
        assert one_f_one_b_s(works, m) <= template.time_s(m) * (1 + 1e-9)


def test_a_slow_first_stage_fills_its_wait_with_forwards():
    works = [StageWork(4.0, 4.0, 4.0), StageWork(1.0, 1.0, 1.0), StageWork(1.0, 1.0, 1.0)]
    assert one_f_one_b_s(works, 8) == simulated_s(works, 8) == 8 * 12
