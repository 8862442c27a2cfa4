"""Places and turns as devices and micro-batches, and what is copied between devices of one rank."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.costs.sharded import UNKNOWN, Sharding, sharded_setup
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Layers, Layout, Pipeline, Plan, Range, Route, Segment, shard_rank
from oobleckd.planner.policies import deployable, prepare
from oobleckd.planner.policies.bydevice import transfers_between
from oobleckd.planner.policies.stagesize import chosen
from oobleckd.planner.policy import PlanError, Proposal, Setup, Situation
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedule import format_ops, one_f_one_b, parse_ops
from tests.unit.planner.build import even_profile, setup_of

FIRST = (Segment("a/0", Range(0, 2)), Segment("b/1", Range(2, 4)))
TWO_TURNS = Plan(
    (Pipeline(("a", "b"), FIRST, (0, 1)), Pipeline(("c",), (Segment("c/0", Range(0, 4)),), (2,)))
)


def sharded_by(g: int, **changes: int) -> Setup:
    profile = even_profile(6, params=1000)
    return sharded_setup(setup_of(profile, devices_per_node=g, **changes), Sharding(g, UNKNOWN))


def test_a_place_is_neighbouring_devices_of_its_node() -> None:
    lanes = Lanes(4, 8)
    assert lanes.devices("node-1/0") == ("node-1/0", "node-1/1", "node-1/2", "node-1/3")
    assert lanes.devices("node-1/2")[1] == lanes.device("node-1/2", 1) == "node-1/9"
    assert {lanes.place(device) for device in lanes.devices("node-1/2")} == {"node-1/2"}
    assert lanes.places(("b/7", "b/4", "a/0")) == ("a/0", "b/1")
    assert Lanes(1, 8).devices("b/7") == ("b/7",)


@pytest.mark.parametrize(
    ("g", "num", "turns", "wanted"),
    [
        (2, 6, (1, 2), (2, 3, 4, 5)),
        (2, 5, (1, 2), (2, 3, 4)),  # the last turn of the step is one short
        (4, 3, (0,), (0, 1, 2)),  # fewer micro-batches than devices
        (4, 9, (0, 2), (0, 1, 2, 3, 8)),
        (1, 3, (0, 2), (0, 2)),
    ],
)
def test_a_turn_is_as_many_micro_batches_as_are_left(
    g: int, num: int, turns: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    assert Lanes(g, num).micro_batches(turns) == wanted


def test_a_pipeline_of_places_is_lanes_of_devices() -> None:
    found = Lanes(2, 5).layout(layout_of(TWO_TURNS, 7, 4))
    assert found.devices_per_stage == 2
    assert {route.micro_batch: [s.device for s in route.segments] for route in found.routes} == {
        0: ["a/0", "b/2"], 1: ["a/1", "b/3"], 2: ["a/0", "b/2"], 3: ["a/1", "b/3"], 4: ["c/0"],
    }  # fmt: skip
    assert {route.attempt for route in found.routes} == {7}
    halves = {"a/0": Range(0, 2), "a/1": Range(0, 2), "b/2": Range(2, 4), "b/3": Range(2, 4)}
    whole = dict.fromkeys(("c/0", "c/1"), Range(0, 4))
    assert found.holdings == {device: Layers.of(held) for device, held in (halves | whole).items()}
    assert found.copies() == (2, 2, 2, 2)
    assert Lanes.laid_out(found) == Lanes(2, 5)


def test_with_one_device_a_stage_all_is_as_it_was() -> None:
    lanes, layout = Lanes(1, 3), layout_of(TWO_TURNS, 7, 4)
    situation = Situation(("a", "b", "c"), layout.holdings)
    assert lanes.layout(layout) is layout
    assert lanes.seen(situation) is situation


def test_redundant_layers_and_recomputation_are_those_of_the_place() -> None:
    redundant = {"a/0": Layers.of(Range(2, 4)), "b/1": Layers.of(Range(0, 2))}
    plan = msgspec.structs.replace(TWO_TURNS, redundant=redundant, recompute={"b/1": "blocks"})
    found = Lanes(2, 6).layout(layout_of(plan, 7, 4))
    assert found.redundant["a/1"] == Layers.of(Range(2, 4))
    assert set(found.redundant) == {"a/0", "a/1", "b/2", "b/3"}
    assert found.recompute == {"b/2": "blocks", "b/3": "blocks"}
    assert found.holdings["a/1"] == Layers.of(Range(0, 2), Range(2, 4))


def test_peers_compute_a_vacant_place_lane_by_lane() -> None:
    vacant = msgspec.structs.replace(TWO_TURNS, vacant=("b/1",))
    found = Lanes(2, 5).layout(layout_of(vacant, 7, 4))
    assert {"b/2", "b/3"}.isdisjoint(found.holdings)
    ways = {route.micro_batch: [s.device for s in route.segments] for route in found.routes}
    assert all(device in found.holdings for way in ways.values() for device in way)
    assert {tuple(way) for number, way in ways.items() if number % 2} <= {("a/1", "c/1"), ("c/1",)}


def test_orders_of_a_place_are_those_of_its_devices() -> None:
    text = format_ops(one_f_one_b(2, 0, (0, 1, 2)))
    found = Lanes(2, 5).ops({"b/1": text})
    assert set(found) == {"b/2", "b/3"}
    assert found["b/2"] == format_ops(one_f_one_b(2, 0, (0, 2, 4)))
    kept = [op for op in parse_ops(text) if op.micro_batch < 2]
    assert [(op.kind, op.micro_batch) for op in parse_ops(found["b/3"])] == [
        (op.kind, op.micro_batch if op.micro_batch < 0 else 2 * op.micro_batch + 1) for op in kept
    ]


# ---------------------------------------------------------------------- copies


def deployed(setup: Setup, *nodes: str) -> tuple[Proposal, Layout]:
    templates = prepare("oobleck", setup)
    found = deployable("oobleck", setup, templates, Situation(nodes, {}))
    num_layers = len(setup.profile.layers)
    return found, Lanes.of(setup).layout(layout_of(found.plan, 1, num_layers))


def after(
    setup: Setup, layout: Layout, proposal: Proposal, dead: set[str], nodes: tuple[str, ...]
) -> Proposal:
    held = {device: layers for device, layers in layout.holdings.items() if device not in dead}
    running = tuple(pipeline.nodes for pipeline in proposal.plan.pipelines)
    return deployable("oobleck", setup, prepare("oobleck", setup), Situation(nodes, held, running))


@pytest.mark.parametrize("g", [2, 4])
def test_a_spare_gets_its_share_alone_from_its_rank(g: int) -> None:
    setup, nodes = sharded_by(g), ("n1", "n2", "n3", "n0")
    first, layout = deployed(setup, "n1", "n2")
    assert Lanes.of(setup).num_micro_batches == 8
    lost = "n2/1"
    found = after(setup, layout, first, {lost}, nodes[:2])
    assert {copy.target for copy in found.transfers} == {lost}
    assert {layout.rank(copy.source) for copy in found.transfers} == {1}
    whole = sum(map(copy_bytes, setup.profile.layers))
    assert sum(copy.num_bytes for copy in found.transfers) == whole // g
    assert found.plan.pipelines == first.plan.pipelines
    assert [action.kind for action in found.actions] == ["copy-back"]


def test_what_is_left_of_a_stage_stays_where_a_node_stands_by_that_is_empty() -> None:
    setup = sharded_by(2, max_nodes=2)
    first, layout = deployed(setup, "n1", "n2")
    # n0 comes first by name; were n2 empty for the policy, it would be taken.
    held = {device: layers for device, layers in layout.holdings.items() if device != "n2/0"}
    seen = Lanes.of(setup).seen(Situation(("n0", "n1", "n2"), held))
    assert seen.holdings == first.plan.holdings()


def test_a_node_that_comes_anew_gets_all_shards_each_from_its_rank() -> None:
    setup = sharded_by(2)
    first, layout = deployed(setup, "n1", "n2")
    found = after(setup, layout, first, {"n2/0", "n2/1"}, ("n1", "n3"))
    by_rank = Counter((copy.target, layout.rank(copy.source)) for copy in found.transfers)
    assert set(by_rank) == {("n3/0", 0), ("n3/1", 1)}
    assert len(set(by_rank.values())) == 1
    assert "copy-back" not in {action.kind for action in found.actions}


def test_a_layer_is_put_together_from_what_several_broken_stages_have() -> None:
    setup = sharded_by(2)
    first, layout = deployed(setup, "n1", "n2")
    found = after(setup, layout, first, {"n1/0", "n2/1"}, ("n1", "n2"))
    copied = Counter((copy.source, copy.target) for copy in found.transfers)
    assert set(copied) == {("n2/0", "n1/0"), ("n1/1", "n2/1")}


def test_a_pipeline_that_is_split_anew_moves_shards_within_ranks() -> None:
    setup = sharded_by(2, min_nodes=2)
    first, layout = deployed(setup, "n1", "n2", "n3", "n4")
    assert [len(pipeline.nodes) for pipeline in first.plan.pipelines] == [2, 2]
    found = after(setup, layout, first, {"n4/0", "n4/1"}, ("n1", "n2", "n3"))
    assert found.transfers
    assert all(layout.rank(copy.source) == layout.rank(copy.target) for copy in found.transfers)
    wanted = Lanes.of(setup).holdings(found.plan)
    for device, copies in itertools.groupby(found.transfers, key=lambda copy: copy.target):
        had = layout.holdings.get(device, Layers())
        assert {copy.layer for copy in copies} == set(wanted[device].layers()) - set(had.layers())


# ---------------------------------------------------------------------- who is able


def test_a_layer_is_lost_when_all_stages_that_hold_it_have_lost_a_device() -> None:
    held = {f"{node}/{index}": Layers.of(Range(0, 2)) for node in "ab" for index in range(2)}
    layout = Layout(1, 2, held, (Route(0, 1, (Segment("a/0", Range(0, 2)),)),), devices_per_stage=2)
    assert layout.unable({"a/1"}) == {"a/0", "a/1"}
    assert layout.lost({"a/1"}) == ()
    assert layout.lost({"a/1", "b/0"}) == (0, 1)
    assert layout.copies({"a/1", "b/0"}) == (1, 1)


# ---------------------------------------------------------------------- how many devices


def test_the_number_of_devices_that_plans_best_is_chosen() -> None:
    # One device of 100,000 bytes has no room for six layers of 18,000; two or four have.
    profile = even_profile(6, params=1000)
    whole = setup_of(profile, devices_per_node=4, device_memory_bytes=100_000, nodes_now=2, f=1)
    setups = [sharded_setup(whole, Sharding(g, UNKNOWN)) for g in (1, 2, 4)]
    steps = [deployed(setup, "n1", "n2")[0].plan.step_s for setup in setups]
    assert chosen("oobleck", setups) == steps.index(min(steps))


def test_for_other_nodes_the_number_that_there_is_stays_where_it_can() -> None:
    """Stages of one device have room on two nodes, those of two on three."""
    whole = setup_of(
        even_profile(6, params=1000), devices_per_node=4, device_memory_bytes=25_000, nodes_now=9, f=0
    )
    one, two = (sharded_setup(whole, Sharding(g, UNKNOWN)) for g in (1, 2))
    assert [min(t.num_nodes for t in prepare("oobleck", setup)) for setup in (one, two)] == [2, 3]
    assert chosen("oobleck", [two, one], 2) == 1, "the only one that has a plan"
    assert chosen("oobleck", [one, two], 2) == 0
    assert chosen("oobleck", [two, one], 1) == 1, "it waits for fewer"
    assert chosen("oobleck", [one, one], 4) == 0


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_copies_between_stages_of_two_numbers_come_from_all_ranks(before: int, after: int) -> None:
    """Of every shard that there was each device gets a part, but for its own."""
    profile = even_profile(6, params=1000)
    held = Lanes(before, 8).of_devices({"a/0": Layers.of(Range(0, 6)), "b/0": Layers.of(Range(0, 6))})
    plan = Plan((Pipeline(("b", "c"), (Segment("b/0", Range(0, 3)), Segment("c/0", Range(3, 6))), (0,)),))
    copies = transfers_between(Lanes(after, 8), plan, held, before, profile)
    for target, layers in Lanes(after, 8).holdings(plan).items():
        had = [shard_rank(target, before)] if target in held else []
        for layer in layers.layers():
            sources = [copy.source for copy in copies if (copy.target, copy.layer) == (target, layer)]
            assert sorted([*had, *(shard_rank(source, before) for source in sources)]) == list(range(before))
            assert all(layer in held[source] for source in sources)
    whole = copy_bytes(profile.layers[0])
    assert {copy.num_bytes for copy in copies} == {-(-whole // (before * after))}


@pytest.mark.parametrize("policy", ["oobleck", "adaptive", "slipstream", "bamboo"])
def test_stages_of_another_number_are_planned_from_what_those_before_hold(policy: str) -> None:
    two, four = sharded_by(2), sharded_by(4)
    first = deployable(policy, two, prepare(policy, two), Situation(("n1", "n2", "n3"), {}))
    holdings = Lanes.of(two).holdings(first.plan)
    moment = Situation(("n1", "n2"), holdings, (("n1", "n2", "n3"),), held_per_stage=2)
    found = deployable(policy, four, prepare(policy, four), moment)
    anew = deployable(policy, four, prepare(policy, four), Situation(("n1", "n2"), {}))
    assert found.plan.pipelines == anew.plan.pipelines
    assert found.ops == anew.ops
    assert found.cost_s == anew.cost_s + copy_s(found.transfers, four.profile)
    assert (found.way, found.begins) == ("re-instantiate", False)
    assert found.transfers == transfers_between(Lanes.of(four), found.plan, holdings, 2, four.profile)


def test_where_nothing_fits_the_largest_says_why() -> None:
    whole = setup_of(even_profile(6, params=1000), devices_per_node=2, device_memory_bytes=10, nodes_now=1)
    with pytest.raises(PlanError):
        chosen("oobleck", [sharded_setup(whole, Sharding(g, UNKNOWN)) for g in (1, 2)])
