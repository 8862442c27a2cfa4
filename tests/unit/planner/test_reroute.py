"""Re-routing: every layer in order over live holders, spread evenly, the same every time."""

from collections.abc import Iterable, Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from oobleckd.planner.plan import (
    Detours,
    Layers,
    Layout,
    Pipeline,
    Plan,
    Range,
    Route,
    Segment,
    holdings_of,
    standing_routes,
)
from oobleckd.planner.policy import PlanError
from oobleckd.planner.reroute.reroute import covers, detour, layout_of, reroute
from oobleckd.planner.reroute.ways import HOP_COST
from oobleckd.planner.schedules.pipe import homes


def layout_with(splits: list[list[int]], num_layers: int, num_micro_batches: int) -> Layout:
    """Pipeline p has stages that end at ``splits[p]``; device "<p><stage>/0"; micro-batches round robin."""
    pipelines = []
    for p, stops in enumerate(splits):
        starts = [0, *stops[:-1]]
        ranges = [Range(a, b) for a, b in zip(starts, stops, strict=True)]
        pipelines.append(tuple(Segment(f"{p}{s}/0", r) for s, r in enumerate(ranges)))
    routes = tuple(Route(mb, 1, pipelines[mb % len(pipelines)]) for mb in range(num_micro_batches))
    holdings = holdings_of(segment for pipeline in pipelines for segment in pipeline)
    return Layout(1, num_layers, holdings, routes)


def hit(layout: Layout, dead: set[str]) -> dict[int, tuple[int, ...]]:
    every = tuple(range(layout.num_layers))
    return {route.micro_batch: every for route in layout.routes if route.touches(dead)}


def test_a_dead_second_stage_is_served_by_its_replica_and_the_first_stage_keeps_working():
    layout = layout_with([[5, 10], [5, 10]], 10, 8)
    routes = reroute(layout, {"01/0"}, hit(layout, {"01/0"}), attempt=2)
    assert [r.micro_batch for r in routes] == [0, 2, 4, 6]
    for route in routes:
        # 00 lost all its standing work, so it is the least loaded first stage.
        assert route.segments == (Segment("00/0", Range(0, 5)), Segment("11/0", Range(5, 10)))
        assert route.attempt == 2
        assert route.mask == tuple(range(10))


def test_micro_batches_spread_evenly_over_the_live_pipelines():
    layout = layout_with([[3, 6], [3, 6], [3, 6], [6]], 6, 16)
    routes = reroute(layout, {"30/0"}, hit(layout, {"30/0"}), attempt=5)
    assert [route.segments[0].device for route in routes] == ["00/0", "10/0", "20/0", "00/0"]


def test_a_deeper_pipeline_takes_more_because_its_devices_have_less_to_do():
    layout = layout_with([[6], [3, 6], [6]], 6, 9)
    routes = reroute(layout, {"20/0"}, hit(layout, {"20/0"}), attempt=5)
    assert [route.segments[0].device for route in routes] == ["10/0", "10/0", "10/0"]


def test_unequal_splits_are_stitched():
    layout = layout_with([[3, 7, 10], [5, 10]], 10, 4)
    dead = {"01/0", "10/0"}
    with pytest.raises(PlanError, match="layer 3 has no live copy: its holders 01/0, 10/0"):
        reroute(layout, dead, hit(layout, dead), 2)
    (route, *_) = reroute(layout, {"01/0"}, hit(layout, {"01/0"}), 2)
    assert covers(route, layout)
    assert not route.touches({"01/0"})


def test_only_micro_batches_with_missing_layers_get_a_route_and_the_mask_is_sorted():
    layout = layout_with([[2, 4], [2, 4]], 4, 4)
    routes = reroute(layout, {"01/0"}, {2: (3, 2), 0: ()}, 3)
    assert [(r.micro_batch, r.mask) for r in routes] == [(2, (2, 3))]


