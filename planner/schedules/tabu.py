"""A search for better orders in a shop: tabu search on critical blocks (Nowicki and Smutnicki 1996; moves of
Balas and Vazacopoulos 1998).

Owns the search from orders that somebody else began (``dispatch``). Only what changes a block of the critical
path can help: an op of it moved to its beginning or its end, or two neighbours swapped. Of a flushed step the
effect of a move is estimated from heads and tails, as far as a bound lets it hope for something, and only the
best is run; of the period of staggered updates every move is run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from oobleckd.planner.schedules.evaluate import ROUNDING, Ran, makespan_s, period, run
from oobleckd.planner.schedules.jobshop import NOBODY, Orders, Shop

TENURE = 12  # moves in which the search does not go back to an order it has left
PATIENCE = 120  # moves without a better result after which it ends
LOOKED = 2  # an op that an estimate goes over costs as much as so many that are run

Block = tuple[int, int, int]
"""Device, first and last position of ops that follow each other on the critical path."""
Move = tuple[int, int, int]
"""Device, position of an op, position to which it goes."""


class Found(NamedTuple):
    """The best orders of a search, and how many ops it did not have to run."""

    seconds: float
    orders: Orders
    ops_left: int


def improve(shop: Shop, orders: Orders, num_ops: int, good_enough_s: float, *, staggered: bool) -> Found:
    """The best orders that a search from ``orders`` finds; ends at ``good_enough_s``, or after the work of
    running ``num_ops`` ops.
    """
    floor = _Period(shop) if staggered else _Flushed(shop)
    seconds = floor.look_at(orders)
    assert seconds is not None, "the search begins with orders that run"
    best_s, best = seconds, orders
    left_at: dict[tuple[int, tuple[int, ...]], int] = {}
    number = since = 0
    floor.left = num_ops
    while floor.left > 0 and number - since < PATIENCE and best_s > good_enough_s * (1 + ROUNDING):
        number += 1
        for expected_s, device, order in floor.moves(orders):
            if floor.left <= 0:
                break
            floor.left -= len(order)
            if not shop.fits(device, order):
                continue
            # Not back to an order just left, unless the move is expected to end better than the best so far.
            if number - left_at.get((device, order), -TENURE) < TENURE and expected_s >= best_s:
                continue
            tried = (*orders[:device], order, *orders[device + 1 :])
            seconds = floor.look_at(tried)
            if seconds is None:
                floor.look_at(orders)
                continue
            left_at[device, orders[device]] = number
            orders = tried
            break
        else:
            break
        if seconds is not None and seconds < best_s * (1 - ROUNDING):
            best_s, best, since = seconds, orders, number
    return Found(best_s, best, floor.left)


class _Flushed:
    """A step on its own: orders looked at, with heads and tails of their ops. ``left``: work that may still
    be done, in ops run.
    """

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.left = 0
        self.ends: list[float] = []
        self.tails: list[float] = []

    def look_at(self, orders: Orders) -> float | None:
        """How long ``orders`` take; None where devices wait for each other."""
        self.left -= 2 * len(self.shop.seconds)
        ran = run(self.shop, orders)
        if ran is None:
            return None
        self.ends, self.tails = ran.ends, self._tails(orders, ran)
        return makespan_s(self.shop, ran)

    def _tails(self, orders: Orders, ran: Ran) -> list[float]:
        """For each op the seconds from its end to that of the step."""
        shop, behind = self.shop, [NOBODY] * len(ran.ends)
        for order in orders:
            for op, after in pairwise(order):
                behind[op] = after
        tails, seconds, feeds, stride = [0.0] * len(ran.ends), shop.seconds, shop.feeds, shop.stride
        for op in reversed(ran.ran):
            after, fed = behind[op], feeds[op]
            tail_s = seconds[after] + tails[after] if after != NOBODY else 0.0
            if fed != NOBODY:
                tail_s = max(tail_s, seconds[fed] + tails[fed])
            if op % stride == 1 and stride == 3:
                tail_s = max(tail_s, seconds[op + 1] + tails[op + 1])
            tails[op] = tail_s
        return tails

    def moves(self, orders: Orders) -> Iterator[tuple[float, int, tuple[int, ...]]]:
        """(expected seconds, device, its new order), the best first, of as many as may be estimated.

        A move whose bound is worse than what the best of the others is expected to take is not estimated.
        """
        queue = [
            (min_s, False, device, at, to)
            for min_s, device, at, to in self._bounded(orders, self._blocks(orders))
        ]
        heapq.heapify(queue)
        while queue:
            seconds, known, device, at, to = heapq.heappop(queue)
            if known:
                yield seconds, device, moved(orders[device], at, to)
            # Estimates count in the effort: blocks of the critical path grow with the micro-batches, and
            # estimates with their square. (D-schedules-016)
            elif self.left > 0:
                self.left -= LOOKED * (abs(at - to) + 1)
                expected_s = self._expected(orders[device], at, to)
                if expected_s >= 0:
                    heapq.heappush(queue, (expected_s, True, device, at, to))

    def _bounded(self, orders: Orders, found: Iterable[Block]) -> Iterator[tuple[float, int, int, int]]:
        """Moves of blocks, each with a bound from below of what ``_expected`` says of it.

        A block has no gaps. So what goes to its beginning delays all that it overtakes by the same time, and
        what goes further back ends no earlier than those before it end now.
        """
        ends, seconds = self.ends, self.shop.seconds
        for device, first, last in found:
            order = orders[device]
            starts_s = ends[order[first]] - seconds[order[first]]
            free_s = ends[order[first - 1]] if first else 0.0
            fed_s = [ends[op] + self._fed_s(op) for op in order[first:last]]
            longest_s = list(accumulate(fed_s, max))
            for _, at, to in _moves([(device, first, last)]):
                self.left -= LOOKED
                op, behind_s = order[at], self._behind_s(order, max(at, to))
                if at < to:
                    early_s = starts_s - free_s if at == first else 0.0
                    min_s = ends[order[to]] - early_s + max(behind_s, self._fed_s(op))
                else:
                    source = self.shop.source[op]
                    released_s = ends[source] if source != NOBODY else 0.0
                    later_s = max(free_s, released_s) + seconds[op] - starts_s
                    min_s = max(longest_s[at - 1 - first], ends[order[at - 1]] + behind_s) + later_s
                yield min_s * (1 - ROUNDING), device, at, to

    def _behind_s(self, order: Sequence[int], at: int) -> float:
        """From the end of what is at that position to that of the step, by way of its device."""
        if at + 1 == len(order):
            return 0.0
        return self.shop.seconds[order[at + 1]] + self.tails[order[at + 1]]

    def _fed_s(self, op: int) -> float:
        """The same by way of another device that waits for it."""
        fed = self.shop.feeds[op]
        if fed == NOBODY or self.shop.device[fed] == self.shop.device[op]:
            return 0.0
        return self.shop.seconds[fed] + self.tails[fed]

    def _blocks(self, orders: Orders) -> Iterator[Block]:
        ends = self.ends
        last = max(range(len(ends)), key=lambda op: ends[op])
        yield from blocks(critical(self.shop, orders, ends, last)[0])

    def _expected(self, order: Sequence[int], at: int, to: int) -> float:
        """An estimate of the step with that move, from below as far as the path through the ops between goes;
        -1 where it cannot be.
        """
        shop, ends, tails, seconds = self.shop, self.ends, self.tails, self.shop.seconds
        low, high = min(at, to), max(at, to)
        between = list(order[low : high + 1])
        between.insert(to - low, between.pop(at - low))
        inside = set(between)
        end_s = ends[order[low - 1]] if low else 0.0
        new: dict[int, float] = {}
        for op in between:
            before = shop.source[op]
            if before in inside:
                if before not in new:
                    return -1.0
                end_s = max(end_s, new[before])
            elif before != NOBODY:
                end_s = max(end_s, ends[before])
            end_s += seconds[op]
            new[op] = end_s
        longest_s = 0.0
        behind_s = seconds[order[high + 1]] + tails[order[high + 1]] if high + 1 < len(order) else 0.0
        later: dict[int, float] = {}
        for op in reversed(between):
            tail_s, fed = behind_s, shop.feeds[op]
            if fed != NOBODY:
                tail_s = max(tail_s, seconds[fed] + later.get(fed, tails[fed]))
            if shop.stride == 3 and op % 3 == 1:
                tail_s = max(tail_s, seconds[op + 1] + later.get(op + 1, tails[op + 1]))
            later[op] = tail_s
            longest_s = max(longest_s, new[op] + tail_s)
            behind_s = tail_s + seconds[op]
        return longest_s


class _Period:
    """Step after step, with staggered updates. ``left``: work that may still be done, in ops run."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.weight = 4 * len(shop.seconds)
        self.left = 0
        self.blocks: list[Block] = []

    def look_at(self, orders: Orders) -> float | None:
        """The period of ``orders``; None where devices wait for each other."""
        self.left -= self.weight
        found = period(self.shop, orders)
        if found is None:
            return None
        self.blocks = list(self._blocks(orders, found.last, found.reduced))
        return found.seconds

    def moves(self, orders: Orders) -> Iterator[tuple[float, int, tuple[int, ...]]]:
        """(seconds, device, its new order), the best first."""
        options = []
        for device, at, to in _moves(self.blocks):
            if self.left <= 0:
                break
            order = moved(orders[device], at, to)
            if not self.shop.fits(device, order) or not self._in_order(order, min(at, to), max(at, to)):
                continue
            self.left -= self.weight
            found = period(self.shop, (*orders[:device], order, *orders[device + 1 :]))
            if found is not None:
                # Of periods that are as long, the one in which devices have updated longest before the vote.
                ahead_s = sum(max(found.reduced[-1]) - at_s for at_s in found.reduced[-1])
                options.append((round(found.seconds, 12), -ahead_s, device, order))
        return ((seconds, device, order) for seconds, _, device, order in sorted(options))

    def _in_order(self, order: Sequence[int], low: int, high: int) -> bool:
        """Whether between those positions every op comes after its source."""
        at = {op: place for place, op in enumerate(order[low : high + 1])}
        return all(at.get(self.shop.source[op], -1) < place for op, place in at.items())

    def _blocks(
        self, orders: Orders, last: Sequence[Sequence[float]], reduced: Sequence[Sequence[float]]
    ) -> Iterator[Block]:
        """Of the critical path, from the last vote back through the rounds of ``last``."""
        shop, found = self.shop, dict[Block, None]()
        number = len(last) - 1
        until_s = max(reduced[number])
        while number >= 0:
            ends = last[number]
            gradients = range(shop.stride - 1, len(ends), shop.stride)
            op = min(gradients, key=lambda op: (abs(ends[op] - until_s), op))
            path, start_s = critical(shop, orders, ends, op)
            found |= dict.fromkeys(blocks(path))
            number -= 1
            if number >= 0:
                first = shop.device[orders[path[0][0]][path[0][1]]]
                votes_s = max(reduced[number])
                gate = abs(start_s - votes_s) <= ROUNDING * max(1.0, votes_s)
                until_s = votes_s if gate else reduced[number][first]
        yield from found


