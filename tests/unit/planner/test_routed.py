"""Steps over routes that cross: ready-first against 1F1B, orders against bounds, rules, memory and the
timeline.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.costs.makespan import one_f_one_b_s
from oobleckd.planner.costs.work import stage_works
from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment, holdings_of
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.reroute.reroute import detour
from oobleckd.planner.schedule import Op, ScheduleError
from oobleckd.planner.schedules import tabu
from oobleckd.planner.schedules.dispatch import (
    READY_FIRST,
    RULES,
    RULES_FUSED,
    RULES_SHUFFLED,
    dispatch,
    mirrored,
)
from oobleckd.planner.schedules.evaluate import makespan_s, period, reduced_s, run
from oobleckd.planner.schedules.jobshop import Shop, cost_of, orders_of, shop_of, step_ops
from oobleckd.planner.schedules.routed import WORTH, better, busiest_s, crossing, min_s, ready_first_s
from oobleckd.planner.schedules.tabu import LOOKED, _Flushed, _moves, improve, moved
from oobleckd.planner.schedules.timeline import dry_run
from oobleckd.planner.schedules.validator import validate_shop
from tests.unit.planner.build import even_profile, profile_of, profiles, setup_of
from tests.unit.planner.test_reroute import layout_with


def shop_with(layout: Layout, profile: Profile, **changes: Any) -> Shop:
    return shop_of(layout, setup_of(profile, **changes))


def around(splits: list[list[int]], num_layers: int, num: int, dead: set[str]) -> Layout:
    """``layout_with`` after the loss of ``dead``."""
    layout = layout_with(splits, num_layers, num)
    instead = {route.micro_batch: route for route in detour(layout, dead, 2)}
    holdings = {device: held for device, held in layout.holdings.items() if device not in dead}
    routes = tuple(instead.get(route.micro_batch, route) for route in layout.routes)
    return Layout(2, num_layers, holdings, routes)


def test_without_a_route_there_is_nothing_to_do():
    layout = Layout(1, 4, {"a/0": Layers.of(Range(0, 4))}, ())
    shop = shop_with(layout, even_profile(4))
    assert ready_first_s(shop) == 0.0
    assert busiest_s((), even_profile(4)) == 0.0
    assert crossing(shop) == (0.0, None)


@pytest.mark.parametrize("stops", [[8], [4, 8], [2, 4, 6, 8]])
@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_ready_first_on_equal_stages_of_a_pipeline_of_its_own_is_1f1b(stops: list[int], num: int):
    profile = even_profile(8)
    layout = layout_with([stops], 8, num)
    works = stage_works([s.layers for s in layout.routes[0].segments], profile)
    assert ready_first_s(shop_with(layout, profile)) == pytest.approx(one_f_one_b_s(works, num))


@settings(max_examples=30, deadline=None)
@given(profiles(), st.data(), st.integers(1, 9))
def test_no_order_undercuts_the_busiest(profile: Profile, data: st.DataObject, num: int):
    num_layers = len(profile.layers)
    stops = sorted({*data.draw(st.sets(st.integers(1, num_layers))), num_layers})
    layout = layout_with([stops], num_layers, num)
    shop = shop_with(layout, profile)
    assert busiest_s(layout.routes, profile) <= min_s(shop) * (1 + 1e-9) + 1e-12
    assert min_s(shop) <= ready_first_s(shop) * (1 + 1e-9) + 1e-12


def test_pipelines_do_not_disturb_each_other():
    profile = even_profile(8)
    one, three = layout_with([[4, 8]], 8, 4), layout_with([[4, 8]] * 3, 8, 12)
    assert ready_first_s(shop_with(three, profile)) == pytest.approx(ready_first_s(shop_with(one, profile)))


def test_the_slowest_update_comes_on_top():
    bare = profile_of([(1.0, 2.0, 1, 0, 0)] * 2, link_latency_s=0.0)
    slow = Profile("test", "cpu", tuple(_with_update(layer) for layer in bare.layers), link_latency_s=0.0)
    layout = layout_with([[2]], 2, 3)
    assert ready_first_s(shop_with(layout, slow)) == ready_first_s(shop_with(layout, bare)) + 2.0


def _with_update(layer: LayerCost) -> LayerCost:
    return LayerCost(
        layer.name, layer.forward_s, layer.backward_s, layer.param_bytes, layer.state_bytes,
        layer.activation_bytes, layer.output_bytes, update_s=1.0,
    )  # fmt: skip


def test_a_dead_stage_makes_its_replica_the_busiest():
    profile = even_profile(8)
    layout = around([[4, 8], [4, 8]], 8, 8, {"01/0"})
    shop = shop_with(layout, profile)
    replica_s = max(shop.busy_s())
    assert busiest_s(layout.routes, profile) == pytest.approx(replica_s)
    assert replica_s < crossing(shop).step_s <= ready_first_s(shop) < 2 * replica_s


def test_what_a_device_hands_to_itself_costs_nothing():
    profile = profile_of([(1.0, 2.0, 1, 1, 8)] * 4, link_latency_s=0.0, link_bytes_per_s=8.0)
    way = (
        Segment("a/0", Range(0, 1)),
        Segment("b/0", Range(1, 2)),
        Segment("b/0", Range(2, 3)),
        Segment("a/0", Range(3, 4)),
    )
    layout = Layout(1, 4, holdings_of(way), (Route(0, 1, way),))
    shop = shop_with(layout, profile)
    assert shop.busy_s() == (6.0 + 2.0, 6.0 + 2.0)
    assert ready_first_s(shop) == 12.0 + 4.0


# ---------------------------------------------------------------------- orders


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Layout, Setup]:
    """Routes that cross in any way and come back to devices; fused or decoupled, with short memory or without
    limit.
    """
    num_devices, num_layers = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    names = [f"{i}/0" for i in range(num_devices)]
    routes = []
    for mb in range(draw(st.integers(1, 7))):
        count = draw(st.integers(1, num_layers))
        way = draw(st.lists(st.sampled_from(names), min_size=count, max_size=count))
        stops = [*sorted(draw(st.permutations(range(1, num_layers)))[: count - 1]), num_layers]
        hops = [Segment(d, Range(a, b)) for d, a, b in zip(way, [0, *stops[:-1]], stops, strict=True)]
        routes.append(Route(mb, 1, tuple(hops)))
    held = {name: Layers.of(Range(0, num_layers)) for name in names}
    times = [draw(st.integers(1, 9)) for _ in range(num_layers)]
    memory = draw(st.sampled_from([0, 36 * num_layers + 20 * num_layers * num_layers, 10**6]))
    profile = profile_of([(t, 2 * t, 2, 20, draw(st.integers(0, 1))) for t in times], link_bytes_per_s=1.0)
    setup = setup_of(
        profile,
        decoupled=draw(st.booleans()),
        staggered=draw(st.booleans()),
        device_memory_bytes=memory,
        num_micro_batches=len(routes),
    )
    return Layout(1, num_layers, held, tuple(routes)), setup


@settings(max_examples=100, deadline=None)
@given(crossings())
def test_orders_can_be_run_fit_and_are_never_slower_than_ready_first(case: tuple[Layout, Setup]):
    layout, setup = case
    shop = shop_of(layout, setup)
    ready_s = ready_first_s(shop, staggered=setup.staggered)
    found = crossing(shop, 30_000, staggered=setup.staggered)
    least = min_s(shop, staggered=setup.staggered)
    assert least * (1 - 1e-9) <= found.step_s <= ready_s
    if found.orders is None:
        return
    assert found.step_s < ready_s * (1 - WORTH)
    ops = step_ops(shop, found.orders)
    validate_shop(shop, ops)
    assert orders_of(shop, ops) == found.orders
    step_s = dry_run(ops, cost_of(shop)).makespan_s
    if not setup.staggered:
        assert step_s == pytest.approx(found.step_s)
    else:
        assert found.step_s <= step_s * (1 + 1e-9)  # at worst steps do not overlap


@settings(max_examples=60, deadline=None)
@given(crossings(), st.sampled_from([READY_FIRST, *RULES, *RULES_FUSED]))
def test_what_a_rule_dispatches_runs_as_it_was_dispatched(case: tuple[Layout, Setup], rule: Any):
    layout, setup = case
    shop = shop_of(layout, setup)
    made = dispatch(shop, rule)
    ran = run(shop, made.orders[0])
    assert ran is not None
    assert max(reduced_s(shop, ran)) <= made.votes_s[0] * (1 + 1e-9)
    if rule is not READY_FIRST:
        assert all(shop.fits(device, order) for device, order in enumerate(made.orders[0]))
    several = dispatch(shop, rule, 3)
    assert len(several.votes_s) == 3
    for orders in several.orders:
        found = period(shop, orders)
        assert found is not None
        assert max(shop.busy_s()) <= found.seconds * (1 + 1e-9)
        ran = run(shop, orders)
        assert ran is not None
        assert found.seconds <= makespan_s(shop, ran) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(crossings(), st.sampled_from([*RULES_FUSED, *(rule._replace(shuffled=3) for rule in RULES_SHUFFLED)]))
def test_what_a_rule_makes_from_the_end_runs_too(case: tuple[Layout, Setup], rule: Any):
    layout, setup = case
    shop = shop_of(layout, msgspec.structs.replace(setup, decoupled=False))
    (orders,) = mirrored(shop, rule)
    assert sorted(op for order in orders for op in order) == list(range(len(shop.seconds)))
    assert all(shop.fits(device, order) for device, order in enumerate(orders))
    validate_shop(shop, step_ops(shop, orders))
    ran = run(shop, orders)
    assert ran is not None
    assert min_s(shop) <= makespan_s(shop, ran) * (1 + 1e-9)


@pytest.mark.parametrize("apart", [False, True])
def test_orders_bring_a_step_after_a_loss_near_the_bound(apart: bool):
    layout = around([[2, 4, 6, 8]] * 2, 8, 16, {"01/0"})
    shop = shop_with(layout, even_profile(8), decoupled=apart)
    found = crossing(shop)
    assert found.step_s < 1.03 * min_s(shop)
    assert found.step_s < 0.95 * ready_first_s(shop)


def test_with_staggered_updates_the_busiest_device_never_waits():
    layout = around([[2, 4, 6, 8]] * 3, 8, 24, {"01/0"})
    shop = shop_with(layout, even_profile(8), decoupled=True)
    found = crossing(shop, staggered=True)
    assert found.step_s == pytest.approx(max(shop.busy_s()))
    assert crossing(shop).step_s > found.step_s


def test_a_search_never_makes_it_worse_and_stops_when_its_effort_is_spent():
    layout = around([[2, 4, 6, 8]] * 2, 8, 12, {"02/0"})
    shop = shop_with(layout, even_profile(8))
    (orders,) = dispatch(shop, RULES_FUSED[2]).orders
    before = run(shop, orders)
    assert before is not None
    found = improve(shop, orders, 50_000, 0.0, staggered=False)
    assert found.seconds <= makespan_s(shop, before)
    assert improve(shop, orders, 0, 0.0, staggered=False).orders == orders
    assert better(shop, orders, 0) == orders


@settings(max_examples=100, deadline=None)
@given(crossings(), st.sampled_from([*RULES, *RULES_FUSED]))
def test_moves_come_as_if_all_were_estimated(case: tuple[Layout, Setup], rule: Any):
    """The bounds of moves spare estimates and change nothing."""
    layout, setup = case
    shop = shop_of(layout, setup)
    floor, orders = _Flushed(shop), dispatch(shop, rule).orders[0]
    floor.look_at(orders)
    whole = []
    for device, first, last in floor._blocks(orders):
        for _, at, to in _moves([(device, first, last)]):
            whole.append((floor._expected(orders[device], at, to), device, at, to))
    floor.left = 10**9
    found = [(seconds, device, order) for seconds, device, order in floor.moves(orders)]
    assert found == [
        (seconds, device, moved(orders[device], at, to))
        for seconds, device, at, to in sorted(whole)
        if seconds >= 0
    ]


@pytest.mark.parametrize("num", [16, 64, 256])
def test_what_a_search_looks_at_is_bounded_at_every_size(num: int, monkeypatch: pytest.MonkeyPatch):
    """Estimates count as well as runs: a block of the busiest device is as long as all that it does."""
    layout = around([[1, 2, 3]] * 2, 3, num, {"01/0"})
    profile = profile_of([(5.0, 10.0, 2, 20, 1), (2.0, 11.0, 2, 20, 1), (6.0, 6.0, 2, 20, 1)])
    shop = shop_with(layout, profile, decoupled=True)
    done = Counter[str]()

    def counted(floor: _Flushed, order: Any, at: int, to: int) -> float:
        done["looked"] += LOOKED * (abs(at - to) + 1)
        return estimate(floor, order, at, to)

    def counted_run(*args: Any) -> Any:
        done["ran"] += len(shop.seconds)
        return run(*args)

    estimate = _Flushed._expected
    monkeypatch.setattr(_Flushed, "_expected", counted)
    monkeypatch.setattr(tabu, "run", counted_run)
    (orders,) = dispatch(shop, RULES[1]).orders
    effort = 50_000
    found = improve(shop, orders, effort, 0.0, staggered=False)
    assert found.ops_left > -10 * LOOKED * len(shop.seconds)  # one pass over the moves of a block
    assert done["looked"] + 2 * done["ran"] <= effort - found.ops_left + 2 * len(shop.seconds)


# ---------------------------------------------------------------------- checks


def test_wrong_schedules_are_found_out():
    layout = around([[4, 8], [4, 8]], 8, 4, {"01/0"})
    shop = shop_with(layout, even_profile(8))
    (orders,) = dispatch(shop, READY_FIRST).orders
    ops = step_ops(shop, orders)
    validate_shop(shop, ops)
    mine = ops["11/0"]
    with pytest.raises(ScheduleError, match="missing"):
        validate_shop(shop, ops | {"11/0": mine[1:]})
    with pytest.raises(ScheduleError, match="not asked for"):
        validate_shop(shop, ops | {"11/0": (Op("F", 1, 9), *mine)})
    with pytest.raises(ScheduleError, match="comes before"):
        validate_shop(shop, ops | {"11/0": (*reversed(mine[:-2]), *mine[-2:])})
    with pytest.raises(ScheduleError, match="schedules of"):
        validate_shop(shop, {"11/0": mine})
    tight = shop_with(layout, even_profile(8), device_memory_bytes=4 * 180 + 80)
    greedy = tuple(tuple(sorted(order, key=lambda op: op % 2)) for order in orders)
    with pytest.raises(ScheduleError, match="in flight at its peak and room for 80"):
        validate_shop(tight, step_ops(shop, greedy))
