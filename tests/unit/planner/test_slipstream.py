"""Policy slipstream: who takes whose place, who computes for whom, and random failures one after
the other.
"""

import pickle
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Layers, Layout, Plan, Range, Template, node_of
from oobleckd.planner.policies import adapt, policy, prepare
from oobleckd.planner.policy import HORIZON_STEPS, REROUTING, Action, PlanError, Proposal, Setup, Situation
from oobleckd.planner.reroute.reroute import covers, layout_of
from oobleckd.planner.schedule import parse_ops
from oobleckd.planner.schedules.evaluate import period
from oobleckd.planner.schedules.jobshop import cost_of, orders_of, shop_of
from oobleckd.planner.schedules.routed import WORTH, busiest_s, ready_first_s
from oobleckd.planner.schedules.timeline import dry_run
from oobleckd.planner.schedules.validator import validate_shop
from oobleckd.planner.templates.guarantee import losses_survived
from oobleckd.protocol.job import PolicyName
from tests.unit.planner.build import even_profile, setup_of
from tests.unit.planner.test_oobleck import alive, n0_of_2


def adapted(
    setup: Setup,
    plan: Plan,
    nodes: list[str],
    holdings: dict[str, Layers] | None = None,
    name: str = "slipstream",
) -> Proposal:
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    kept = alive(plan, nodes) if holdings is None else holdings
    found = adapt(name, setup, prepare(name, setup), Situation(tuple(nodes), kept, running))
    check(setup, nodes, kept, found)
    return found


def started(setup: Setup, nodes: list[str]) -> Plan:
    return adapted(setup, Plan(()), nodes).plan


def check(setup: Setup, nodes: list[str], held: dict[str, Layers], found: Proposal) -> None:
    """Every layer of every micro-batch is computed once, by somebody who is here and holds it or gets it."""
    plan, num_layers = found.plan, len(setup.profile.layers)
    layout = layout_of(plan, 3, num_layers)
    assert [r.micro_batch for r in layout.routes] == list(range(setup.num_micro_batches))
    assert all(covers(route, layout) for route in layout.routes)
    assert sorted((*plan.nodes(), *plan.idle)) == sorted(nodes)
    names = [node for pipeline in plan.pipelines for node in pipeline.nodes]
    assert len(set(names)) == len(names)
    assert {node_of(device) for device in plan.vacant} == set(names) - set(nodes)
    copied = {(copy.target, copy.layer) for copy in found.transfers}
    for device, layers in plan.holdings().items():
        for layer in layers.layers():
            there = layer in held.get(device, Layers())
            lost = not any(layer in other for other in held.values())
            assert there or lost or (device, layer) in copied
    assert plan.reason == found.reason
    if plan.vacant and found.ops:
        check_ops(setup, layout, found)


def check_ops(setup: Setup, layout: Layout, found: Proposal) -> None:
    """Orders can be run, take what is said, and are worth a stop."""
    shop = shop_of(layout, setup)
    ops = {device: parse_ops(text) for device, text in found.ops.items()}
    validate_shop(shop, ops)
    step_s = found.plan.step_s
    assert step_s < ready_first_s(shop, staggered=setup.staggered) * (1 - WORTH)
    if not setup.staggered:
        assert dry_run(ops, cost_of(shop)).makespan_s == pytest.approx(step_s)


def places(plan: Plan) -> list[tuple[str, ...]]:
    return [pipeline.nodes for pipeline in plan.pipelines]


def test_it_is_registered_and_says_that_it_re_routes():
    assert policy("slipstream").reroutes
    assert not policy("oobleck").reroutes
    assert {name for name in get_args(PolicyName) if policy(name).reroutes} == REROUTING
    assert prepare("slipstream", n0_of_2()) == prepare("oobleck", n0_of_2())
    assert pickle.loads(pickle.dumps(policy("slipstream"))).name == "slipstream"


def test_the_start_is_oobleck_s():
    setup = n0_of_2()
    nodes = list("abcdefg")
    assert (
        started(setup, nodes)
        == adapt("oobleck", setup, prepare("oobleck", setup), Situation(tuple(nodes), {})).plan
    )


