"""Neighbours in different zones, as far as that goes."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan import Layers, Range
from planner.policies import adapt, prepare
from planner.policy import Situation
from planner.zones import apart
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
