"""Steps over routes that cross, against 1F1B where they do not, and against what no order can undercut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.makespan import one_f_one_b_s
from planner.plan import Range, Route, Segment
from planner.profile import Profile
from planner.reroute import detour
from planner.routed import Hops, busiest_s, run_s
from planner.work import stage_works
from tests.unit.planner.build import even_profile, profile_of, profiles
from tests.unit.planner.test_reroute import layout_with


def test_without_a_route_there_is_nothing_to_do():
    assert run_s((), even_profile(4)) == 0.0
    assert busiest_s((), even_profile(4)) == 0.0


@pytest.mark.parametrize("stops", [[8], [4, 8], [2, 4, 6, 8]])
@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_equal_stages_of_a_pipeline_of_its_own_take_what_1f1b_takes(stops: list[int], num: int):
    profile = even_profile(8)
    layout = layout_with([stops], 8, num)
    works = stage_works([s.layers for s in layout.routes[0].segments], profile)
    assert run_s(layout.routes, profile) == pytest.approx(one_f_one_b_s(works, num))


@settings(max_examples=30, deadline=None)
@given(profiles(), st.data(), st.integers(1, 9))
def test_no_order_undercuts_the_busiest(profile: Profile, data: st.DataObject, num: int):
    num_layers = len(profile.layers)
    stops = sorted({*data.draw(st.sets(st.integers(1, num_layers))), num_layers})
    layout = layout_with([stops], num_layers, num)
    assert busiest_s(layout.routes, profile) <= run_s(layout.routes, profile) * (1 + 1e-9) + 1e-12


def test_pipelines_do_not_disturb_each_other():
    profile = even_profile(8)
    one, three = layout_with([[4, 8]], 8, 4), layout_with([[4, 8]] * 3, 8, 12)
    assert run_s(three.routes, profile) == pytest.approx(run_s(one.routes, profile))


def test_the_slowest_update_comes_on_top():
    bare = profile_of([(1.0, 2.0, 1, 0, 0)] * 2, link_latency_s=0.0)
    slow = Profile("test", "cpu", tuple(_with_update(layer) for layer in bare.layers), link_latency_s=0.0)
    layout = layout_with([[2]], 2, 3)
    assert run_s(layout.routes, slow) == run_s(layout.routes, bare) + 2.0


def _with_update(layer):
    return type(layer)(
        layer.name, layer.forward_s, layer.backward_s, layer.param_bytes, layer.state_bytes,
        layer.activation_bytes, layer.output_bytes, update_s=1.0,
    )  # fmt: skip


def test_a_dead_stage_makes_its_twin_the_busiest():
    profile = even_profile(8)
    layout = layout_with([[4, 8], [4, 8]], 8, 8)
    routes = detour(layout, {"01/0"}, 2)
    standing = [r for r in layout.routes if not r.touches({"01/0"})]
    hops = Hops.of(profile)
    twin = 8 * (hops.forward(Range(4, 8)) + hops.backward(Range(4, 8)))
    assert busiest_s([*standing, *routes], profile) == pytest.approx(twin)
    assert twin < run_s([*standing, *routes], profile) < 2 * twin


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_routes_that_cross_in_any_way_come_to_their_end(data: st.DataObject):
    num_devices, num_layers = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
    names = [f"{i}/0" for i in range(num_devices)]
    routes = []
    for mb in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, min(num_devices, num_layers)))
        way = data.draw(st.permutations(names))[:count]
        stops = [*sorted(data.draw(st.permutations(range(1, num_layers)))[: count - 1]), num_layers]
        starts = [0, *stops[:-1]]
        hops = [Segment(d, Range(a, b)) for d, a, b in zip(way, starts, stops, strict=True)]
        routes.append(Route(mb, 1, tuple(hops)))
    profile = even_profile(num_layers)
    taken = run_s(routes, profile)
    assert busiest_s(routes, profile) <= taken * (1 + 1e-9)
    hops_s = Hops.of(profile)
    alone = sum(hops_s.forward(s.layers) + hops_s.backward(s.layers) for r in routes for s in r.segments)
    assert taken <= alone * (1 + 1e-9)  # somebody works at any time
