"""The best decoupled schedule by trying every order: for two or three stages and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from planner.orders import allowed, durations, run
from planner.work import StageWork


def words(num: int, order: str = "") -> list[str]:
    """Every order of F, I and W for ``num`` micro-batches."""
    done = [order.count(kind) for kind in "FIW"]
    if done[2] == num:
        return [order]
    left = (done[0] < num, done[1] < done[0], done[2] < done[1])
    return [word for kind, can in zip("FIW", left, strict=True) if can for word in words(num, order + kind)]


def shortest_s(works: Sequence[StageWork], num: int) -> float:
    """The least makespan in seconds over all orders that fit the memory."""
    times = durations(works)
    fitting = [[word for word in words(num) if allowed(word, work)] for work in works]
    runs = (run(times, orders) for orders in itertools.product(*fitting))
    return min(each.makespan_s for each in runs if each is not None)
