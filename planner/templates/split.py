"""The fastest split of a model for each of several pipelines, exact or within a certified gap.

Owns the search over the bound on the period: the time of m micro-batches is ``base + cost + (m-1) * period``,
the least cost falls as the bound rises, so it is enough to look at the periods that stages can have.
All pipelines are searched in step, which lets one table (``suffix``) answer for many bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from oobleckd.planner.costs.model import Floats, StageCosts
from oobleckd.planner.templates.suffix import Cuts, Menu, Suffixes, exact_split, min_periods_s

BATCH = 8  # bounds a table: more fill the cache, fewer leave the time with the interpreter
GROWTH = 1.1  # of the bound, in the search for a feasible one
ROUNDING = 1e-9  # sums of layers and stages are rounded each for itself


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pipeline to split: all of ``num_devices``, for ``share`` micro-batches."""

    num_devices: int
    share: int


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Stages in order; no split takes less than (1 - ``gap``) of this one's time, 0 where it was proved
    the fastest.
    """

    cuts: Cuts
    gap: float


def fastest_splits(
    costs: Sequence[StageCosts], menu: Menu, wanted: Sequence[Wanted], gap: float
) -> list[StageSplit | None]:
    """For each of ``wanted`` the split of least time, or one proved to be within ``gap`` of it; None
    where none fits the memory. ``menu``: that of ``costs``.
    """
    periods = menu.periods()
    base_s = float(costs[0].time_s[0, -1])
    searches = [_Search(one, periods, base_s, gap) for one in wanted]
    if not len(periods):
        return [None] * len(wanted)
    _find_feasible(menu, searches)
    _evaluate(menu, [(search, search.low) for search in searches])
    going = [search for search in searches if search.best is not None]
    for search in going:
        search.begin(_min_cost_s(costs))
    _evaluate(menu, [(search, search.high) for search in going if search.high > search.low])
    while steps := [(search, index) for search in going if (index := search.next()) is not None]:
        _evaluate(menu, steps)
    return [search.result() for search in searches]


@dataclass(slots=True)
class _Search:
    """Branch and bound over the sorted periods: strictly within (low, high) the cost is at least what
    it is at high, the period at least the one after low.
    """

    wanted: Wanted
    periods: Floats
    base_s: float
    gap: float
    low: int = 0
    high: int = 0
    costs_s: dict[int, float] = field(default_factory=dict)
    best_s: float = np.inf
    best_index: int = -1
    best: Cuts | None = None
    proved_s: float = np.inf
    open: list[tuple[int, int]] = field(default_factory=list)

    def time_s(self, cost_s: float, index: int) -> float:
        """Relative time with that cost and the period of that index."""
        return cost_s + (self.wanted.share - 1) * float(self.periods[index])

    def would_win(self, cost_s: float, index: int) -> bool:
        """Whether a split of that cost would be the best so far; on ties the smaller period."""
        return (self.time_s(cost_s, index), index) < (self.best_s, self.best_index)

    def offer(self, cost_s: float, index: int, cuts: Cuts) -> None:
        """Take ``cuts`` if they are the best so far."""
        if self.would_win(cost_s, index):
            self.best_s, self.best_index, self.best = self.time_s(cost_s, index), index, cuts

    def begin(self, min_cost_s: float) -> None:
        """Open the interval from ``low``, the first feasible one, to the last that could be better."""
        times_s = min_cost_s + (self.wanted.share - 1) * self.periods
        self.high = max(self.low, int(np.searchsorted(times_s, self.best_s, side="right")) - 1)
        self.open = [(self.low, self.high)]

    def next(self) -> int | None:
        """The index to evaluate next, its halves being open already; None where the best is proved."""
        while self.open:
            low, high = self.open.pop()
            bound_s = self.time_s(self.costs_s[high], min(low + 1, high))
            if high - low < 2 or bound_s >= self.best_s or self.costs_s[low] == self.costs_s[high]:
                continue
            if bound_s >= self.best_s - self.gap * (self.base_s + self.best_s):
                self.proved_s = min(self.proved_s, bound_s)
                continue
            middle = (low + high) // 2
            self.open += [(middle, high), (low, middle)]
            return middle
        return None

    def result(self) -> StageSplit | None:
        """The best split found."""
        if self.best is None:
            return None
        total_s = self.base_s + self.best_s
        gap = max(0.0, self.best_s - self.proved_s) / total_s if total_s else 0.0
        return StageSplit(self.best, gap)


Step = tuple[_Search, int]  # a search and the index of the period to look at


def _find_feasible(menu: Menu, searches: Sequence[_Search]) -> None:
    """Set ``low`` of each search to the first feasible bound (the last bound where none is).

    From the least period upwards in growing steps, then by bisection: often the least one is feasible,
    and large bounds make large tables.
    """
    periods = searches[0].periods
    last = len(periods) - 1
    min_s = min_periods_s(menu, max(search.wanted.num_devices for search in searches))
    for search in searches:
        search.low = min(int(np.searchsorted(periods, min_s[search.wanted.num_devices])), last)
        search.high = search.low
    rising = list(searches)
    while rising:
        found = _feasible(menu, [(search, search.high) for search in rising])
        rising = [s for s, ok in zip(rising, found, strict=True) if not ok and s.high < last]
        for search in rising:
            search.low = search.high + 1
            further = int(np.searchsorted(periods, GROWTH * periods[search.high]))
            search.high = min(max(further, search.low), last)
    while halving := [search for search in searches if search.low < search.high]:
        middles = [(search.low + search.high) // 2 for search in halving]
        found = _feasible(menu, list(zip(halving, middles, strict=True)))
        for search, middle, ok in zip(halving, middles, found, strict=True):
            search.low, search.high = (search.low, middle) if ok else (middle + 1, search.high)


def _feasible(menu: Menu, steps: Sequence[Step]) -> list[bool]:
    """Whether some split fits under the bound, for each of ``steps``."""
    found = [False] * len(steps)
    for position, table, bound in _tables(menu, steps):
        num_devices = steps[position][0].wanted.num_devices
        found[position] = table.feasible(num_devices, bound)
    return found


def _evaluate(menu: Menu, steps: Sequence[Step]) -> None:
    """Give each search the cost at its index, and the split where that is its best.

    Where the split found does not fit although its cost could be the best, the exact one is computed.
    """
    for position, table, bound in _tables(menu, steps):
        search, index = steps[position]
        num_devices = search.wanted.num_devices
        cost_s = table.min_cost_s(num_devices, bound)
        if search.would_win(cost_s, index):
            cuts = table.split(num_devices, bound)
            if not table.menu.holds(cuts):
                cost_s, cuts = exact_split(menu, float(search.periods[index]), num_devices)
            search.offer(cost_s, index, cuts)
        search.costs_s[index] = cost_s


def _tables(menu: Menu, steps: Sequence[Step]) -> Iterator[tuple[int, Suffixes, int]]:
    """For each of ``steps`` its position, a table, and the place of its bound in that; pipelines of
    like size share a table.
    """
    order = sorted(range(len(steps)), key=lambda position: -steps[position][0].wanted.num_devices)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        bounds_s = np.array([steps[p][0].periods[steps[p][1]] for p in batch])
        table = Suffixes(menu, bounds_s, steps[batch[0]][0].wanted.num_devices)
        for bound, position in enumerate(batch):
            yield position, table, bound


def _min_cost_s(costs: Sequence[StageCosts]) -> float:
    """A relative cost that no split undercuts: every layer shared as suits it best, and no cut."""
    alone_s = _layers_s(costs[0])
    saved_s = np.sum(np.min([_layers_s(c) - alone_s for c in costs], axis=0))
    return float(saved_s) - ROUNDING * float(alone_s.sum())


def _layers_s(costs: StageCosts) -> Floats:
    """The time of every layer as a stage of its own."""
    return np.diagonal(costs.time_s, offset=1)
