"""The most micro-batches of exactly so many pipelines whose sizes sum up to a number of nodes.

Owns the exact answer for tens of thousands of pipelines, and the bound that costs nothing. Takes what
each size takes as given; knows no times.

With c members and N nodes the mean size lies between two neighbouring corners a < b of the concave hull
of the points (size, what it takes). Each member loses what it lies below the line through a and b.
The least loss whose sizes leave the right remainder modulo b - a is a shortest path in a cycle of that
length; members a and b make up the rest. Where that needs a negative number of either, all but a few
members are of one corner's size (a set of others whose deviations from it sum up to 0 can be replaced
by it), and a table over the few answers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from oobleckd.planner.sizing.knapsack import NEVER, Counts, Knapsack


@dataclass(frozen=True, slots=True)
class Points:
    """Sizes that may be used, ascending, what each takes, and the corners of their hull (indices)."""

    sizes: Counts
    caps: Counts
    corners: tuple[int, ...]

    def bound(self, total: int, min_members: int, max_members: int) -> float:
        """No ``min_members`` to ``max_members`` members with sum ``total`` take more than this; -inf: there
        are none.
        """
        sizes, caps = self.sizes[list(self.corners)], self.caps[list(self.corners)]
        least, greatest = max(min_members, total / sizes[-1]), min(max_members, total / sizes[0])
        if least > greatest:
            return -np.inf
        # Members times the hull at their mean size is concave in their number, highest at the densest.
        members = min(max(total / sizes[np.argmax(caps / sizes)], least), greatest)
        return float(members * np.interp(total / members, sizes, caps))

    def most_of(self, total: int, members: int) -> tuple[int, dict[int, int]]:
        """The most that exactly ``members`` with sum ``total`` take, and how many of each size they are.
        NEVER and nothing where there are none.
        """
        if not self.sizes[0] * members <= total <= self.sizes[-1] * members:
            return NEVER, {}
        low, high = self._edge(total / members)
        others = self._min_loss(low, high, total - members * int(self.sizes[low]))
        if others is None:
            return NEVER, {}
        first, second = int(self.sizes[low]), int(self.sizes[high])
        chosen = Counter(int(self.sizes[k]) for k in others)
        offset = total - members * first - sum((size - first) * n for size, n in chosen.items())
        seconds = offset // max(1, second - first)
        firsts = members - len(others) - seconds
        # The cheapest others leave too few members for the corners: then nearly all members are of one
        # corner's size, and a table over the few others is exact.
        if firsts < 0 or seconds < 0:
            return self._by_table(total, members, first if seconds < 0 else second)
        chosen.update({first: firsts})
        chosen.update({second: seconds})
        return self._sum(chosen), dict(chosen)

    def _edge(self, mean: float) -> tuple[int, int]:
        """The corners that ``mean`` lies between; twice the same where it is one of them."""
        for corner in self.corners:
            if self.sizes[corner] == mean:
                return corner, corner
        return next((a, b) for a, b in pairwise(self.corners) if self.sizes[a] < mean < self.sizes[b])

    def _min_loss(self, low: int, high: int, offset: int) -> list[int] | None:
        """Indices of other members that lose least and leave ``offset`` minus their deviations from the
        size at ``low`` a multiple of the distance to ``high``; None if there are none.
        """
        period = int(self.sizes[high] - self.sizes[low])
        if not period:
            return []
        deviation = self.sizes - self.sizes[low]
        loss = (self.caps[low] - self.caps) * period + (self.caps[high] - self.caps[low]) * deviation
        steps: dict[int, tuple[int, int]] = {}
        for k in np.argsort(-loss, kind="stable").tolist():
            steps[int(deviation[k]) % period] = (int(loss[k]), k)
        return _shortest(offset % period, period, steps)

    def _by_table(self, total: int, members: int, corner: int) -> tuple[int, dict[int, int]]:
        """As ``most_of``, with all members at ``corner`` but as many as may have to differ."""
        spread = int(self.sizes[-1] - self.sizes[0])
        free = min(members, max(abs(total - members * corner), spread) + spread)
        caps = np.full(spread + 1, NEVER, dtype=np.int64)
        caps[self.sizes - self.sizes[0]] = self.caps
        rest = total - (members - free) * corner
        knapsack = Knapsack(int(self.sizes[0]), caps, rest, free, free)
        if knapsack.most() < 0:
            return NEVER, {}
        chosen = Counter(knapsack.sizes())
        chosen.update({corner: members - free})
        return self._sum(chosen), dict(chosen)

    def _sum(self, chosen: Counter[int]) -> int:
        """What the members ``chosen`` (size -> how many) take."""
        cap = dict(zip(self.sizes.tolist(), self.caps.tolist(), strict=True))
        return sum(cap[size] * n for size, n in chosen.items())


def points_of(n0: int, caps: Counts) -> Points:
    """The points of sizes n0, n0 + 1, ...; those that take NEVER are left out."""
    usable = np.flatnonzero(caps != NEVER)
    sizes, taken = usable + n0, caps[usable]
    return Points(sizes, taken, _hull(sizes.tolist(), taken.tolist()))


def _hull(sizes: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Indices of the corners of the upper concave hull, ascending."""
    corners: list[int] = []
    for k, (size, cap) in enumerate(zip(sizes, caps, strict=True)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (caps[b] - caps[a]) * (size - sizes[a]) > (cap - caps[a]) * (sizes[b] - sizes[a]):
                break
            corners.pop()
        corners.append(k)
    return tuple(corners)


def _shortest(goal: int, period: int, steps: dict[int, tuple[int, int]]) -> list[int] | None:
    """What is taken on a cheapest way from 0 to ``goal`` modulo ``period``, where ``steps`` has for each
    distance what it costs and what is taken; None if there is no way.
    """
    reached: dict[int, tuple[int, int]] = {}  # remainder -> remainder before, what was taken
    queue = [(0, 0, 0, -1)]
    while queue:
        cost, here, before, taken = heapq.heappop(queue)
        if here in reached:
            continue
        reached[here] = (before, taken)
        if here == goal:
            break
        for distance, (loss, index) in steps.items():
            following = (here + distance) % period
            if following not in reached:
                heapq.heappush(queue, (cost + loss, following, here, index))
    if goal not in reached:
        return None
    way = []
    while goal:
        goal, taken = reached[goal]
        way.append(taken)
    return way
