"""Finds the sizes of pipelines on N nodes with the least time of a step, with and without its exchange.

Owns the search over times. Within time T a pipeline of template k takes ``floor((T - fill) / period) + 1``
micro-batches, so the best T is the smallest at which the sizes that sum up to N take them all; whether
they do is ``knapsack``'s and ``counted``'s to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from oobleckd.planner.costs.model import Floats
from oobleckd.planner.plan import Template
from oobleckd.planner.sizing.counted import Points, points_of
from oobleckd.planner.sizing.knapsack import NEVER, Counts, Knapsack

LARGEST_TABLE = 2**18  # entries; beyond it the numbers of pipelines are tried one by one
ROUNDING = 1e-9  # T = fill + x * period must count x + 1 micro-batches after rounding


@dataclass(frozen=True, slots=True)
class SizingTask:
    """``num_micro_batches`` for pipelines of sizes n0, n0 + 1, .. with sum ``total``, at least ``r``.

    ``fills_s``, ``periods_s``: of the templates, by size. Where as few pipelines as there can be have a
    micro-batch each, none may be without (``busy``); else some only hold copies.
    """

    n0: int
    fills_s: Floats
    periods_s: Floats
    total: int
    r: int
    num_micro_batches: int
    busy: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy", self.min_pipelines <= self.num_micro_batches)

    @property
    def min_pipelines(self) -> int:
        """The fewest pipelines that there can be."""
        return max(self.r, -(-self.total // (self.n0 + len(self.fills_s) - 1)))

    @property
    def max_pipelines(self) -> int:
        """The most pipelines that there may be."""
        max_pipelines = self.total // self.n0
        return min(max_pipelines, self.num_micro_batches) if self.busy else max_pipelines

    def longer(self, more_s: Floats) -> SizingTask:
        """With pipelines that take longer, each size by so much."""
        return replace(self, fills_s=self.fills_s + more_s)

    def caps(self, time_s: float) -> Counts:
        """What a pipeline of each size takes within ``time_s``; NEVER where it may not be used."""
        steps = np.floor((time_s - self.fills_s) / self.periods_s + ROUNDING) + 1
        caps = np.clip(steps, 0, self.num_micro_batches).astype(np.int64)
        return np.where(caps > 0, caps, NEVER) if self.busy else caps

    def min_time_s(self, enough: Callable[[Counts], bool], low_s: float = 0.0) -> float:
        """The least time, ``low_s`` at least, whose caps are ``enough``; those of the longest time are.

        In growing steps, since ``low_s`` is often close, then bisection; both jump to the times at which
        some pipeline takes one more.
        """
        longest_s = float((self.fills_s + (self.num_micro_batches - 1) * self.periods_s).max())
        high_s, step_s = low_s, float(self.periods_s.min())
        while high_s < longest_s and not enough(self.caps(high_s)):
            low_s = self._next_s(high_s)
            high_s, step_s = min(max(low_s, high_s + step_s), longest_s), 2 * step_s
        while low_s < (middle_s := (low_s + high_s) / 2) < high_s:
            if enough(self.caps(middle_s)):
                high_s = min(middle_s, self._last_s(middle_s))
            else:
                low_s = self._next_s(middle_s)
        return high_s

    def _next_s(self, time_s: float) -> float:
        """The first time after ``time_s`` at which some pipeline takes one more."""
        taken = np.maximum(self.caps(time_s), 0)
        times_s = self.fills_s + taken * self.periods_s
        return float(times_s[taken < self.num_micro_batches].min(initial=np.inf))

    def _last_s(self, time_s: float) -> float:
        """The last time up to ``time_s`` at which some pipeline takes one more."""
        taken = np.maximum(self.caps(time_s), 0)
        times_s = self.fills_s + (taken - 1) * self.periods_s
        return float(times_s[taken > 0].max(initial=0.0))


def task_of(by_size: Mapping[int, Template], total: int, r: int, num_micro_batches: int) -> SizingTask:
    """The task for the templates ``by_size``, whose sizes are consecutive."""
    made = [by_size[size] for size in sorted(by_size)]
    fills_s = np.array([template.fill_s for template in made])
    periods_s = np.array([max(template.period_s, 1e-12) for template in made])
    return SizingTask(min(by_size), fills_s, periods_s, total, r, num_micro_batches)


def best_sizes(task: SizingTask) -> list[int]:
    """Sizes, ascending, with the least slowest pipeline; on ties more pipelines.

    Raises no error: sizes that sum up to the total exist.
    """
    max_pipelines = task.num_micro_batches if task.busy else task.total
    if max_pipelines < task.total // task.n0 and task.total * max_pipelines > LARGEST_TABLE:
        return best_sizes_with(task, np.zeros((task.max_pipelines + 1, len(task.fills_s))))
    # No multiset takes more than all nodes in pipelines of one size, so one size takes its part by then.
    sizes = np.arange(task.n0, task.n0 + len(task.fills_s))
    parts = np.ceil(task.num_micro_batches * sizes / task.total - ROUNDING)
    low_s = float((task.fills_s + (parts - 1) * task.periods_s).min())

    def knapsack(caps: Counts) -> Knapsack:
        return Knapsack(task.n0, caps, task.total, task.r, max_pipelines)

    time_s = task.min_time_s(lambda caps: knapsack(caps).most() >= task.num_micro_batches, low_s)
    return knapsack(task.caps(time_s)).sizes()


def best_sizes_with(task: SizingTask, reduce_s: Floats) -> list[int]:
    """Sizes, ascending, with the least slowest pipeline, where one of size n0 + k among c pipelines takes
    ``reduce_s[c, k]`` longer.

    Branch and bound over intervals of the number of pipelines, the most promising first.
    """
    best_s, best = np.inf, dict[int, int]()
    queue = [_bounded(task, reduce_s, task.min_pipelines, task.max_pipelines, 0.0)]
    while queue:
        bound_s, min_pipelines, max_pipelines = heapq.heappop(queue)
        if bound_s >= best_s:
            break
        if min_pipelines < max_pipelines:
            middle = (min_pipelines + max_pipelines) // 2
            for low, high in ((middle + 1, max_pipelines), (min_pipelines, middle)):
                heapq.heappush(queue, _bounded(task, reduce_s, low, high, bound_s))
            continue
        longer = task.longer(reduce_s[min_pipelines])
        counted = _Counted(longer, min_pipelines)
        if np.isfinite(best_s) and not counted.enough(longer.caps(best_s)):
            continue
        time_s = longer.min_time_s(counted.enough, bound_s)
        if counted.enough(longer.caps(time_s)) and time_s < best_s:
            best_s = time_s
            best = counted.points.most_of(task.total, min_pipelines)[1]
    return [size for size, count in sorted(best.items()) for _ in range(count)]


@dataclass(slots=True)
class _Counted:
    """Whether exactly ``members`` pipelines take all; keeps the points that it looked at last."""

    task: SizingTask
    members: int
    points: Points = field(init=False)

    def enough(self, caps: Counts) -> bool:
        task = self.task
        if (caps == NEVER).all():
            return False
        self.points = points_of(task.n0, caps)
        return (
            self.points.bound(task.total, self.members, self.members)
            >= task.num_micro_batches * (1 - ROUNDING)
            and self.points.most_of(task.total, self.members)[0] >= task.num_micro_batches
        )


def _bounded(
    task: SizingTask, reduce_s: Floats, min_pipelines: int, max_pipelines: int, low_s: float
) -> tuple[float, int, int]:
    """(least time, fewest, most): a bound for that interval, which is ``low_s`` at least."""
    longer = task.longer(reduce_s[min_pipelines : max_pipelines + 1].min(axis=0))

    def enough(caps: Counts) -> bool:
        if (caps == NEVER).all():
            return False
        bound = points_of(task.n0, caps).bound(task.total, min_pipelines, max_pipelines)
        return bound >= task.num_micro_batches * (1 - ROUNDING)

    return longer.min_time_s(enough, low_s), min_pipelines, max_pipelines
