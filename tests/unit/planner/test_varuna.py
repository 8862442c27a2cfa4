"""Policy varuna: the shape against every P x D there is, what stands idle, and when a morph pays."""

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.plan import Plan, Template, node_of
from oobleckd.planner.policies import adapt, policy, prepare
from oobleckd.planner.policy import HORIZON_STEPS, ROLLING_BACK, Action, PlanError, Proposal, Setup, Situation
from oobleckd.planner.sizing.instantiate import slowest_s, split_micro_batches
from tests.unit.planner.build import even_profile, profiles, setup_of
from tests.unit.planner.test_oobleck import n0_of_2


def adapted(setup: Setup, nodes: list[str], plan: Plan | None = None) -> Proposal:
    """What varuna proposes for ``nodes`` while ``plan`` runs; checked for what must always hold."""
    running = tuple(pipeline.nodes for pipeline in plan.pipelines) if plan else ()
    held = {d: layers for d, layers in plan.holdings().items() if node_of(d) in nodes} if plan else {}
    found = adapt("varuna", setup, prepare("varuna", setup), Situation(tuple(nodes), held, running))
    assert found.transfers == ()
    assert len({len(pipeline.nodes) for pipeline in found.plan.pipelines}) == 1
    assert sorted((*found.plan.nodes(), *found.plan.idle)) == sorted(nodes)
    assert found.plan.vacant == ()
    micro_batches = [mb for pipeline in found.plan.pipelines for mb in pipeline.micro_batches]
    assert sorted(micro_batches) == list(range(setup.num_micro_batches))
    assert all(pipeline.micro_batches for pipeline in found.plan.pipelines)
    assert found.plan.reason == found.reason
    assert all(other.cost_s >= found.cost_s - 1e-12 for other in found.rejected)
    return found


def shape(plan: Plan) -> tuple[int, int]:
    return len(plan.pipelines[0].nodes), len(plan.pipelines)


def cost_s(setup: Setup, template: Template, width: int) -> float:
    """A checkpoint written and loaded by the device with most state, and the steps to the next change."""
    shares = split_micro_batches([template] * width, setup.num_micro_batches)
    layers, profile = setup.profile.layers, setup.profile
    most = max(sum(copy_bytes(layers[n]) for n in held.layers()) for held in template.held)
    stop_s = 2 * (profile.link_latency_s + most / profile.link_bytes_per_s)
    return stop_s + HORIZON_STEPS * slowest_s([template] * width, shares)


def test_it_is_registered_and_says_that_it_rolls_back():
    assert {name for name in ("oobleck", "slipstream", "varuna") if policy(name).rolls_back} == ROLLING_BACK
    assert not policy("varuna").reroutes
    assert pickle.loads(pickle.dumps(policy("varuna"))).name == "varuna"


def test_f_bounds_no_depth():
    wanted = prepare("varuna", n0_of_2(f=0))
    assert prepare("varuna", n0_of_2(f=2)) == wanted
    assert [template.num_nodes for template in wanted] == [2, 3, 4, 5, 6, 7]


def test_all_pipelines_have_one_depth_and_the_rest_is_idle():
    found = adapted(n0_of_2(), list("abcdefg"))
    depth, width = shape(found.plan)
    assert (depth, width) == (2, 3)
    assert [pipeline.nodes for pipeline in found.plan.pipelines] == [("a", "b"), ("c", "d"), ("e", "f")]
    assert found.plan.idle == ("g",)
    assert (found.way, found.actions) == ("morph", (Action("start"),))
    assert [(other.way, other.cause) for other in found.rejected] == [("morph", "cost")] * 2


def test_one_pipeline_where_there_is_no_other_shape():
    found = adapted(n0_of_2(), list("ab"))
    assert (found.way, shape(found.plan), found.rejected) == ("morph", (2, 1), ())


def test_too_few_nodes_are_an_error():
    with pytest.raises(PlanError, match="1 usable node, and the model needs 2"):
        adapted(n0_of_2(), ["a"])


def test_no_more_pipelines_than_micro_batches():
    found = adapted(n0_of_2(num_micro_batches=2), list("abcdefg"))
    assert len(found.plan.pipelines) <= 2


def test_a_plan_whose_nodes_are_all_there_is_kept_until_another_pays():
    setup = n0_of_2()
    plan = adapted(setup, list("abcd")).plan
    assert shape(plan) == (2, 2)
    same = adapted(setup, list("abcd"), plan)
    assert same.plan.pipelines == plan.pipelines
    assert (same.way, same.actions) == ("stay", (Action("keep"),))
    one_more = adapted(setup, list("abcde"), plan)
    assert one_more.plan.pipelines == plan.pipelines
    assert one_more.plan.idle == ("e",)
    two_more = adapted(setup, list("abcdef"), plan)
    assert shape(two_more.plan) == (2, 3)
    assert (two_more.way, two_more.rejected[0].cause) == ("morph", "cost")


def test_a_morph_that_does_not_pay_for_its_stop_is_not_made():
    """12 micro-batches: three pipelines save two ninths of a step of 18 ms, and 100 steps of that
    are 0.4 s.
    """
    slow = even_profile(8, params=10**9)  # 60 GB to be written and loaded: minutes
    setup = setup_of(slow, num_micro_batches=12, max_nodes=6, min_nodes=2)
    plan = adapted(setup, list("abcd")).plan
    found = adapted(setup, list("abcdef"), plan)
    assert found.plan.pipelines == plan.pipelines
    assert found.plan.idle == ("e", "f")
    assert found.way == "stay"
    assert (found.rejected[0].way, found.rejected[0].cause) == ("morph", "cost")
    assert found.rejected[0].step_s < found.plan.step_s


def test_a_node_that_is_to_leave_forces_a_morph():
    setup = n0_of_2()
    plan = adapted(setup, list("abcdef")).plan
    found = adapted(setup, list("abcde"), plan)
    assert shape(found.plan) == (2, 2)
    assert (found.way, found.actions) == ("morph", ())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Setup, list[str]]:
    setup = setup_of(
        draw(profiles()),
        num_micro_batches=draw(st.integers(1, 12)),
        f=draw(st.integers(0, 3)),
        max_nodes=draw(st.integers(1, 12)),
        devices_per_node=draw(st.sampled_from([1, 1, 2])),
    )
    return setup, [f"n{number:02d}" for number in range(draw(st.integers(1, 14)))]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_no_other_shape_costs_less(case: tuple[Setup, list[str]]) -> None:
    setup, nodes = case
    templates = {template.num_nodes: template for template in prepare("varuna", setup)}
    if len(nodes) < min(templates):
        with pytest.raises(PlanError):
            adapted(setup, nodes)
        return
    found = adapted(setup, nodes)
    depth, width = shape(found.plan)
    costs = {
        (p, d): cost_s(setup, templates[p], d)
        for p, d in itertools.product(templates, range(1, len(nodes) + 1))
        if p * d <= len(nodes) and d <= setup.num_micro_batches
    }
    assert found.cost_s == pytest.approx(min(costs.values()))
    assert costs[depth, width] == pytest.approx(found.cost_s)
    shares = [len(pipeline.micro_batches) for pipeline in found.plan.pipelines]
    assert found.plan.step_s == pytest.approx(slowest_s([templates[depth]] * width, shares))
