"""The best decoupled schedule by trying every order: for two or three stages and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from oobleckd.planner.costs.work import StageWork
from oobleckd.planner.schedules.orders import allowed, run
from oobleckd.planner.schedules.pipe import CHUNKS, Pipe


def words(num: int, letters: Sequence[str] = CHUNKS[0], order: str = "") -> list[str]:
    """Every order of ``letters`` (F, I and W) for ``num`` micro-batches."""
    done = [order.count(kind) for kind in letters]
    if done[2] == num:
        return [order]
    left = (done[0] < num, done[1] < done[0], done[2] < done[1])
    return [
        word
        for kind, can in zip(letters, left, strict=True)
        if can
        for word in words(num, letters, order + kind)
    ]


def mixed(one: str, other: str) -> list[str]:
    """Every word that has the letters of both, each in its order."""
    if not one or not other:
        return [one + other]
    return [one[0] + word for word in mixed(one[1:], other)] + [
        other[0] + word for word in mixed(one, other[1:])
    ]


def shortest_s(works: Sequence[StageWork], num: int, chunks: int = 1) -> float:
    """The least makespan in seconds over all orders that fit the memory."""
    pipe = Pipe.of(works, chunks)
    every = words(num)
    if chunks > 1:
        every = [word for one in every for other in words(num, CHUNKS[1]) for word in mixed(one, other)]
    fitting = [[word for word in every if allowed(pipe, device, word)] for device in range(len(pipe.stages))]
    runs = (run(pipe, orders) for orders in itertools.product(*fitting))
    return min(each.makespan_s for each in runs if each is not None)