def test_forward_only_layers_weigh_less():
    # Only the last layer is missing: the hop through the first stage costs one pass a layer.
    layout = layout_with([[2, 4], [2, 4]], 4, 2)
    (route,) = reroute(layout, {"01/0"}, {0: (3,)}, 3)
    assert [s.device for s in route.segments] == ["00/0", "11/0"]


def test_no_path_visits_a_device_twice_and_deeper_than_the_deepest_only_where_needed():
    layout = Layout(
        1,
        6,
        {
            "a/0": Layers.of(Range(0, 2)),
            "b/0": Layers.of(Range(1, 3)),
            "c/0": Layers.of(Range(3, 5)),
            "d/0": Layers.of(Range(4, 6)),
            "e/0": Layers.of(Range(0, 6)),
        },
        (Route(0, 1, (Segment("e/0", Range(0, 6)),)),),
    )
    (route,) = reroute(layout, {"e/0"}, {0: (0,)}, 2)
    assert [s.device for s in route.segments] == ["a/0", "b/0", "c/0", "d/0"]
    assert covers(route, layout)


def test_a_device_that_a_path_would_come_back_to_computes_what_lies_between():
    holdings = {
        "a/0": Layers.of(Range(0, 6)),
        "b/0": Layers.of(Range(2, 4)),
        "c/0": Layers.of(Range(0, 3)),
        "d/0": Layers.of(Range(3, 6)),
    }
    standing = (Segment("a/0", Range(0, 6)),)
    deep = tuple(Segment("x/0", Range(layer, layer + 1)) for layer in range(6))
    busy = tuple(Route(mb, 1, (Segment("c/0", Range(0, 3)), Segment("d/0", Range(3, 6)))) for mb in range(9))
    layout = Layout(
        1, 6, holdings | {"x/0": Layers.of(Range(0, 6))}, (Route(9, 1, standing), Route(10, 1, deep), *busy)
    )
    (route,) = reroute(layout, {"x/0"}, {10: tuple(range(6))}, 2)
    assert route.segments == standing


def test_covers_sees_gaps_strangers_and_empty_routes():
    layout = layout_with([[2, 4]], 4, 1)
    whole = (Segment("00/0", Range(0, 2)), Segment("01/0", Range(2, 4)))
    assert covers(Route(0, 1, whole), layout)
    assert not covers(Route(0, 1, ()), layout)
    assert not covers(Route(0, 1, whole[1:]), layout)
    assert not covers(Route(0, 1, whole[:1]), layout)
    assert not covers(Route(0, 1, (Segment("00/0", Range(0, 3)), Segment("01/0", Range(3, 4)))), layout)
    assert not covers(Route(0, 1, (Segment("x/0", Range(0, 2)), whole[1])), layout)


@st.composite
def broken_layouts(draw: st.DrawFn) -> tuple[Layout, set[str], dict[int, tuple[int, ...]]]:
    num_layers = draw(st.integers(1, 10))
    split = st.sets(st.integers(1, num_layers), max_size=4).map(lambda s: sorted(s | {num_layers}))
    layout = layout_with(draw(st.lists(split, min_size=1, max_size=4)), num_layers, draw(st.integers(1, 12)))
    dead = draw(st.sets(st.sampled_from(sorted(layout.holdings)), max_size=3))
    layers = st.sets(st.integers(0, num_layers - 1)).map(lambda s: tuple(sorted(s)))
    missing = {r.micro_batch: draw(layers) for r in layout.routes if r.touches(dead)}
    return layout, dead, missing


def all_paths(
    layout: Layout, dead: set[str], cuts: list[int], start: int = 0
) -> Iterator[tuple[Segment, ...]]:
    """Every path from ``start`` over live holders that changes device only at ``cuts``."""
    if start == layout.num_layers:
        yield ()
    for device, held in layout.holdings.items():
        if device not in dead and start in held:
            for stop in (cut for cut in cuts if held.spans(Range(start, cut))):
                for rest in all_paths(layout, dead, cuts, stop):
                    yield (Segment(device, Range(start, stop)), *rest)


