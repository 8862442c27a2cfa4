"""Policy oobleck: named cases, and random failure sequences down to n0 with every node used.

With templates as the linear model has them (``oobleckd.planner.templates.template``): their numbers can be
followed by hand.
"""

import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.plan import Layers, Plan, Template, device_name, node_of
from oobleckd.planner.policies import adapt, policy, prepare
from oobleckd.planner.policies.cases import pipeline_actions
from oobleckd.planner.policy import Action, PlanError, Policy, Proposal, Setup, Situation
from oobleckd.planner.schedule import schedules
from oobleckd.planner.schedules.validator import validate
from oobleckd.planner.templates.guarantee import losses_survived, max_pipelines, max_usable
from oobleckd.planner.templates.template import templates as templates_of
from tests.unit.planner.build import even_profile, profile_of, setup_of


def n0_of_2(**changes: int) -> Setup:
    """A model of eight layers that needs two nodes."""
    fields = {"device_memory_bytes": 4 * 180 + 2 * 80, "num_micro_batches": 12, "f": 2, "max_nodes": 7}
    return setup_of(even_profile(8), **(fields | changes))


def alive(plan: Plan, nodes: list[str]) -> dict[str, Layers]:
    return {device: layers for device, layers in plan.holdings().items() if node_of(device) in nodes}


def adapted(
    setup: Setup, plan: Plan, nodes: list[str], holdings: dict[str, Layers] | None = None
) -> Proposal:
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    kept = alive(plan, nodes) if holdings is None else holdings
    return adapt("oobleck", setup, templates_of(setup), Situation(tuple(nodes), kept, running))


def started(setup: Setup, nodes: list[str]) -> Plan:
    return adapted(setup, Plan(()), nodes).plan


def check(setup: Setup, templates: tuple[Template, ...], nodes: list[str], proposal: Proposal) -> None:
    plan = proposal.plan
    n0, largest = templates[0].num_nodes, templates[-1].num_nodes
    assert sorted(plan.nodes() + plan.idle) == sorted(nodes)
    assert len(plan.idle) == len(nodes) - max_usable(len(nodes), n0, largest)
    assert len(plan.pipelines) >= max_pipelines(len(nodes), n0, setup.f)
    assert sorted(mb for p in plan.pipelines for mb in p.micro_batches) == list(
        range(setup.num_micro_batches)
    )
    ops = schedules(plan)
    for pipeline in plan.pipelines:
        assert [layer for s in pipeline.segments for layer in s.layers.layers()] == list(
            range(len(setup.profile.layers))
        )
        assert {node_of(s.device) for s in pipeline.segments} == set(pipeline.nodes)
        validate([ops[s.device] for s in pipeline.segments], pipeline.micro_batches)
    assert (plan.reason, proposal.way) == (proposal.reason, "re-instantiate")
    assert all(other.cost_s >= proposal.cost_s for other in proposal.rejected)


def test_the_start_makes_pipelines_of_different_depth():
    plan = started(n0_of_2(), list("abcdefg"))
    assert [p.nodes for p in plan.pipelines] == [("a", "b"), ("c", "d"), ("e", "f", "g")]
    assert [len(p.micro_batches) for p in plan.pipelines] == [4, 4, 4]
    assert plan.pipelines[1].micro_batches == (4, 5, 6, 7)
    assert adapted(n0_of_2(), Plan(()), list("abcdefg")).actions == (Action("start"),)
    assert losses_survived(plan.copies()) == 2


def test_shrink_keeps_the_survivors_together():
    setup = n0_of_2()
    plan = started(setup, list("abcdefg"))
    proposal = adapted(setup, plan, list("abcdeg"))
    assert [p.nodes for p in proposal.plan.pipelines][:2] == [("a", "b"), ("c", "d")]
    assert proposal.actions == (Action("shrink", ("e", "g")),)
    assert {t.target for t in proposal.transfers} <= {"e/0", "g/0"}


def test_borrow_takes_a_node_where_one_can_be_spared():
    setup = n0_of_2(f=1, max_nodes=5)
    plan = started(setup, list("abcde"))
    assert [p.nodes for p in plan.pipelines] == [("a", "b"), ("c", "d", "e")]
    proposal = adapted(setup, plan, list("acde"))
    assert [len(p.nodes) for p in proposal.plan.pipelines] == [2, 2]
    (borrow,) = proposal.actions
    assert (borrow.kind, borrow.whose) == ("borrow", ("a",))
    assert set(borrow.nodes) < set("cde")


def test_merge_when_nobody_can_lend():
    setup = n0_of_2(f=1, max_nodes=4)
    plan = started(setup, list("abcd"))
    proposal = adapted(setup, plan, list("acd"))
    assert [set(p.nodes) for p in proposal.plan.pipelines] == [set("acd")]
    assert proposal.actions == (Action("merge", ("a", "c", "d")),)
    assert losses_survived(proposal.plan.copies()) == 0


