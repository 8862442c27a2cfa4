"""Computes when the ops of a shop run in given orders: in one step, or step after step where updates are
staggered.

Owns the two objectives of a schedule. ``makespan_s`` is of a flushed step: until the last op has ended, and
the slowest update. ``period`` is how long a step takes once they repeat, where a device updates as soon as
all replicas of its layers have their gradients and goes on with the forward passes of the next step, but with
a backward only when all devices have got so far (docs/mechanisms/early-update.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oobleckd.planner.schedules.jobshop import NOBODY, Order, Shop

MAX_ROUNDS = 12  # after which a period is taken from the last few
KEPT = 3  # of them, to see what a period is made of
ROUNDING = 1e-9


class Ran(NamedTuple):
    """``ends[op]``; ``ran``: the ops in an order in which each comes after all that it waits for."""

    ends: list[float]
    ran: list[int]


def run(
    shop: Shop, orders: Sequence[Order], starts_s: Sequence[float] = (), backward_from_s: float = 0.0
) -> Ran | None:
    """Run ``orders`` as early as they can; None where devices wait for each other.

    ``starts_s``: when each device begins; no backward begins before ``backward_from_s``.
    """
    seconds, source, feeds, device_of, stride = (
        shop.seconds,
        shop.source,
        shop.feeds,
        shop.device,
        shop.stride,
    )
    ends, ran = [-1.0] * len(seconds), []
    position, now_s = [0] * len(orders), list(starts_s) or [0.0] * len(orders)
    # Devices that may be able to go on: one that waits comes back when the very op that it stopped at is fed.
    todo = list(range(len(orders)))
    while todo:
        device = todo.pop()
        order, at, free_s = orders[device], position[device], now_s[device]
        while at < len(order):
            op = order[at]
            before = source[op]
            if before != NOBODY:
                there_s = ends[before]
                if there_s < 0:
                    break
                free_s = max(free_s, there_s)
            if op % stride and free_s < backward_from_s:
                free_s = backward_from_s
            free_s += seconds[op]
            ends[op] = free_s
            ran.append(op)
            at += 1
            fed = feeds[op]
            if fed != NOBODY and (other := device_of[fed]) != device:
                there = orders[other]
                if position[other] < len(there) and there[position[other]] == fed:
                    todo.append(other)
        position[device], now_s[device] = at, free_s
    return Ran(ends, ran) if len(ran) == len(seconds) else None


def makespan_s(shop: Shop, ran: Ran) -> float:
    """Seconds of a flushed step. The reduce is free, as in ``timeline``."""
    return max(ran.ends, default=0.0) + max(shop.update_s, default=0.0)


def reduced_s(shop: Shop, ran: Ran) -> list[float]:
    """When each device has the sums of all that it holds."""
    last, stride = [0.0] * (max(shop.part_of, default=-1) + 1), shop.stride
    for hop, part in enumerate(shop.part_of):
        last[part] = max(last[part], ran.ends[stride * hop + stride - 1])
    when = [0.0] * len(shop.names)
    for parts, devices in shop.sums:
        there_s = max((last[part] for part in parts), default=0.0)
        for device in devices:
            when[device] = max(when[device], there_s)
    return when


class Period(NamedTuple):
    """``seconds`` from step to step once they repeat; ``last``: when the ops of the last steps end,
    ``reduced`` the devices.
    """

    seconds: float
    last: list[list[float]]
    reduced: list[list[float]]


def period(shop: Shop, orders: Sequence[Order]) -> Period | None:
    """Steps in ``orders`` with staggered updates; None where devices wait for each other."""
    starts = [0.0] * len(orders)
    votes = [0.0]
    before: list[float] = []
    last: list[list[float]] = []
    reduced: list[list[float]] = []
    while len(votes) <= MAX_ROUNDS:
        found = run(shop, orders, starts, votes[-1])
        if found is None:
            return None
        last, reduced = [*last[1 - KEPT :], found.ends], [*reduced[1 - KEPT :], reduced_s(shop, found)]
        votes.append(max(reduced[-1]))
        starts = [at_s + more_s for at_s, more_s in zip(reduced[-1], shop.update_s, strict=True)]
        ahead = [votes[-1] - at_s for at_s in starts]
        took_s = votes[-1] - votes[-2]
        # All devices stand to the vote as they did a step before: from here on steps repeat.
        if before and all(abs(a - b) <= ROUNDING * took_s for a, b in zip(ahead, before, strict=True)):
            return Period(took_s, last, reduced)
        before = ahead
    # They did not repeat: the mean of the last ones stands for a period.
    half = MAX_ROUNDS // 2
    return Period((votes[-1] - votes[-1 - half]) / half, last, reduced)