def path_cost(path: tuple[Segment, ...], load: dict[str, int], mask: tuple[int, ...]) -> int:
    """The busiest device's layer passes after it took ``path``, and what the hops cost."""
    after = dict(load)
    for device, layers in ((s.device, s.layers.layers()) for s in path):
        after[device] += sum(1 + (layer >= mask[0]) + (layer in mask) for layer in layers)
    return max(after[segment.device] for segment in path) + HOP_COST * len(path)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(broken_layouts())
def test_the_first_route_is_the_best_of_all_paths(case: tuple):
    layout, dead, missing = case
    missing = {mb: layers for mb, layers in missing.items() if layers}
    live = [part for device, held in layout.holdings.items() if device not in dead for part in held.ranges]
    cuts = sorted({cut for layers in live for cut in (layers.start, layers.stop)})
    # With two cuts inside a range a path could come back to its device, which is simplified afterwards.
    no_returns = all(sum(layers.start < cut < layers.stop for cut in cuts) < 2 for layers in live)
    assume(0 not in layout.copies(dead) and missing and no_returns)
    route = reroute(layout, dead, missing, 7)[0]
    load = {
        device: sum(
            3 * len(segment.layers)
            for standing in layout.routes
            if not standing.touches(dead)
            for segment in standing.segments
            if segment.device == device
        )
        for device in layout.holdings
    }
    depth = max(len(standing.segments) for standing in layout.routes)
    paths = list(all_paths(layout, dead, cuts))
    paths = [path for path in paths if len(path) <= depth] or paths
    assert path_cost(route.segments, load, route.mask) == min(path_cost(p, load, route.mask) for p in paths)


@given(broken_layouts())
def test_every_route_covers_all_layers_over_live_holders(case: tuple):
    layout, dead, missing = case
    if 0 in layout.copies(dead):
        with pytest.raises(PlanError, match="no live copy"):
            reroute(layout, dead, missing, 7)
        return
    routes = reroute(layout, dead, missing, 7)
    assert [r.micro_batch for r in routes] == sorted(mb for mb, layers in missing.items() if layers)
    for route in routes:
        assert covers(route, layout)
        assert not route.touches(dead)
        assert route.mask == missing[route.micro_batch]
        devices = [segment.device for segment in route.segments]
        assert len(set(devices)) == len(devices)
    assert routes == reroute(layout, sorted(dead), dict(reversed(missing.items())), 7)


# ---------------------------------------------------------------------- routes that stand


def busy(layout: Layout, routes: Iterable[Route]) -> dict[str, int]:
    """Layers that each device computes in a step."""
    load = dict.fromkeys(layout.holdings, 0)
    for route in routes:
        for segment in route.segments:
            load[segment.device] += len(segment.layers)
    return load


def test_a_detour_is_whole_and_only_for_those_who_need_one():
    layout = layout_with([[5, 10], [5, 10]], 10, 8)
    routes = detour(layout, {"01/0"}, 2)
    assert [r.micro_batch for r in routes] == [0, 2, 4, 6]
    assert {(r.mask, r.attempt) for r in routes} == {(None, 2)}
    assert {tuple(s.device for s in r.segments) for r in routes} == {("00/0", "11/0")}
    assert detour(layout, {"nobody"}, 2) == ()


def test_a_detour_keeps_the_hops_of_a_deep_pipeline_that_live():
    """Not past all of them, where a short pipeline has fewer hops to the end."""
    shallow, deep = [3, 6, 9, 12], list(range(1, 13))
    layout = layout_with([shallow, deep], 12, 32)
    routes = detour(layout, {"14/0"}, 2)
    assert {route.segments for route in routes} == {
        tuple(
            Segment("01/0" if layer == 4 else f"1{layer}/0", Range(layer, layer + 1)) for layer in range(12)
        )
    }
    assert max(busy(layout, [*layout.routes[::2], *routes]).values()) == 3 * 16 + 16


