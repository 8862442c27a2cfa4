"""Policy bamboo: who takes over, when the pipelines are made anew, and random failures one after
the other.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.plan import Layers, Plan, node_of
from oobleckd.planner.policies import adapt, policy, prepare
from oobleckd.planner.policy import Action, PlanError, Proposal, Setup, Situation
from oobleckd.planner.profile import HeldBesides
from oobleckd.planner.reroute.reroute import covers, layout_of
from oobleckd.planner.schedule import parse_ops
from oobleckd.planner.schedules.jobshop import shop_of
from oobleckd.planner.schedules.validator import validate_shop
from oobleckd.planner.templates.guarantee import losses_survived
from tests.unit.planner.build import even_profile, setup_of


def threes(**changes: Any) -> Setup:
    """Pipelines of three nodes and more."""
    fields = {"num_micro_batches": 6, "min_nodes": 3, "max_nodes": 6, "held": HeldBesides(redundant_bytes=40)}
    return setup_of(even_profile(6), **(fields | changes))


def adapted(setup: Setup, plan: Plan, nodes: str, held: dict[str, Layers] | None = None) -> Proposal:
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    kept = (
        {d: layers for d, layers in plan.holdings().items() if node_of(d) in nodes} if held is None else held
    )
    found = adapt("bamboo", setup, prepare("bamboo", setup), Situation(tuple(nodes), kept, running))
    check(setup, nodes, kept, found)
    return found


def started(setup: Setup, nodes: str) -> Plan:
    return adapted(setup, Plan(()), nodes).plan


def check(setup: Setup, nodes: str, held: dict[str, Layers], found: Proposal) -> None:
    """Every layer is computed once by somebody who holds it or gets it, and everybody holds its successor's
    layers.
    """
    plan = found.plan
    layout = layout_of(plan, 3, len(setup.profile.layers))
    assert all(covers(route, layout) for route in layout.routes)
    assert sorted((*plan.nodes(), *plan.idle)) == sorted(nodes)
    copied = {(copy.target, copy.layer) for copy in found.transfers}
    for device, layers in plan.holdings().items():
        for layer in layers.layers():
            lost = not any(layer in other for other in held.values())
            assert layer in held.get(device, Layers()) or lost or (device, layer) in copied
    for pipeline in plan.pipelines:
        segments = pipeline.segments
        for at, segment in enumerate(segments):
            if len(segments) > 1 and segment.device not in plan.vacant:
                behind = segments[(at + 1) % len(segments)]
                assert layout.redundant[segment.device] == Layers.of(behind.layers)
    if plan.vacant and found.ops:
        validate_shop(shop_of(layout, setup), {d: parse_ops(text) for d, text in found.ops.items()})


def places(plan: Plan) -> list[tuple[str, ...]]:
    return [pipeline.nodes for pipeline in plan.pipelines]


def test_the_start() -> None:
    plan = started(threes(), "abcdef")
    assert places(plan) == [("a", "b", "c"), ("d", "e", "f")]
    assert losses_survived(plan.copies()) == 3  # two copies of each in each pipeline
    assert pickle.loads(pickle.dumps(policy("bamboo"))).name == "bamboo"


def test_a_predecessor_takes_over_and_nothing_moves() -> None:
    setup = threes()
    plan = started(setup, "abcdef")
    found = adapted(setup, plan, "acdef")
    assert places(found.plan) == places(plan)
    assert found.plan.vacant == ("b/0",)
    assert found.transfers == ()
    assert (found.way, found.actions) == ("take-over", (Action("take-over", ("a",), ("b",)),))
    assert losses_survived(found.plan.copies()) == 2
    layout = layout_of(found.plan, 1, 6)
    mine = [route for route in layout.routes if route.touches(["a/0"])]
    assert {tuple(s.device for s in route.segments) for route in mine} == {("a/0", "a/0", "c/0")}
    (anew,) = found.rejected
    assert (anew.way, anew.cause) == ("re-instantiate", "moves-layers")


def test_two_that_are_not_neighbours() -> None:
    setup = threes(max_nodes=8, min_nodes=4)
    plan = started(setup, "abcdefgh")
    assert places(plan) == [tuple("abcd"), tuple("efgh")]
    found = adapted(setup, plan, "acefgh")
    assert found.plan.vacant == ("b/0", "d/0")
    assert found.transfers == ()
    assert found.actions == (Action("take-over", ("a",), ("b",)), Action("take-over", ("c",), ("d",)))


def test_neighbours_make_the_pipelines_anew() -> None:
    setup = threes()
    plan = started(setup, "abcdef")
    found = adapted(setup, plan, "adef")
    assert found.plan.vacant == ()
    (stay,) = [one for one in found.rejected if one.way == "take-over"]
    assert stay.cause == "no-redundant-holder"
    assert stay.cost_s > 0


def test_a_standby_takes_the_place_with_a_stage_and_its_successor_s() -> None:
    setup = threes()
    plan = started(setup, "abcdef")
    found = adapted(setup, plan, "acdefx")
    assert places(found.plan) == [("a", "x", "c"), ("d", "e", "f")]
    assert found.plan.vacant == ()
    wanted = {
        layer
        for held in (plan.pipelines[0].segments[1], plan.pipelines[0].segments[2])
        for layer in held.layers.layers()
    }
    assert {(copy.target, copy.layer) for copy in found.transfers} == {("x/0", layer) for layer in wanted}
    assert (found.way, found.actions) == ("fill", (Action("take-place", ("x",), ("b",)),))
    back = adapted(setup, adapted(setup, plan, "acdef").plan, "abcdef")
    assert places(back.plan) == places(plan)


def test_a_pipeline_that_is_gone_whole_is_oobleck_s() -> None:
    setup = threes()
    plan = started(setup, "abcdef")
    assert adapted(setup, plan, "def").actions == (Action("drop", ("a", "b", "c")),)
    with pytest.raises(PlanError, match="2 usable nodes, and the model needs 3"):
        adapt("bamboo", setup, prepare("bamboo", setup), Situation(("a", "b"), {}, tuple(places(plan))))


def test_a_node_of_two_devices_takes_two_neighbours_along() -> None:
    setup = threes(devices_per_node=2, min_nodes=2, max_nodes=4)
    plan = started(setup, "abcd")
    assert places(plan) == [("a", "b"), ("c", "d")]
    assert adapted(setup, plan, "acd").plan.vacant == ()
    held = plan.holdings()
    held.pop("b/1")
    mended = adapted(setup, plan, "abcd", held)
    assert {copy.target for copy in mended.transfers} == {"b/1"}
    assert places(mended.plan) == places(plan)


def test_a_template_has_room_for_the_work_of_two() -> None:
    """The least memory with which three nodes will do is enough after a loss."""
    free = threes()
    limit = max(stage.memory_bytes for stage in prepare("bamboo", free)[0].stages)
    setup = threes(device_memory_bytes=limit)
    plan = started(setup, "abcdef")
    for dead in "abc":
        assert adapted(setup, plan, "abcdef".replace(dead, "")).plan.vacant == (f"{dead}/0",)


@pytest.mark.parametrize("changes", [{}, {"decoupled": True}, {"decoupled": True, "staggered": True}])
def test_orders_come_with_the_plan(changes: dict[str, bool]) -> None:
    setup = threes(num_micro_batches=12, **changes)
    plan = started(setup, "abcdef")
    found = adapted(setup, plan, "acdef")
    assert found.plan.vacant == ("b/0",)
    assert not found.ops or found.ops.keys() == found.plan.holdings().keys()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_failures_and_returns(data: st.DataObject) -> None:
    setup = threes(max_nodes=7, f=1, num_micro_batches=data.draw(st.integers(2, 8)))
    nodes = list("abcdefgh")[: 6 + data.draw(st.integers(0, 1))]
    plan = started(setup, "".join(nodes))
    held, fresh = plan.holdings(), iter("uvwxyz")
    for _ in range(data.draw(st.integers(1, 6))):
        gone = data.draw(st.sets(st.sampled_from(nodes), max_size=2)) if len(nodes) > 4 else set()
        if data.draw(st.booleans()):
            nodes.append(next(fresh))
        nodes = sorted(set(nodes) - gone)
        held = {device: layers for device, layers in held.items() if node_of(device) not in gone}
        if len(nodes) < 3 or any(not any(n in r for r in held.values()) for n in range(6)):
            return
        found = adapted(setup, plan, "".join(nodes), held)
        plan, held = found.plan, found.plan.holdings()
