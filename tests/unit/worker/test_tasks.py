"""The board: ready-first, 1F1B where all routes are alike, and no wait without end where they cross."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.schedule import format_ops
from oobleckd.planner.schedules.dispatch import READY_FIRST, RULES, RULES_FUSED, dispatch
from oobleckd.planner.schedules.jobshop import Shop, shop_of, step_ops
from oobleckd.worker.round_machine.tasks import Board, Order, Step, Task, order_of


def chain(micro_batch: int, devices: str, mask: tuple[int, ...] | None = None) -> Route:
    """One layer a device."""
    hops = tuple(Segment(device, Range(i, i + 1)) for i, device in enumerate(devices))
    return Route(micro_batch, 1, hops, mask)


def boards_of(routes: list[Route], *, apart: bool = False) -> dict[str, Board]:
    depth = max(len(route.segments) for route in routes)
    boards = {s.device: Board(s.device, apart) for route in routes for s in route.segments}
    for board in boards.values():
        board.begin(range(depth), routes)
    return boards


def run(routes: list[Route], dice: random.Random, *, apart: bool = False) -> dict[str, int]:
    """Everything, in an order that ``dice`` chooses; returns the most in flight on each device."""
    boards, here, most = boards_of(routes, apart=apart), set(), {}

    def arrived(task: Task, kind: str) -> bool:
        return task.key(kind, 0, task.position) in here

    while True:
        ready = {name: found for name in sorted(boards) if (found := boards[name].next(arrived))}
        if not ready:
            break
        name = dice.choice(list(ready))
        kind, task = ready[name]
        if kind == "F":
            boards[name].ran_forward(task)
            if not task.last:
                here.add(task.key("F", 0, task.position + 1))
            most[name] = max(most.get(name, 0), len(boards[name].in_flight))
        elif kind == "W":
            boards[name].ran_weights(task)
        else:
            boards[name].ran_backward(task)
            if not task.first:
                here.add(task.key("B", 0, task.position - 1))
    assert not any(board.forward or board.in_flight or board.weights for board in boards.values()), "stuck"
    return most


@pytest.mark.parametrize("seed", range(5))
def test_on_routes_that_are_alike_it_is_1f1b(seed):
    assert run([chain(mb, "abc") for mb in range(9)], random.Random(seed)) == {"a": 3, "b": 2, "c": 1}


def test_a_cap_over_all_in_flight_could_wait_for_itself():
    # a is first for one and second for the other, and so is b: one in flight on each would fill both.
    routes = [chain(0, "ab"), chain(1, "ab"), chain(2, "ba"), chain(3, "ba")]
    for seed in range(50):
        run(routes, random.Random(seed))


@pytest.mark.parametrize("seed", range(5))
def test_two_chunks_a_device_hold_half_a_micro_batch_more_than_the_first_stage_of_one(seed):
    """Each of the chunks is half a stage: 2 * 3 + 1 of them."""
    most = run([chain(mb, "abccba") for mb in range(12)], random.Random(seed))
    assert max(most.values()) <= 2 * 3 + 1


@st.composite
def crossing(draw: st.DrawFn) -> list[Route]:
    devices = "abcde"[: draw(st.integers(2, 5))]
    once = st.permutations(devices).flatmap(
        lambda way: st.integers(1, len(way)).map(lambda n: "".join(way[:n]))
    )
    there_and_back = once.map(lambda way: way + way[::-1])
    ways = once | there_and_back | st.text(devices, min_size=1, max_size=6)
    found = [chain(mb, draw(ways)) for mb in range(draw(st.integers(1, 12)))]
    layers = st.sets(st.integers(0, 2 * len(devices) - 1), min_size=1)
    return [
        Route(
            r.micro_batch,
            2,
            r.segments,
            tuple(sorted(x for x in draw(layers) if x < len(r.segments))) or (0,),
        )
        if draw(st.integers(0, 4)) == 0
        else r
        for r in found
    ]


@settings(max_examples=200, deadline=None)
@given(crossing(), st.integers(0, 2**32), st.booleans())
def test_routes_that_cross_or_come_back_come_to_their_end(routes: list[Route], seed: int, apart: bool):
    most = run(routes, random.Random(seed), apart=apart)
    for device, count in most.items():
        tasks = [(r, p) for r in routes for p, s in enumerate(r.segments) if s.device == device]
        caps = {len(r.segments) - p for r, p in tasks if r.mask is None}
        assert count <= sum(caps) + sum(r.mask is not None for r, _ in tasks)


# ---------------------------------------------------------------------- beside the planner


def seconds_of(kind: str, hop: int, micro_batch: int) -> int:
    """Of an op, whoever runs it; sums that differ, so that hardly anything ends at the same time."""
    return 1000 + 97 * hop + 31 * micro_batch + {"F": 0, "B": 1013, "I": 7, "W": 509}[kind]


def simulated(routes: list[Route], orders: dict[str, Order], *, apart: bool) -> dict[str, list[Step]]:
    """What boards do when devices take time: device -> its steps, in order."""
    boards, arrive = boards_of(routes, apart=apart), {}
    for name, board in boards.items():
        board.order.extend(orders.get(name, ()))
    steps: dict[str, list[Step]] = {name: [] for name in boards}
    busy: list[tuple[int, str, str, Task]] = []
    now, idle = 0, set(boards)
    while True:
        for name in sorted(idle):
            here = {key for key, at in arrive.items() if at <= now}
            found = boards[name].next(lambda task, kind, here=here: task.key(kind, 0, task.position) in here)
            if found:
                kind, task = found
                idle.discard(name)
                steps[name].append((kind, task.position, task.route.micro_batch))
                heapq.heappush(
                    busy, (now + seconds_of(kind, task.position, task.route.micro_batch), name, kind, task)
                )
        if not busy:
            break
        now, name, kind, task = heapq.heappop(busy)
        idle.add(name)
        if kind == "F":
            boards[name].ran_forward(task)
            arrive[task.key("F", 0, task.position + 1)] = now
        elif kind == "W":
            boards[name].ran_weights(task)
        else:
            boards[name].ran_backward(task)
            arrive[task.key("B", 0, task.position - 1)] = now
    return steps


def shop_with(routes: list[Route], *, apart: bool) -> Shop:
    """The planner's view of the same: every device holds all layers, ops take what ``seconds_of`` says."""
    depth = max(len(route.segments) for route in routes)
    names = {s.device for route in routes for s in route.segments}
    layer = LayerCost("layer", 1.0, 2.0, 4, 18, 1, 0, weight_s=1.0, kept_bytes=1)
    layout = Layout(1, depth, {name: Layers.of(Range(0, depth)) for name in names}, tuple(routes))
    profile = Profile("board", "cpu", (layer,) * depth, link_latency_s=0.0)
    shop = shop_of(layout, Setup(profile, len(routes), 0, 0, 1, 1, decoupled=apart))
    took = [
        float(
            seconds_of(
                shop.kind(op),
                shop.hops[op // shop.stride][1],
                shop.routes[shop.hops[op // shop.stride][0]].micro_batch,
            )
        )
        for op in range(len(shop.seconds))
    ]
    return replace(shop, seconds=tuple(took))


@settings(max_examples=150, deadline=None)
@given(crossing(), st.booleans())
def test_the_planner_s_ready_first_is_what_boards_do(routes: list[Route], apart: bool):
    routes = [Route(r.micro_batch, 1, r.segments) for r in routes]
    shop = shop_with(routes, apart=apart)
    (orders,) = dispatch(shop, READY_FIRST).orders
    planned = {name: list(order_of(format_ops(ops))) for name, ops in step_ops(shop, orders).items()}
    assert planned == simulated(routes, {}, apart=apart)


@settings(max_examples=100, deadline=None)
@given(crossing(), st.booleans(), st.integers(0, 5))
def test_an_order_is_kept_to_and_comes_to_its_end(routes: list[Route], apart: bool, number: int):
    routes = [Route(r.micro_batch, 1, r.segments) for r in routes]
    shop = shop_with(routes, apart=apart)
    (orders,) = dispatch(shop, (RULES if apart else RULES_FUSED)[number]).orders
    planned = {name: order_of(format_ops(ops)) for name, ops in step_ops(shop, orders).items()}
    assert {name: tuple(steps) for name, steps in simulated(routes, planned, apart=apart).items()} == planned


def test_a_loss_has_the_order_of_a_whole_backward_forgotten():
    routes = [chain(0, "ab"), chain(1, "ab")]
    board = Board("a")
    board.begin(range(2), routes, order_of("0F1 0SA1 0F0 0SA0 0RG1 0B1 0RG0 0B0 R U"))
    kind, task = board.next(lambda *_: True)
    assert (kind, task.route.micro_batch) == ("F", 1)
    board.ran_forward(task)
    board.forget_order()
    kind, task = board.next(lambda *_: True)
    assert (kind, task.route.micro_batch) == ("B", 1)  # whatever is ready: the order had a forward here