def test_a_micro_batch_goes_around_the_busiest_device_by_itself():
    """Two pipelines lose the same stage: those that are left share, and so do the parts of a stage that
    others have.
    """
    layout = layout_with([[4, 8], [4, 8], [4, 6, 8]], 8, 12)
    routes = detour(layout, {"01/0", "11/0"}, 2)
    assert {tuple(s.device for s in r.segments) for r in routes} == {
        ("00/0", "21/0", "22/0"), ("10/0", "21/0", "22/0"),
    }  # fmt: skip
    other = detour(layout, {"01/0"}, 2)
    load = busy(layout, [*other, *(r for r in layout.routes if not r.touches({"01/0"}))])
    assert load["11/0"] == load["21/0"] == load["22/0"] == 16, (
        "all that 01 had is the third pipeline's, whose devices had half as much"
    )


def test_detours_over_pipelines_of_different_depth_have_less_to_do_than_whole_new_routes():
    random, ratios = Random(5), []
    while len(ratios) < 40:
        sizes = [random.randint(2, 12) for _ in range(random.randint(2, 4))]
        splits = [sorted({*random.sample(range(1, 24), size - 1), 24}) for size in sizes]
        layout = layout_with(splits, 24, 24)
        dead = set(random.sample(sorted(layout.holdings), random.randint(1, 3)))
        if 0 in layout.copies(dead):
            continue
        kept = [r for r in layout.routes if not r.touches(dead)]
        whole = busy(layout, [*kept, *reroute(layout, dead, hit(layout, dead), 7)])
        ratios.append(max(busy(layout, [*kept, *detour(layout, dead, 7)]).values()) / max(whole.values()))
    assert sum(ratios) / len(ratios) < 0.95


def test_detours_stand_from_their_round_on_and_until_then_what_stood_before():
    layout = layout_with([[2], [2], [2]], 2, 3)
    first = Detours(5, detour(layout, {"00/0"}, 2))
    second = Detours(9, detour(layout, {"00/0", "10/0"}, 3), first.standing(8))
    assert standing_routes(layout, None, 7) == layout.routes
    assert standing_routes(layout, first, 4) == layout.routes
    assert standing_routes(layout, second, 8) == standing_routes(layout, first, 8) != layout.routes
    last = standing_routes(layout, second, 9)
    assert [r.micro_batch for r in last] == [0, 1, 2]
    assert {s.device for r in last for s in r.segments} == {"20/0"}


def test_the_layout_of_a_plan_with_vacant_places_goes_around_them():
    pipelines = tuple(
        Pipeline((f"{p}0", f"{p}1"), (Segment(f"{p}0/0", Range(0, 2)), Segment(f"{p}1/0", Range(2, 4))), mbs)
        for p, mbs in (("a", (0, 1)), ("b", (2, 3)))
    )
    plan = Plan(pipelines, vacant=("a1/0",))
    assert plan.nodes() == ("a0", "b0", "b1")
    layout = layout_of(plan, 5, 4)
    assert sorted(layout.holdings) == ["a0/0", "b0/0", "b1/0"]
    assert [[s.device for s in r.segments] for r in layout.routes] == [["a0/0", "b1/0"]] * 2 + [
        ["b0/0", "b1/0"]
    ] * 2
    assert {r.attempt for r in layout.routes} == {5}
    assert all(covers(r, layout) for r in layout.routes)
    with pytest.raises(PlanError, match="layer 2 has no live copy"):
        layout_of(Plan(pipelines, vacant=("a1/0", "b1/0")), 5, 4)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 20), st.data())