def test_a_pipeline_that_is_gone_whole_costs_no_copies():
    setup = n0_of_2()
    plan = started(setup, list("abcdefg"))
    proposal = adapted(setup, plan, list("cdefg"))
    assert proposal.transfers == ()
    assert proposal.actions == (Action("drop", ("a", "b")),)


def test_a_fresh_node_replaces_a_lost_one():
    setup = n0_of_2(f=1, max_nodes=4)
    plan = started(setup, list("abcd"))
    proposal = adapted(setup, plan, list("acdx"))
    assert proposal.actions == (Action("replace", ("x",), ("a",)),)
    assert {t.target for t in proposal.transfers} == {"x/0"}


def test_joining_nodes_get_a_place():
    setup = n0_of_2()
    plan = started(setup, list("abcde"))
    proposal = adapted(setup, plan, list("abcdefg"))
    assert proposal.actions == (Action("join", ("f", "g")),)
    assert sorted(proposal.plan.nodes()) == list("abcdefg")


def test_a_drained_node_is_a_source_and_nothing_else():
    setup = n0_of_2(f=1, max_nodes=4)
    plan = started(setup, list("ab"))
    proposal = adapted(setup, plan, list("bc"), plan.holdings())
    assert {t.source for t in proposal.transfers} == {"a/0"}
    assert "a" not in proposal.plan.nodes()


def test_layers_that_nobody_holds_get_no_transfer():
    setup = n0_of_2(f=0, max_nodes=2)
    plan = started(setup, list("ab"))
    proposal = adapted(setup, plan, list("bc"))
    held = plan.holdings()["b/0"]
    assert proposal.transfers == ()
    assert proposal.plan.holdings()["b/0"] == held


def test_nothing_changes_when_nobody_came_or_went():
    setup = n0_of_2()
    plan = started(setup, list("abcdefg"))
    proposal = adapted(setup, plan, list("abcdefg"))
    assert proposal.plan.pipelines == plan.pipelines
    assert proposal.actions == (Action("keep"),)
    assert proposal.rejected == ()


def test_at_equal_cost_more_pipelines_win():
    # 3+5 loses a node of the 3: 2+5 is as fast as 2+2+3, but can lose only one.
    setup = setup_of(even_profile(5), device_memory_bytes=880, num_micro_batches=9, max_nodes=8)
    plan = started(setup, list("abcdefgh"))
    assert [len(p.nodes) for p in plan.pipelines] == [3, 5]
    proposal = adapted(setup, plan, list("abdefgh"))
    (other,) = proposal.rejected
    assert [len(p.nodes) for p in proposal.plan.pipelines] == [2, 2, 3]
    assert (other.way, other.cause, other.copied_bytes) == ("re-instantiate", "fewer-pipelines", 240)
    assert other.cost_s == pytest.approx(proposal.cost_s)


def test_slow_copies_reject_the_plan_that_moves_more():
    # 2+2+3 loses a node of a 2: 3+3 copies nothing, 2+2+2 is a little faster.
    setup = setup_of(even_profile(5), device_memory_bytes=720, num_micro_batches=13, f=0, max_nodes=7)
    plan = started(setup, list("abcdefg"))
    slow = msgspec.structs.replace(setup.profile, link_bytes_per_s=1000.0)
    templates = templates_of(setup)
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    situation = Situation(tuple("bcdefg"), alive(plan, list("bcdefg")), running)
    proposal = adapt("oobleck", msgspec.structs.replace(setup, profile=slow), templates, situation)
    (other,) = proposal.rejected
    assert (other.way, other.cause) == ("re-instantiate", "cost")
    assert other.cost_s - proposal.cost_s == pytest.approx(0.2, abs=0.01)
    assert (other.copied_bytes, proposal.transfers) == (360, ())
    assert other.step_s < proposal.plan.step_s
    assert [len(p.nodes) for p in proposal.plan.pipelines] == [3, 3]
    assert proposal.actions == (Action("merge", ("b", "c", "d")),)


def test_a_much_faster_plan_rejects_the_one_that_moves_less():
    # 1+1+1+2 loses a node of size 1: 1+1+2 copies nothing, but 1+1+1+1 gives everyone one micro-batch.
    setup = setup_of(even_profile(4), device_memory_bytes=880, num_micro_batches=4, f=0, max_nodes=5)
    plan = started(setup, list("abcde"))
    proposal = adapted(setup, plan, list("acde"))
    (other,) = proposal.rejected
    assert (other.way, other.cause, other.copied_bytes) == ("re-instantiate", "cost", 0)
    assert other.step_s > proposal.plan.step_s
    assert [len(p.nodes) for p in proposal.plan.pipelines] == [1, 1, 1, 1]