def test_a_dead_node_s_micro_batches_go_to_its_peers_and_nothing_moves():
    setup = n0_of_2(max_nodes=4, f=1)
    plan = started(setup, list("abcd"))
    found = adapted(setup, plan, list("abc"))
    assert places(found.plan) == places(plan)
    assert found.plan.vacant == ("d/0",)
    assert found.transfers == ()
    assert (found.way, found.actions) == ("re-route", (Action("re-route", ("b",), ("d",)),))
    assert losses_survived(found.plan.copies()) == 0
    assert found.cost_s == pytest.approx(HORIZON_STEPS * found.plan.step_s)
    layout = layout_of(found.plan, 1, 8)
    assert found.plan.step_s <= ready_first_s(shop_of(layout, setup)) * (1 + 1e-9)
    assert found.plan.step_s >= busiest_s(layout.routes, setup.profile)
    (anew,) = found.rejected
    assert (anew.way, anew.cause) == ("re-instantiate", "moves-layers")
    other = adapt(
        "oobleck",
        setup,
        prepare("oobleck", setup),
        Situation(tuple("abc"), alive(plan, list("abc")), tuple(places(plan))),
    )
    assert anew.cost_s == other.cost_s


def test_it_answers_the_same_again_and_then_there_is_nothing_to_copy():
    setup = n0_of_2(max_nodes=6)
    plan = started(setup, list("abcdef"))
    first = adapted(setup, plan, list("abcde")).plan
    again = adapted(setup, first, list("abcde"))
    assert again.plan == first
    assert again.transfers == ()


def test_whoever_comes_fills_the_vacant_place():
    setup = n0_of_2(max_nodes=6)
    plan = started(setup, list("abcdef"))
    hurt = adapted(setup, plan, list("abcde")).plan
    back = adapted(setup, hurt, list("abcdef"))
    assert places(back.plan) == places(plan)
    assert back.plan.vacant == ()
    assert {t.target for t in back.transfers} == {"f/0"}
    assert (back.way, back.actions) == ("fill", (Action("copy-back", ("f",)),))
    other = adapted(setup, hurt, list("abcdex"))
    assert places(other.plan) == [("a", "b"), ("c", "d"), ("e", "x")]
    assert (other.way, other.actions) == ("fill", (Action("take-place", ("x",), ("f",)),))
    assert [t.target for t in other.transfers] == ["x/0"] * 4
    assert other.rejected == ()


def test_a_standby_takes_the_place_at_once():
    setup = n0_of_2(max_nodes=6)
    plan = started(setup, list("abcdef"))
    found = adapted(setup, plan, list("abcdex"))
    assert places(found.plan) == [("a", "b"), ("c", "d"), ("e", "x")]


def test_the_place_that_is_filled_first_is_the_one_that_makes_the_step_shortest():
    setup = n0_of_2(max_nodes=8, f=3)
    plan = started(setup, list("abcdefgh"))
    assert places(plan) == [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]
    held = alive(plan, list("adfg"))
    # Two second stages (d, f) and two first ones (a, g) are left; with b gone as well one second stage.
    found = adapted(setup, plan, list("adgx"), {d: r for d, r in held.items() if d != "f/0"})
    assert {t.target for t in found.transfers} == {"x/0"}
    assert found.plan.holdings()["x/0"] == Layers.of(Range(4, 8))


def test_several_dead_of_one_stage_are_spread_over_the_stages_where_that_pays():
    setup = n0_of_2(max_nodes=8, f=3)
    plan = started(setup, list("abcdefgh"))
    found = adapted(setup, plan, list("abcegh"))  # d and f, both second stages
    layout = layout_of(found.plan, 1, 8)
    assert sorted(layout.copies()) == [3] * 8  # three first stages and three second ones
    (moved,) = {copy.target for copy in found.transfers}
    (move, *_) = found.actions
    assert (found.way, move.kind, move.nodes) == ("re-route", "move", (node_of(moved),))
    stay = msgspec_plan(plan, ("d/0", "f/0"))
    stay_s = busiest_s(layout_of(stay, 1, 8).routes, setup.profile)
    assert found.cost_s < HORIZON_STEPS * stay_s
    assert found.cost_s == pytest.approx(
        copy_s(found.transfers, setup.profile) + HORIZON_STEPS * found.plan.step_s
    )