def test_among_equal_pipelines_no_device_has_more_than_it_must(pipelines, stages, num, data):
    layout = layout_with([[2 * (s + 1) for s in range(stages)]] * pipelines, 2 * stages, num)
    dead = data.draw(st.sets(st.sampled_from(sorted(layout.holdings)), max_size=pipelines * stages))
    assume(0 not in layout.copies(dead))
    before = [r for r in layout.routes if not r.touches(dead)]
    load = busy(layout, [*before, *detour(layout, dead, 2)])
    fixed = busy(layout, before)
    for stage in range(stages):
        live = [d for d in (f"{p}{stage}/0" for p in range(pipelines)) if d not in dead]
        must = max(2 * -(-num // len(live)), *(fixed[d] for d in live))
        assert max(load[d] for d in live) <= must
    assert not any(load[d] for d in dead)


@settings(deadline=None, max_examples=60)
@given(broken_layouts())
def test_every_detour_covers_all_layers_over_live_holders(case: tuple):
    layout, dead, _ = case
    if 0 in layout.copies(dead):
        return
    routes = detour(layout, dead, 7)
    assert [r.micro_batch for r in routes] == [r.micro_batch for r in layout.routes if r.touches(dead)]
    for route in routes:
        assert covers(route, layout)
        assert not route.touches(dead)
        devices = [segment.device for segment in route.segments]
        assert len(set(devices)) == len(devices)
    assert routes == detour(layout, sorted(dead), 7)


# ---------------------------------------------------------------------- two chunks a device


@st.composite
def folded(draw: st.DrawFn) -> tuple[Layout, set[str]]:
    """Pipelines of one chunk a device and of two, split anyhow; and who of them is dead."""
    num_layers = draw(st.integers(4, 10))
    pipelines = []
    for p in range(draw(st.integers(1, 4))):
        chunks = draw(st.sampled_from([1, 2, 2]))
        size = (
            chunks * draw(st.integers(1, num_layers // 2 // chunks))
            if chunks == 2
            else draw(st.integers(1, 4))
        )
        inner = draw(st.permutations(range(1, num_layers)))[: size - 1]
        stops = sorted({*inner, num_layers})
        where = homes(len(stops), chunks)
        ranges = [Range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
        pipelines.append(tuple(Segment(f"{p}{d}/0", r) for d, r in zip(where, ranges, strict=True)))
    routes = tuple(Route(mb, 1, pipelines[mb % len(pipelines)]) for mb in range(draw(st.integers(1, 12))))
    holdings = holdings_of(segment for pipeline in pipelines for segment in pipeline)
    dead = draw(st.sets(st.sampled_from(sorted(holdings)), max_size=3))
    return Layout(1, num_layers, holdings, routes), dead


@settings(deadline=None, max_examples=150)
@given(folded())
def test_routes_over_devices_with_two_chunks(case: tuple[Layout, set[str]]):
    layout, dead = case
    assume(0 not in layout.copies(dead))
    assert all(covers(route, layout) for route in layout.routes)
    every = range(layout.num_layers)
    missing = {r.micro_batch: tuple(every) for r in layout.routes if r.touches(dead)}
    for route in (*reroute(layout, dead, missing, 7), *detour(layout, dead, 7)):
        assert covers(route, layout)
        assert not route.touches(dead)
        used = [(s.device, held) for s in route.segments for held in layout.holdings[s.device].ranges
                if held.start <= s.layers.start < s.layers.stop <= held.stop]  # fmt: skip
        assert len(used) == len(set(used)) == len(route.segments), "no range comes twice"


def test_a_hop_lies_within_one_range_of_its_device():
    holdings = {"a/0": Layers.of(Range(0, 1), Range(1, 2), Range(3, 4)), "b/0": Layers.of(Range(2, 3))}
    layout = Layout(1, 4, holdings, ())

    def route(*hops: tuple[str, int, int]) -> Route:
        return Route(0, 1, tuple(Segment(device, Range(start, stop)) for device, start, stop in hops))

    assert covers(route(("a/0", 0, 1), ("a/0", 1, 2), ("b/0", 2, 3), ("a/0", 3, 4)), layout)
    assert not covers(route(("a/0", 0, 2), ("b/0", 2, 3), ("a/0", 3, 4)), layout)
    assert not covers(route(("a/0", 0, 1), ("a/0", 1, 4)), layout)
    assert layout.copies() == (1, 1, 1, 1)
    assert holdings["a/0"].layers() == (0, 1, 3)
    assert len(holdings["a/0"]) == 3
