"""Neighbours in different zones, as far as that goes."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.placement.zones import apart, exchanged
from oobleckd.planner.plan import Layers, Plan, Range, node_of
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policy import Proposal, Setup, Situation
from tests.unit.planner.build import even_profile, setup_of


def conflicts(placed: tuple[tuple[str, ...], ...], zones: dict[str, str]) -> int:
    """Pairs of neighbours, the last with the first, in one zone."""
    pairs = [
        (nodes[at], nodes[(at + 1) % len(nodes)])
        for nodes in placed
        if len(nodes) > 1
        for at in range(len(nodes))
    ]
    return sum(a in zones and zones[a] == zones.get(b) for a, b in pairs)


def test_zones_take_turns() -> None:
    zones = dict.fromkeys("abc", "east") | dict.fromkeys("def", "west")
    found = apart((tuple("ab"), tuple("cdef")), zones, {})
    assert conflicts(found, zones) == 0
    assert sorted(node for nodes in found for node in nodes) == list("abcdef")


def test_without_zones_nothing_moves() -> None:
    placed = (("b", "a"), ("c", "d"))
    assert apart(placed, {}, {}) == placed
    assert apart(placed, {"x": "east"}, {}) == placed


def test_only_nodes_that_hold_the_same_are_exchanged() -> None:
    held = {"a/0": Layers.of(Range(0, 2)), "b/0": Layers.of(Range(2, 4)), "c/0": Layers.of(Range(0, 2))}
    zones = {"a": "east", "b": "east", "c": "west", "d": "west"}
    assert apart((("a", "b"), ("c", "d")), zones, held) == (("c", "b"), ("a", "d"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["east", "west", "north", ""]), min_size=2, max_size=6))
def test_a_ring_is_as_good_as_any(drawn: list[str]) -> None:
    nodes = tuple("abcdef"[: len(drawn)])
    zones = {node: zone for node, zone in zip(nodes, drawn, strict=True) if zone}
    best = min(conflicts((order,), zones) for order in permutations(nodes))
    found = conflicts(apart((nodes,), zones, {}), zones)
    assert found <= best + 1
    assert best or len(set(drawn)) < 3 or found <= 1


def test_a_plan_puts_neighbours_apart() -> None:
    setup = setup_of(even_profile(6), min_nodes=3, max_nodes=6)
    zones = dict.fromkeys("abc", "east") | dict.fromkeys("def", "west")
    nodes = tuple("abcdef")
    found = adapt("bamboo", setup, prepare("bamboo", setup), Situation(nodes, {}, zones=zones))
    placed = tuple(pipeline.nodes for pipeline in found.plan.pipelines)
    assert [len(nodes) for nodes in placed] == [3, 3]
    assert conflicts(placed, zones) == 2  # a ring of three with two zones has one such pair
    plain = adapt("oobleck", setup, prepare("oobleck", setup), Situation(nodes, {}, zones=zones))
    assert plain.plan.pipelines[0].nodes == ("a", "b", "c")


# --------------------------------------------------------------------------- places of pipelines at work

ABC_EAST = dict.fromkeys("abc", "east")
DEF_WEST = dict.fromkeys("def", "west")


def threes(num_layers: int = 6) -> Setup:
    return setup_of(even_profile(num_layers), num_micro_batches=6, min_nodes=3, max_nodes=6)


def after(setup: Setup, nodes: str, zones: dict[str, str], policy: str = "bamboo") -> Proposal:
    """The answer to nodes that are gone, and others that came, where a, b, c and d, e, f were at work."""
    templates = prepare(policy, setup)
    plan = adapt(policy, setup, templates, Situation(tuple("abcdef"), {})).plan
    assert [pipeline.nodes for pipeline in plan.pipelines] == [tuple("abc"), tuple("def")]
    held = {device: layers for device, layers in plan.holdings().items() if node_of(device) in nodes}
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    return adapt(policy, setup, templates, Situation(tuple(nodes), held, running, zones))


def places(plan: Plan) -> list[str]:
    """Pipelines, with an underscore for each vacant place."""
    gone = {node_of(device) for device in plan.vacant}
    return ["".join("_" if node in gone else node for node in pipeline.nodes) for pipeline in plan.pipelines]


def test_of_places_that_are_as_good_a_node_takes_one_whose_neighbours_are_in_other_zones() -> None:
    setup = threes()
    assert places(after(setup, "acdfx", {}).plan) == ["axc", "d_f"]
    assert places(after(setup, "acdfx", ABC_EAST | DEF_WEST | {"x": "east"}).plan) == ["a_c", "dxf"]
    assert places(after(setup, "acdfx", ABC_EAST | DEF_WEST | {"x": "west"}).plan) == ["axc", "d_f"]


def test_two_nodes_take_the_two_places_that_suit_both() -> None:
    """x suits both places and is asked first, y suits one of them."""
    setup, zones = threes(), ABC_EAST | DEF_WEST | {"x": "north", "y": "west"}
    assert places(after(setup, "acdfxy", zones).plan) == ["ayc", "dxf"]
    assert places(after(setup, "acdfxy", zones | {"x": "west", "y": "east"}).plan) == ["axc", "dyf"]
    assert places(after(setup, "acdfxy", zones | {"y": "east"}).plan) == ["axc", "dyf"]


def test_who_is_back_has_its_own_place() -> None:
    zones = ABC_EAST | DEF_WEST | {"e": "east", "x": "west"}
    assert places(after(threes(), "acdef", ABC_EAST | DEF_WEST).plan) == ["a_c", "def"]
    assert places(after(threes(), "acdefx", zones).plan) == ["axc", "def"]


def test_no_copy_is_made_for_the_sake_of_a_zone() -> None:
    setup, zones = threes(), ABC_EAST | DEF_WEST | {"x": "east"}
    plain, apart_ = after(setup, "acdefx", {}), after(setup, "acdefx", zones)
    assert places(apart_.plan) == places(plain.plan) == ["axc", "def"]
    assert apart_.transfers == plain.transfers


def test_of_more_nodes_than_places_one_in_another_zone_is_taken() -> None:
    """With three layers there are no pipelines but of three: one node of three stands by, whichever."""
    setup, zones = threes(3), ABC_EAST | DEF_WEST | {"x": "east", "y": "west"}
    assert places(after(setup, "acdefxy", {}).plan) == ["axc", "def"]
    found = after(setup, "acdefxy", zones).plan
    assert (places(found), found.idle) == (["ayc", "def"], ("x",))


def test_where_nothing_is_redundant_zones_do_not_count() -> None:
    setup, zones = threes(), ABC_EAST | DEF_WEST | {"x": "east"}
    for policy in ("slipstream", "oobleck", "adaptive"):
        assert after(setup, "acdfx", zones, policy) == after(setup, "acdfx", {}, policy)


def test_who_may_not_be_exchanged_stays() -> None:
    rings, zones = (("a", "b"), ("c", "d")), dict.fromkeys("ab", "east") | dict.fromkeys("cd", "west")
    assert exchanged(rings, zones, {}, "a") == rings
    assert exchanged(rings, zones, {}, "ac") == (("c", "b"), ("a", "d"))
    assert exchanged(rings, zones, {"a/0": Layers.of(Range(0, 1))}, "ac") == rings