def msgspec_plan(plan: Plan, vacant: tuple[str, ...]) -> Plan:
    return Plan(plan.pipelines, vacant=vacant)


def test_where_copies_cost_more_than_they_save_nobody_moves():
    heavy, params = even_profile(8, params=10**9), 10**9
    memory = 4 * 18 * params + 2 * 80
    setup = setup_of(heavy, device_memory_bytes=memory, num_micro_batches=12, f=3, max_nodes=8)
    plan = started(setup, list("abcdefgh"))
    found = adapted(setup, plan, list("abcegh"))
    assert found.transfers == ()
    assert found.plan.vacant == ("d/0", "f/0")
    (move,) = [one for one in found.rejected if one.way == found.way == "re-route"]
    assert (move.cause, move.copied_bytes > 0) == ("cost", True)


def test_a_pipeline_that_is_gone_whole_and_more_nodes_than_places_are_oobleck_s():
    setup = n0_of_2()
    plan = started(setup, list("abcdef"))
    gone = adapted(setup, plan, list("cdef"))
    assert places(gone.plan) == [("c", "d"), ("e", "f")]
    assert gone.actions == (Action("drop", ("a", "b")),)
    more = adapted(setup, plan, list("abcdefg"))
    assert more.actions == (Action("join", ("g",)),)
    with pytest.raises(PlanError, match="1 usable node, and the model needs 2"):
        adapt("slipstream", setup, prepare("slipstream", setup), Situation(("a",), {}, tuple(places(plan))))


def test_a_layer_that_no_place_holds_is_oobleck_s():
    setup = n0_of_2(max_nodes=4, f=1)
    plan = started(setup, list("abcd"))
    found = adapt(
        "slipstream", setup, prepare("slipstream", setup),
        Situation(("a", "c"), alive(plan, list("ac")), tuple(places(plan))),
    )  # fmt: skip
    assert found.plan.vacant == ()
    assert places(found.plan) == [("a", "c")]


def test_pipelines_of_different_depth_help_each_other():
    # Whoever takes the middle stage has room for its own two micro-batches in flight, and for three of one
    # layer.
    setup = n0_of_2(device_memory_bytes=940)
    plan = started(setup, list("abcdefg"))
    assert [len(p.nodes) for p in plan.pipelines] == [2, 2, 3]
    found = adapted(setup, plan, list("abcdeg"))  # the middle of three stages
    assert places(found.plan) == places(plan)
    assert found.plan.vacant == ("f/0",)
    tight = n0_of_2()
    found = adapted(tight, plan, list("abcdeg"))
    assert found.plan.vacant == (), "no room for it, so oobleck answers"