def moved(order: Sequence[int], at: int, to: int) -> tuple[int, ...]:
    """``order`` with the op at one position at the other."""
    changed = list(order)
    changed.insert(to, changed.pop(at))
    return tuple(changed)


def critical(
    shop: Shop, orders: Orders, ends: Sequence[float], op: int
) -> tuple[list[tuple[int, int]], float]:
    """What ``op``'s end is made of, as (device, position) from first to last, and when the first begins."""
    places = [0] * len(ends)
    for order in orders:
        for place, each in enumerate(order):
            places[each] = place
    path: list[tuple[int, int]] = []
    while True:
        device = shop.device[op]
        path.append((device, places[op]))
        start_s = ends[op] - shop.seconds[op]
        slack_s = ROUNDING * max(1.0, ends[op])
        before = orders[device][places[op] - 1] if places[op] else NOBODY
        source = shop.source[op]
        if before != NOBODY and ends[before] >= start_s - slack_s:
            op = before
        elif source != NOBODY and ends[source] >= start_s - slack_s:
            op = source
        else:
            return path[::-1], start_s


def blocks(path: Sequence[tuple[int, int]]) -> Iterator[Block]:
    """The runs of at least two neighbours in ``path``."""
    first = path[0]
    for here, after in zip(path, [*path[1:], (NOBODY, NOBODY)], strict=True):
        if after != (here[0], here[1] + 1):
            if here != first:
                yield (*first, here[1])
            first = after


def _moves(found: Iterator[Block] | Sequence[Block]) -> Iterator[Move]:
    for device, first, last in found:
        for at in range(first, last):
            yield device, at, at + 1
        for at in range(first + 2, last + 1):
            yield device, at, first
        for at in range(first, last - 1):
            yield device, at, last
