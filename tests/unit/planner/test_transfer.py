"""Placement and copies: fewest bytes, spread over sources, the same every time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.placement.transfer import copy_s, holds, place, places, segments_on, transfers
from oobleckd.planner.plan import Layers, Range, Transfer, device_name, holdings_of
from oobleckd.planner.profile import Profile
from oobleckd.planner.templates.template import templates
from tests.unit.planner.build import even_profile, profile_of, profiles, setup_of


def template_of(profile: Profile, size: int, per_node: int = 1):
    made = templates(setup_of(profile, f=0, devices_per_node=per_node))
    return next(t for t in made if t.num_nodes == size)


def missing_bytes(wanted, holdings, profile) -> int:
    return sum(
        min(18, 12) * profile.layers[layer].param_bytes // 4
        for device, layers in wanted.items()
        for layer in layers.layers()
        if layer not in holdings.get(device, Layers())
    )


@st.composite
def held(draw: st.DrawFn, nodes: list[str], num_layers: int) -> dict[str, Layers]:
    cut = st.integers(0, num_layers)
    ranges = {node: sorted((draw(cut), draw(cut))) for node in nodes}
    return {device_name(n, 0): Layers.of(Range(*r)) for n, r in ranges.items() if r[0] < r[1]}


@settings(max_examples=100, deadline=None)
@given(st.data(), profiles(max_layers=5), st.integers(0, 1))
def test_place_copies_the_fewest_bytes_of_all_placements(data: st.DataObject, profile: Profile, spare: int):
    members = [template_of(profile, 1), template_of(profile, min(2, len(profile.layers)))]
    sizes = [t.num_nodes for t in members]
    nodes = [f"n{i}" for i in range(sum(sizes) + spare)]
    holdings = data.draw(held(nodes, len(profile.layers)))

    def cost(placed: tuple[tuple[str, ...], ...]) -> int:
        segments = [s for t, p in zip(members, placed, strict=True) for s in segments_on(t, p)]
        return missing_bytes(holdings_of(segments), holdings, profile)

    placed = place(members, reversed(nodes), holdings, profile)
    assert placed == place(members, nodes, holdings, profile)
    assert [len(p) for p in placed] == sizes
    assert len({node for p in placed for node in p}) == sum(sizes)
    every = itertools.permutations(nodes, sum(sizes))
    assert cost(placed) == min(cost((some[: sizes[0]], some[sizes[0] :])) for some in every)


def test_fresh_nodes_are_placed_in_name_order():
    profile = even_profile(4)
    members = [template_of(profile, 2), template_of(profile, 2)]
    assert place(members, ["d", "b", "a", "c"], {}, profile) == (("a", "b"), ("c", "d"))


def test_several_devices_of_a_node_hold_consecutive_stages():
    template = template_of(even_profile(5), 2, per_node=2)
    assert places(template) == (
        (Layers.of(Range(0, 1)), Layers.of(Range(1, 2))),
        (Layers.of(Range(2, 3)), Layers.of(Range(3, 5))),
    ) or [len(place) for place in places(template)] == [2, 2]
    segments = segments_on(template, ["a", "b"])
    assert [s.device for s in segments] == ["a/0", "a/1", "b/0", "b/1"]
    assert holds(template, ["a", "b"], holdings_of(segments))
    assert not holds(template, ["b", "a"], holdings_of(segments))
    assert not holds(template, ["a"], holdings_of(segments))


@settings(deadline=None)
@given(st.data(), profiles())
def test_exactly_what_is_lacking_and_held_somewhere_is_copied(data: st.DataObject, profile: Profile):
    nodes = ["a", "b", "c", "d"]
    holdings = data.draw(held(nodes, len(profile.layers)))
    wanted = data.draw(held(nodes, len(profile.layers)))
    copies = transfers(wanted, holdings, profile)
    somewhere = {layer for layers in holdings.values() for layer in layers.layers()}
    assert {(c.target, c.layer) for c in copies} == {
        (device, layer)
        for device, layers in wanted.items()
        for layer in layers.layers()
        if layer in somewhere and layer not in holdings.get(device, Layers())
    }
    assert len({(c.target, c.layer) for c in copies}) == len(copies)
    assert all(c.layer in holdings[c.source] and c.source != c.target for c in copies)
    assert copies == transfers(dict(reversed(wanted.items())), dict(reversed(holdings.items())), profile)


def test_sources_share_the_sending_evenly():
    profile = even_profile(4)
    holdings = {"a/0": Layers.of(Range(0, 4)), "b/0": Layers.of(Range(0, 4))}
    copies = transfers({"c/0": Layers.of(Range(0, 4))}, holdings, profile)
    assert [(c.layer, c.source) for c in copies] == [(0, "a/0"), (1, "b/0"), (2, "a/0"), (3, "b/0")]
    assert copies[0] == Transfer(0, "a/0", "c/0", 120)


def test_what_another_device_of_the_node_holds_takes_no_link():
    profile = even_profile(2)
    copies = transfers(
        {"a/1": Layers.of(Range(0, 2))},
        {"a/0": Layers.of(Range(0, 1)), "b/0": Layers.of(Range(0, 2))},
        profile,
    )
    assert [(c.layer, c.source) for c in copies] == [(0, "a/0"), (1, "b/0")]


def test_copies_take_as_long_as_the_busiest_node():
    profile = profile_of([(1, 1, 100, 0, 0)] * 4, link_latency_s=0.5, link_bytes_per_s=1200.0)
    copies = transfers(
        {"c/0": Layers.of(Range(0, 2)), "d/0": Layers.of(Range(2, 3))},
        {"a/0": Layers.of(Range(0, 4)), "b/0": Layers.of(Range(0, 1))},
        profile,
    )
    assert [c.source for c in copies] == ["b/0", "a/0", "a/0"]
    assert copy_s(copies, profile) == 0.5 + 2.0
    assert copy_s((), profile) == 0.0
    assert copy_s((Transfer(0, "a/0", "a/1", 10),), profile) == 0.0


@pytest.mark.parametrize("num_nodes", [256])
def test_a_large_placement_moves_nothing_that_is_in_its_place(num_nodes: int):
    profile = even_profile(12)
    members = [template_of(profile, 4)] * (num_nodes // 4)
    names = [f"n{i:04}" for i in range(num_nodes)]
    placed = place(members, names, {}, profile)
    segments = [s for t, nodes in zip(members, placed, strict=True) for s in segments_on(t, nodes)]
    holdings = holdings_of(segments)
    again = place(members, names, holdings, profile)
    wanted = holdings_of(s for t, n in zip(members, again, strict=True) for s in segments_on(t, n))
    assert wanted == holdings