def test_a_new_incarnation_of_a_device_gets_its_layers_again():
    setup = setup_of(
        even_profile(8), device_memory_bytes=4 * 180 + 4 * 80, devices_per_node=2, num_micro_batches=8
    )
    plan = started(setup, list("abc"))
    held = plan.holdings()
    held.pop("b/1")
    found = adapted(setup, plan, list("abc"), held)
    assert places(found.plan) == places(plan)
    assert {t.target for t in found.transfers} == {"b/1"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_failures_and_returns(data: st.DataObject):
    """Whoever dies or comes, one by one or at once: while every layer has a holder there is a plan, in which
    every micro-batch is computed and no device has more to do than the stages' live holders make it.
    """
    depth = data.draw(st.integers(0, 2))  # nodes beyond pipelines of two, so of three where it is not 0
    setup = n0_of_2(max_nodes=7, f=2, num_micro_batches=data.draw(st.integers(1, 16)))
    nodes = list("abcdefgh")[: 6 + depth]
    plan = started(setup, nodes)
    held = plan.holdings()
    fresh = iter("uvwxyz")
    for _ in range(data.draw(st.integers(1, 6))):
        gone = data.draw(st.sets(st.sampled_from(nodes), max_size=2)) if len(nodes) > 3 else set()
        if data.draw(st.booleans()):
            nodes.append(next(fresh))
        nodes = sorted(set(nodes) - gone)
        held = {device: layers for device, layers in held.items() if node_of(device) not in gone}
        if len(nodes) < 2 or any(not any(n in r for r in held.values()) for n in range(8)):
            return
        found = adapted(setup, plan, nodes, held)
        _carries_what_it_must(setup, found.plan)
        plan, held = found.plan, found.plan.holdings()


def _carries_what_it_must(setup: Setup, plan: Plan) -> None:
    """In a grid of equal pipelines: the share of the micro-batches that the fewest holders of a
    stage make.
    """
    splits = {tuple(s.layers for s in p.segments) for p in plan.pipelines}
    if len(splits) != 1:
        return
    layout = layout_of(plan, 1, len(setup.profile.layers))
    count = dict.fromkeys(layout.holdings, 0)
    for route in layout.routes:
        for segment in route.segments:
            count[segment.device] += 1
    most = max(len(p.micro_batches) for p in plan.pipelines)
    for layers in next(iter(splits)):
        holders = [d for d, held in layout.holdings.items() if held.spans(layers)]
        assert max(count[d] for d in holders) <= max(most, -(-setup.num_micro_batches // len(holders)))


def test_templates_are_oobleck_s():
    templates: tuple[Template, ...] = prepare("slipstream", n0_of_2())
    assert [template.num_nodes for template in templates] == [2, 3]


def test_where_routes_that_cross_would_not_fit_it_is_oobleck_s():
    """With b gone, d works at the end of some routes and one before the end of others: more in flight than
    memory is for.
    """
    setup = n0_of_2()
    plan = started(setup, list("abcdefg"))
    tight = adapted(setup, plan, list("acdefg"))
    assert tight.plan.vacant == ()
    assert tight.way == "re-instantiate"
    assert {action.kind for action in tight.actions} <= {"shrink", "borrow", "merge", "reshape"}
    roomy = n0_of_2(device_memory_bytes=0)
    found = adapt(
        "slipstream", roomy, prepare("slipstream", setup),
        Situation(tuple("acdefg"), alive(plan, list("acdefg")), tuple(places(plan))),
    )  # fmt: skip
    assert found.plan.vacant == ("b/0",)
    assert found.transfers == ()


@pytest.mark.parametrize("changes", [{}, {"decoupled": True}, {"decoupled": True, "staggered": True}])
def test_where_routes_cross_orders_come_with_the_plan(changes: dict[str, bool]):
    setup = setup_of(
        even_profile(8), num_micro_batches=12, f=1, max_nodes=8, min_nodes=4, chunks=1, **changes
    )
    plan = started(setup, list("abcdefgh"))
    found = adapted(setup, plan, list("acdefgh"))
    assert found.plan.vacant == ("b/0",)
    assert found.ops.keys() == found.plan.holdings().keys()


def test_where_none_is_enough_faster_whatever_is_ready_is_done():
    setup = setup_of(even_profile(2), num_micro_batches=2, max_nodes=2)
    plan = started(setup, list("ab"))
    found = adapted(setup, plan, list("a"))
    assert found.ops == {}


def test_with_staggered_updates_an_order_is_made_for_the_steps_that_follow_each_other():
    fields = {"num_micro_batches": 8, "f": 0, "max_nodes": 4, "min_nodes": 4, "chunks": 1, "decoupled": True}
    setup = setup_of(even_profile(4), **fields)
    staggered = setup_of(even_profile(4), **fields, staggered=True)
    nodes = tuple("abcd")
    plain = adapt("slipstream", setup, prepare("slipstream", setup), Situation(nodes, {}))
    found = adapt("slipstream", staggered, prepare("slipstream", staggered), Situation(nodes, {}))
    shop = shop_of(layout_of(found.plan, 1, 4), staggered)
    ops = {device: parse_ops(text) for device, text in found.ops.items()}
    validate_shop(shop, ops)
    theirs = orders_of(shop, {device: parse_ops(text) for device, text in plain.ops.items()})
    assert period(shop, orders_of(shop, ops)).seconds <= period(shop, theirs).seconds
