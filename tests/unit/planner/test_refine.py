"""Templates as they run: against the run of every split."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.costs.makespan import one_f_one_b_s
from oobleckd.planner.costs.work import stage_works
from oobleckd.planner.plan import Range, Template
from oobleckd.planner.policies import prepare
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.profile import Profile
from oobleckd.planner.templates.refine import refined
from oobleckd.planner.templates.template import templates, templates_for
from tests.unit.planner.build import profile_of, profiles, setup_of


def run_s(profile: Profile, cuts: tuple[int, ...], num: int) -> float:
    stages = [Range(start, stop) for start, stop in pairwise((0, *cuts, len(profile.layers)))]
    return one_f_one_b_s(stage_works(stages, profile), num)


def taken_s(template: Template, profile: Profile, num: int) -> float:
    return run_s(profile, tuple(stage.layers.start for stage in template.stages[1:]), num)


@settings(max_examples=60)
@given(profiles(), st.integers(1, 12), st.integers(0, 2000))
def test_never_slower_and_never_more_than_fits(profile: Profile, share: int, limit: int):
    setup = setup_of(profile, num_micro_batches=share, f=0, device_memory_bytes=limit)
    try:
        made = templates(setup)
    except PlanError:
        return
    for template in made:
        better = refined(setup, template, share)
        assert taken_s(better, profile, share) <= taken_s(template, profile, share) * (1 + 1e-9)
        assert better.time_s(share) == pytest.approx(taken_s(better, profile, share))
        assert (better.num_nodes, better.devices_per_node) == (template.num_nodes, template.devices_per_node)
        assert [stage.layers.start for stage in better.stages[1:]] == [
            stage.layers.stop for stage in better.stages[:-1]
        ]
        assert not limit or max(stage.memory_bytes for stage in better.stages) <= limit


@pytest.mark.parametrize("head", [0.2, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("blocks", [5, 8, 11])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_fastest_split_there_is(head: float, blocks: int, num_stages: int, each: int):
    times = [0.05, *([5.0] * blocks), 5.0 * head]
    profile = profile_of(
        [(t / 1e3, t / 500, 10, 20, 10**7) for t in times], link_latency_s=2e-5, link_bytes_per_s=25e9
    )
    num, num_layers = each * num_stages, len(times)
    setup = Setup(profile, num, 0, 0, 1, num_stages)
    (linear,) = templates_for(setup, [(num_stages, num)])
    found = refined(setup, linear, num)
    best_s = min(run_s(profile, cuts, num) for cuts in combinations(range(1, num_layers), num_stages - 1))
    assert found.time_s(num) == pytest.approx(taken_s(found, profile, num))
    assert found.time_s(num) <= best_s * 1.01


def test_a_heavy_head_and_few_micro_batches():
    """The linear model charges the first stage for a wait in which it works."""
    profile = profile_of([(1.0, 2.0, 10, 20, 0)] * 8 + [(4.0, 8.0, 10, 20, 0)])
    setup = setup_of(profile, num_micro_batches=2, f=0, max_nodes=2)
    (linear,) = templates_for(setup, [(2, 2)])
    better = refined(setup, linear, 2)
    assert better.time_s(2) == taken_s(better, profile, 2) < 0.95 * linear.time_s(2)
    assert better in prepare("oobleck", setup)


def test_stages_that_devices_share_stay():
    profile = profile_of([(1.0, 2.0, 10, 20, 0)] * 4)
    setup = setup_of(profile, f=0, max_nodes=2)
    template = templates(setup)[-1]
    shared = Template(2, 2, tuple(type(s)(s.layers, 2, s.time_s, 0) for s in template.stages), 1.0, 1.0)
    assert refined(setup, shared, 4) is shared
