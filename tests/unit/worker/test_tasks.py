"""The board: ready-first, 1F1B where all routes are alike, and no wait without end where they cross."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan import Range, Route, Segment
from worker.tasks import Board, Task


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
