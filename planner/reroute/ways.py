"""Finds the best hops through some layers on devices that hold parts of them: the dear part of ``reroute``,
which asks for thousands.

Owns the search alone. Who may be used, and what each device has to do already, is the caller's; what does not
change from one search to the next is worked out once (``Ways``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from oobleckd.planner.plan import Layers, Range, Segment

FULL_PASS = 3  # forward, input gradient, weight gradient of one layer
HOP_COST = FULL_PASS  # a hop more is worth it when it takes a whole layer off the busiest device

NEVER = 2**40  # more layer passes than any device can have to do

Passes = NDArray[np.int64]
Holder = tuple[str, Range]
"""A device, and the range of what it holds that is meant."""


class Ways:
    """What there is to choose from: the layers ``within``, counted from their first, on ``devices`` that hold
    ``holdings``.

    Devices with the same range differ in their load alone: the least loaded stands for all.
    """

    def __init__(self, holdings: Mapping[str, Layers], devices: Collection[str], within: Range) -> None:
        groups: dict[Range, list[str]] = {}
        for device in devices:
            for held in holdings[device].ranges:
                start, stop = max(held.start, within.start), min(held.stop, within.stop)
                if start < stop:
                    groups.setdefault(Range(start - within.start, stop - within.start), []).append(device)
        self._num_layers = len(within)
        self._options = tuple((part, tuple(group)) for part, group in groups.items())
        ends = {end for part in groups for end in (part.start, part.stop)}
        self._cuts = tuple(sorted({0, self._num_layers} | ends))
        self._barred = self._bars()

    @property
    def whole(self) -> bool:
        """Whether every layer is held by someone."""
        held = {layer for part, _ in self._options for layer in part.layers()}
        return len(held) == self._num_layers

    def best(
        self,
        load: Mapping[str, int],
        work: Sequence[int],
        depth: int,
        again: Collection[str] = (),
        more: Sequence[int] = (),
    ) -> tuple[Segment, ...]:
        """The hops with the least busy busiest device, where a hop costs ``HOP_COST`` passes.

        ``load``: layer passes that each device has to do already. ``work``: entry ``i`` is those of layers
        ``[0, i)`` here, and ``more`` those that devices of ``again`` do besides. Only where all layers are
        held (``whole``). Dynamic programme over (number of hops, cut); cuts are where some range begins or
        ends. More than ``depth`` hops (the deepest pipeline) only
        where fewer do not reach the last layer. The optimum, except where it comes back to a device, whose
        hops are weighed each for itself: within one range that device then computes what lies between as
        well.
        """
        ranked = sorted(
            (min([(load[device], device) for device in group]), number)
            for number, (_, group) in enumerate(self._options)
        )
        ranks = np.empty(len(ranked), dtype=np.int64)
        ranks[[number for _, number in ranked]] = np.arange(len(ranked))
        chosen = np.minimum.reduce(self._barred + ranks[:, None, None], axis=0)
        np.minimum(chosen, len(ranked), out=chosen)
        passes = np.array([*(taken for (taken, _), _ in ranked), NEVER])
        until = np.array([work[cut] for cut in self._cuts])
        busy: Passes = passes[chosen]
        busy += np.where(busy < NEVER, until[None, :] - until[:, None], 0)
        if again:
            repeats = np.array([*(device in again for (_, device), _ in ranked), False])[chosen]
            besides = np.array([more[cut] for cut in self._cuts])
            busy += np.where(repeats, besides[None, :] - besides[:, None], 0)
        cuts, hops = self._cuts, []
        for first, last in pairwise(_stops(busy, depth)):
            (_, device), number = ranked[chosen[first, last]]
            hops.append(((device, self._options[number][0]), Range(cuts[first], cuts[last])))
        return without_returns(hops)

    def _bars(self) -> Passes:
        """Option, cut, cut: 0 where the option holds all layers between the cuts, and ``NEVER`` where it does
        not.
        """
        at = {cut: index for index, cut in enumerate(self._cuts)}
        barred = np.full((len(self._options), len(at), len(at)), NEVER)
        for number, (part, _) in enumerate(self._options):
            first, last = at[part.start], at[part.stop]
            barred[number, first:last, first + 1 : last + 1] = 0
        barred[:, *np.tril_indices(len(at))] = NEVER
        return barred


def _stops(busy: Passes, depth: int) -> list[int]:
    """The cuts at which the best path stops, from the first to the last. ``busy``: cut, cut -> passes of the
    least busy device that holds all between, with the hop.
    """
    least = int(np.diagonal(busy, 1).max())  # every path computes every layer somewhere
    peaks = np.empty_like(busy)
    reached = np.full(len(busy), NEVER)
    reached[0] = 0
    before: list[Passes] = []
    best, num_hops = NEVER, 0
    while best == NEVER or (len(before) < depth and least + HOP_COST * (len(before) + 1) < best):
        np.maximum(reached[:, None], busy, out=peaks)
        before.append(reached)
        reached = np.minimum.reduce(peaks, axis=0)
        last = int(reached[-1])
        cost = last + HOP_COST * len(before)
        if last < NEVER and cost < best:
            best, num_hops = cost, len(before)
    stops = [len(busy) - 1]
    for origin in reversed(before[:num_hops]):
        stops.append(int(np.maximum(origin, busy[:, stops[-1]]).argmin()))
    return stops[::-1]


def without_returns(hops: Iterable[tuple[Holder, Range]]) -> tuple[Segment, ...]:
    """``hops`` where no range of a device comes twice: it has what lies between, so that is computed there as
    well.
    """
    path = list(hops)
    if len({device for (device, _), _ in path}) < len(path):
        path = _returning(path)
    return tuple(Segment(device, layers) for (device, _), layers in path)


def _returning(hops: Sequence[tuple[Holder, Range]]) -> list[tuple[Holder, Range]]:
    path: list[tuple[Holder, Range]] = []
    for holder, layers in hops:
        earlier = next((k for k, (other, _) in enumerate(path) if other == holder), None)
        if earlier is None:
            path.append((holder, layers))
        else:
            path[earlier:] = [(holder, Range(path[earlier][1].start, layers.stop))]
    return path