def test_two_pipelines_are_opened_where_one_does_not_give_everyone_a_place():
    # Six layers bound the sizes to 5 and 6, so three more nodes fit only if both pipelines become 5.
    setup = setup_of(even_profile(6), device_memory_bytes=400, f=0, max_nodes=15)
    templates = templates_of(setup)
    assert [t.num_nodes for t in templates] == [5, 6]
    nodes = [f"n{i:02}" for i in range(15)]
    plan = started(setup, nodes[:12])
    assert [len(p.nodes) for p in plan.pipelines] == [6, 6]
    proposal = adapted(setup, plan, nodes)
    check(setup, templates, nodes, proposal)
    assert [len(p.nodes) for p in proposal.plan.pipelines] == [5, 5, 5]


def test_layers_bound_the_sizes_and_some_nodes_are_idle():
    # Three layers of which each fills a node: sizes are 3 only, so five nodes leave two idle.
    setup = setup_of(even_profile(3), device_memory_bytes=240, f=1, max_nodes=5)
    proposal = adapted(setup, Plan(()), list("abcde"))
    assert proposal.plan.idle == ("d", "e")
    after = adapted(setup, proposal.plan, list("bcde"))
    assert len(after.plan.idle) == 1


def test_below_n0_there_is_no_plan():
    with pytest.raises(PlanError, match="1 usable node, and the model needs 2"):
        adapted(n0_of_2(), Plan(()), ["a"])


def test_a_policy_nobody_has_is_refused_with_the_names_there_are():
    with pytest.raises(PlanError, match="no policy 'bambo'") as caught:
        policy("bambo")
    assert "oobleck" in caught.value.hint


def test_the_process_pool_can_pickle_what_it_calls():
    named: Policy = policy("oobleck")
    assert named.name == "oobleck"
    assert pickle.loads(pickle.dumps((prepare, adapt))) == (prepare, adapt)


def test_actions_that_policies_seldom_take():
    def of(running: list[str], planned: list[str], usable: str) -> tuple[Action, ...]:
        return pipeline_actions(
            [tuple(nodes) for nodes in running], [tuple(nodes) for nodes in planned], usable
        )

    assert of(["ab", "cd"], ["ac", "bd"], "abcd") == (Action("rebalance"),)
    assert of(["abcd"], ["a", "bc"], "abc") == (Action("reshape", ("a", "b", "c")),)
    assert of(["ab", "c"], ["a"], "a") == (Action("shrink", ("a",)), Action("drop", ("c",)))
    assert of(["ab"], ["c"], "ac") == (Action("reshape", ("a",)), Action("join", ("c",)))


@st.composite
def jobs(draw: st.DrawFn) -> Setup:
    rows = draw(
        st.lists(
            st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(5, 15), st.integers(0, 40)),
            min_size=2,
            max_size=12,
        )
    )
    return setup_of(
        profile_of([(f / 1e3, b / 1e3, p, a, 1000) for f, b, p, a in rows]),
        num_micro_batches=draw(st.integers(1, 20)),
        f=draw(st.integers(0, 3)),
        device_memory_bytes=draw(st.sampled_from([0, 400, 600, 900, 1500])),
        devices_per_node=draw(st.sampled_from([1, 1, 2])),
        max_nodes=draw(st.integers(1, 12)),
    )


@settings(max_examples=80, deadline=None)
@given(jobs(), st.randoms(use_true_random=False))
def test_any_sequence_of_failures_one_at_a_time_down_to_n0(setup: Setup, random) -> None:
    try:
        templates = templates_of(setup)
    except PlanError:
        return
    nodes = [f"n{i:02}" for i in range(max(setup.max_nodes, templates[0].num_nodes))]
    proposal = adapt("oobleck", setup, templates, Situation(tuple(nodes), {}))
    check(setup, templates, nodes, proposal)
    while len(nodes) > templates[0].num_nodes:
        plan = proposal.plan
        nodes.remove(random.choice(nodes))
        held = alive(plan, nodes)
        running = tuple(p.nodes for p in plan.pipelines)
        situation = Situation(tuple(random.sample(nodes, len(nodes))), held, running)
        proposal = adapt("oobleck", setup, templates, situation)
        check(setup, templates, nodes, proposal)
        assert proposal == adapt("oobleck", setup, templates, situation)
        survivors = {layer for layers in held.values() for layer in layers.layers()}
        given_ = {(t.target, t.layer) for t in proposal.transfers}
        for device, layers in proposal.plan.holdings().items():
            for layer in layers.layers():
                lacks = layer not in held.get(device, Layers())
                assert ((device, layer) in given_) == (lacks and layer in survivors)


def test_a_thousand_nodes_lose_one():
    setup = n0_of_2(f=3, max_nodes=1024, num_micro_batches=4096)
    nodes = [f"n{i:04}" for i in range(1024)]
    plan = started(setup, nodes)
    dead = plan.pipelines[7].nodes[0]
    nodes.remove(dead)
    proposal = adapted(setup, plan, nodes)
    check(setup, templates_of(setup), nodes, proposal)
    assert len(proposal.transfers) < 16
    assert device_name(dead, 0) not in proposal.plan.holdings()
