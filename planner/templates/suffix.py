"""The least cost of the last layers on the last devices, for several bounds on the period at once.

Owns the menu of possible stages and the dynamic programme over them. Chooses no bound (``split`` does).

Devices are counted from the end of the pipeline: with u devices left, the node at hand has
``(u - 1) % devices_per_node + 1`` of them left, and a stage may take as many at most, so none straddles
two nodes. That does not depend on the number of nodes: one table serves all of them.

Costs are relative: a split's cost is what it takes of one micro-batch beyond one device computing all
layers: twice its cuts, plus what sharing adds or saves, plus what is computed again. Where stages have one
device, and compute nothing again, only the cuts remain, and equal splits compare equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from oobleckd.planner.costs.choice import deepest_by_mode
from oobleckd.planner.costs.model import Floats, StageCosts
from oobleckd.planner.plan import Range, Recompute

NONE = 1e30  # instead of inf, which could not be multiplied with a mask

Counts = NDArray[np.int64]


class Cut(NamedTuple):
    """A stage: its layers, how many devices share it, and what its blocks compute again."""

    layers: Range
    num_devices: int
    recompute: Recompute = "none"


Cuts = tuple[Cut, ...]  # stages in order


@dataclass(frozen=True, slots=True)
class Menu:
    """Every stage that there may be: row k has ``num_layers[k]`` layers on ``num_devices[k]`` devices, in the
    mode ``recompute[k]``; ascending by devices, then modes and layers. Column l: its first layer is l.

    ``extra_s``: relative cost; ``period_s``: inf where the layers end before; ``deepest``: the last
    place from the end in which it fits the memory (0: none).
    """

    devices_per_node: int
    num_devices: Counts
    num_layers: Counts
    recompute: tuple[Recompute, ...]
    extra_s: Floats
    period_s: Floats
    deepest: Floats
    landings: tuple[Counts, ...] = field(init=False)

    def __post_init__(self) -> None:
        # The frozen class's own way to say "follows from the others".
        first = np.arange(self.width - 2)
        end = np.minimum(first + self.num_layers[:, None], self.width - 1)
        landings = []
        for room in range(1, self.devices_per_node + 1):
            rows = int(np.searchsorted(self.num_devices, room, side="right"))
            landings.append(end[:rows] + (room - self.num_devices[:rows, None]) * self.width)
        object.__setattr__(self, "landings", tuple(landings))

    @property
    def width(self) -> int:
        """Entries of a row of a table: one a layer, one for the end, one for what lies past it."""
        return int(self.extra_s.shape[1]) + 2

    def within(self, bound_s: float = np.finfo(np.float64).max) -> NDArray[np.bool_]:
        """Which stages there are that fit somewhere and have a period up to ``bound_s``."""
        within: NDArray[np.bool_] = (self.period_s <= bound_s) & (self.deepest >= 1)
        return within

    def under(self, bound_s: float) -> Menu:
        """The menu without the rows that have no such stage."""
        rows = self.within(bound_s).any(axis=1)
        return Menu(
            self.devices_per_node,
            self.num_devices[rows],
            self.num_layers[rows],
            tuple(compress(self.recompute, cast("Counts", rows))),
            self.extra_s[rows],
            self.period_s[rows],
            self.deepest[rows],
        )

    def behind(self, left: int) -> tuple[int, Counts]:
        """Where a flat table of (devices left, first layer) has what follows stage k at layer l with
        ``left`` devices left: from the first of the two on, entry [k, l] of the second. Only the rows that
        the node at hand has devices for.
        """
        room = (left - 1) % self.devices_per_node + 1
        return (left - room) * self.width, self.landings[room - 1]

    def walk(self, num_devices: int, best_row: Callable[[int, int], int]) -> Cuts:
        """The split in which the stage at each (first layer, devices left) is row ``best_row`` of it."""
        cuts: list[Cut] = []
        layer, left = 0, num_devices
        while left:
            row = best_row(layer, left)
            stop = layer + int(self.num_layers[row])
            cuts.append(Cut(Range(layer, stop), int(self.num_devices[row]), self.recompute[row]))
            layer, left = stop, left - cuts[-1].num_devices
        return tuple(cuts)

    def holds(self, cuts: Cuts) -> bool:
        """Whether every stage of ``cuts`` fits the memory in its place."""
        rows = zip(self.num_devices, self.num_layers, self.recompute, strict=True)
        row = {stage: k for k, stage in enumerate(rows)}
        return all(
            self.deepest[row[cut.num_devices, len(cut.layers), cut.recompute], cut.layers.start]
            >= len(cuts) - place
            for place, cut in enumerate(cuts)
        )

    def periods(self) -> Floats:
        """Every period that a stage which fits somewhere can have, ascending."""
        return np.unique(self.period_s[self.within()])


def menu(
    costs: Sequence[StageCosts], devices_per_node: int, num_micro_batches: int, limit_bytes: float
) -> Menu:
    """The menu of ``costs``, one for each number of devices, ascending from 1, and each mode, those of least
    time first.
    """
    num_layers = costs[0].num_layers
    first = np.arange(num_layers)
    length = np.arange(1, num_layers + 1)[:, None]
    end = np.minimum(first + length, num_layers)
    inside = first + length <= num_layers
    # What computes again is one more stage on the menu, with its own time and memory: the search stays as
    # exact as it was, and where memory allows everything these rows are gone. (D-planner-012)
    fits = [
        deepest[first, end]
        for _, modes in groupby(costs, key=lambda cost: cost.num_devices)
        for deepest in deepest_by_mode(modes, num_micro_batches, limit_bytes)
    ]
    return Menu(
        devices_per_node,
        num_devices=np.repeat([cost.num_devices for cost in costs], num_layers),
        num_layers=np.tile(length[:, 0], len(costs)),
        recompute=tuple(cost.recompute for cost in costs for _ in range(num_layers)),
        extra_s=np.vstack(
            [2 * cost.cut_s[:-1] + (cost.time_s - costs[0].time_s)[first, end] for cost in costs]
        ),
        period_s=np.vstack([np.where(inside, cost.period_s[first, end], np.inf) for cost in costs]),
        deepest=np.vstack([np.where(inside, deepest, 0.0) for deepest in fits]),
    )


@dataclass(slots=True)
class Suffixes:
    """Tables over (devices left, first layer, bound) for the bounds ``bounds_s`` on the period.

    ``stages``: the fewest that cover the layers with exactly these devices, in memory; exact, since fewer
    stages behind it never keep a stage from fitting. ``cost_s``: the least cost where every stage fits in
    front of the fewest stages that there can be behind it; at most the true one, and mostly equal to it.
    ``NONE`` or more where there is no way.
    """

    menu: Menu
    bounds_s: Floats
    num_devices: int
    deepest: Floats = field(init=False)
    stages: Floats = field(init=False)
    cost_s: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.menu = self.menu.under(float(self.bounds_s.max()))
        within = self.menu.period_s[:, :, None] <= self.bounds_s
        self.deepest = np.where(within, self.menu.deepest[:, :, None], 0.0)
        self.stages = np.full((self.num_devices + 1, self.menu.width, len(self.bounds_s)), NONE)
        self.stages[0, -2] = 0.0
        self.cost_s = self.stages.copy()
        # Counted from the end, what a stage may do depends neither on the number of nodes nor on the
        # bound's neighbours: one table serves all, with thousands of entries a numpy call. (D-planner-003)
        self._fill()

    def _fill(self) -> None:
        # What is done for every device: whole arrays, nothing broadcast, nothing masked; that is faster.
        extra_s = np.repeat(self.menu.extra_s[:, :, None], len(self.bounds_s), axis=2)
        all_stages, all_cost_s = (
            table.reshape(-1, len(self.bounds_s)) for table in (self.stages, self.cost_s)
        )
        for left in range(1, self.num_devices + 1):
            start, places = self.menu.behind(left)
            rows = len(places)
            if rows:
                stages = all_stages[start:].take(places, axis=0)
                stages += 1
                cost_s = all_cost_s[start:].take(places, axis=0)
                cost_s += extra_s[:rows]
                # The fewest stages behind decide what is feasible, exactly; the cheapest way has nearly
                # always as few, so a table over numbers of stages is needed only where the split does not
                # fit. (D-planner-004)
                unfit = np.multiply(stages > self.deepest[:rows], NONE)
                stages += unfit
                cost_s += unfit
                stages.min(axis=0, out=self.stages[left, :-2])
                cost_s.min(axis=0, out=self.cost_s[left, :-2])

    def feasible(self, num_devices: int, bound: int) -> bool:
        """Whether some split on ``num_devices`` fits the memory under the bound."""
        return bool(self.stages[num_devices, 0, bound] < NONE)

    def min_cost_s(self, num_devices: int, bound: int) -> float:
        """Least cost of all layers on ``num_devices`` under the bound; inf where nothing fits."""
        feasible = self.feasible(num_devices, bound)
        return float(self.cost_s[num_devices, 0, bound]) if feasible else np.inf

    def split(self, num_devices: int, bound: int) -> Cuts:
        """The split that ``cost_s[num_devices, 0, bound]`` counts; fewest devices first, then layers."""
        stages, cost_s = self.stages[:, :, bound].ravel(), self.cost_s[:, :, bound].ravel()

        def best_row(layer: int, left: int) -> int:
            start, places = self.menu.behind(left)
            rows, behind = len(places), start + places[:, layer]
            unfit = stages[behind] + 1 > self.deepest[:rows, layer, bound]
            return int(np.where(unfit, np.inf, cost_s[behind] + self.menu.extra_s[:rows, layer]).argmin())

        return self.menu.walk(num_devices, best_row)


def min_periods_s(menu: Menu, num_devices: int) -> Floats:
    """Entry u: a period that no split on exactly u devices undercuts, for all u up to ``num_devices``
    (inf: there is no split). It is the least one, memory aside.
    """
    periods_s = np.where(menu.within(), menu.period_s, np.inf)
    table = np.full((num_devices + 1, menu.width), np.inf)
    table[0, -2] = -np.inf
    for left in range(1, num_devices + 1):
        start, places = menu.behind(left)
        if len(places):
            behind_s = table.ravel()[start:].take(places)
            np.maximum(behind_s, periods_s[: len(places)]).min(axis=0, out=table[left, :-2])
    return table[:, 0]


def exact_split(menu: Menu, bound_s: float, num_devices: int) -> tuple[float, Cuts]:
    """Least cost under ``bound_s`` and its split, the number of stages behind being one more index of the
    table. For the few cases in which the split of ``Suffixes`` does not fit the memory; one exists.
    """
    menu = menu.under(bound_s)
    deepest = np.where(menu.period_s <= bound_s, menu.deepest, 0.0)
    place = np.arange(1, min(num_devices, menu.width - 2) + 1)
    table = np.full((num_devices + 1, menu.width, len(place) + 1), np.inf)
    table[0, -2, 0] = 0.0
    flat = table.reshape(-1, len(place) + 1)
    for left in range(1, num_devices + 1):
        start, places = menu.behind(left)
        rows = len(places)
        if rows:
            cost_s = flat[start:].take(places, axis=0)[:, :, :-1] + menu.extra_s[:rows, :, None]
            np.copyto(cost_s, np.inf, where=place > deepest[:rows, :, None])
            table[left, :-2, 1:] = cost_s.min(axis=0)
    from_end = int(table[num_devices, 0].argmin())
    best_s = float(table[num_devices, 0, from_end])

    def best_row(layer: int, left: int) -> int:
        nonlocal from_end
        start, places = menu.behind(left)
        rows, behind = len(places), start + places[:, layer]
        cost_s = flat[behind, from_end - 1] + menu.extra_s[:rows, layer]
        row = int(np.where(from_end > deepest[:rows, layer], np.inf, cost_s).argmin())
        from_end -= 1
        return row

    return best_s, menu.walk(num_devices, best_row)
