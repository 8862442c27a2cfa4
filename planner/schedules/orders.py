"""Runs orders of F, I and W on the devices of a pipeline, and searches for better ones.

Owns the search on orders that somebody else begins (``decoupled``). An order is a word such as ``FFIFIWIWW``
(``pipe`` has the letters): the k-th of a letter is for the k-th micro-batch. Micro-batches are alike, so some
best schedule has them in order (of two in the wrong order swap the names from there on). A send belongs to
the op before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from math import inf
from typing import NamedTuple

from oobleckd.planner.schedules.pipe import Pipe

# Beside the job shop (``tabu``), which can say all of this and more: alone it would be 5.5 % slower at worst,
# where memory is short, for half as much CPU again. (D-schedules-022)
Orders = tuple[str, ...]
Ends = list[dict[str, list[float]]]
Place = tuple[int, int]  # device, position in its order
Op = tuple[str, int]  # letter, how many of it came before

TENURE = 12  # rounds in which the search does not go back to an order it has left
PATIENCE = 60  # rounds without a better makespan after which the search ends
ROUNDING = 1e-9
MAX_PER_ROUND = 150_000
"""Ops run in trials of one round beyond what the search has left, about a sixth of a second. Where all
changes of a round would take more, the likeliest are tried.
"""


class FoundOrders(NamedTuple):
    """The best orders of a search, and how many ops it did not have to run in trials."""

    makespan_s: float
    orders: Orders
    ops_left: int


class OrderChange(NamedTuple):
    """The new ``order`` of ``device``, which differs from its old one between positions ``low``
    and ``high``.
    """

    device: int
    order: str
    low: int
    high: int


class OrderRun(NamedTuple):
    """``ends[device][letter][k]``: when the k-th op of ``letter`` ends; ``makespan_s``: when the
    last does.
    """

    makespan_s: float
    ends: Ends


def min_makespan_s(pipe: Pipe, num_micro_batches: int) -> float:
    """A bound from below: a device cannot begin before the first activations are there, has all its ops to
    do, and after its last I (of its first stage: what is nearer to the end comes before) the stages before it
    have theirs.
    """
    if num_micro_batches == 0:
        return 0.0
    head_s = best_s = 0.0
    for device, took in enumerate(pipe.times):
        after_s, chain_s = num_micro_batches * sum(took[w] for w in took if w in "Ww"), 0.0
        for before in reversed(pipe.times[:device]):
            chain_s += before["I"]
            after_s = max(after_s, chain_s + before["W"])
        busy_s = num_micro_batches * sum(took[letter] for letter in took if letter not in "Ww")
        best_s = max(best_s, head_s + busy_s + after_s)
        head_s += took["F"]
    return best_s


def allowed(pipe: Pipe, device: int, order: str) -> bool:
    """Whether every I has its F before it, every W its I, and the device room for all that is held."""
    done = dict.fromkeys(pipe.times[device], 0)
    for letter in order:
        done[letter] += 1
        if letter in "IW" and not done["F"] >= done["I"] >= done["W"]:
            return False
        if letter in "iw" and not done["f"] >= done["i"] >= done["w"]:
            return False
    return pipe.fits(device, pipe.peak_bytes(device, order))


def run(pipe: Pipe, orders: Orders) -> OrderRun | None:
    """Run ``orders``, all allowed, as early as they can; None where devices wait for each other."""
    ends: Ends = [{letter: [] for letter in took} for took in pipe.times]
    given = [
        {letter: None if link is None else ends[link[0]][link[1]] for letter, link in sources.items()}
        for sources in pipe.sources
    ]
    now_s = [0.0] * len(orders)
    position = [0] * len(orders)
    there_and_back = (*range(len(orders)), *reversed(range(len(orders) - 1)))
    moved = True
    while moved:
        moved = False
        for device in there_and_back:
            took, mine, order = pipe.times[device], ends[device], orders[device]
            sources = given[device]
            began, at_s = position[device], now_s[device]
            for letter in order[began:]:
                source, done = sources[letter], mine[letter]
                if source is not None:
                    if len(source) == len(done):
                        break
                    at_s = max(at_s, source[len(done)])
                at_s += took[letter]
                done.append(at_s)
                position[device] += 1
            now_s[device] = at_s
            moved = moved or position[device] > began
    finished = all(at == len(order) for at, order in zip(position, orders, strict=True))
    return OrderRun(max(now_s), ends) if finished else None


def improve(pipe: Pipe, orders: Orders, num_ops: int, good_enough_s: float) -> FoundOrders:
    """The best orders that a search from ``orders`` finds.

    Tabu search of job shops (Nowicki and Smutnicki 1996): only a change on the critical path can help. Every
    round takes the best change of one order, even for the worse, but not back to one just left. Ends at
    ``good_enough_s``, or after ``num_ops`` ops were run in trials; a round that is begun is ended, within
    ``MAX_PER_ROUND``.
    """
    size = sum(map(len, orders))
    now = run(pipe, orders)
    assert now is not None, "the search begins with orders that run"
    best_s, best = now.makespan_s, orders
    left_at: dict[tuple[int, str], int] = {}
    since = number = 0
    while num_ops > 0 and number - since < PATIENCE and best_s > good_enough_s * (1 + ROUNDING):
        number += 1
        options: list[tuple[float, int, str, OrderRun]] = []
        # A round tried every change of its blocks, thousands on long pipelines: half of the time on a 6.7B
        # job with 31 nodes, which ended at the same makespan. (D-schedules-018)
        for device, order, _, _ in _likeliest(pipe, orders, now, max(num_ops, MAX_PER_ROUND) // size):
            num_ops -= size
            tried = run(pipe, (*orders[:device], order, *orders[device + 1 :]))
            if tried is None:
                continue
            # An order that was just left is taken all the same where it is better than the best so far.
            tabu = number - left_at.get((device, order), -TENURE) < TENURE
            if not tabu or tried.makespan_s < best_s * (1 - ROUNDING):
                options.append((tried.makespan_s, device, order, tried))
        if not options:
            break
        makespan_s, device, order, now = min(options, key=lambda option: option[:3])
        left_at[device, orders[device]] = number
        orders = (*orders[:device], order, *orders[device + 1 :])
        if makespan_s < best_s * (1 - ROUNDING):
            best_s, best, since = makespan_s, orders, number
    return FoundOrders(best_s, best, num_ops)


def _likeliest(pipe: Pipe, orders: Orders, now: OrderRun, max_changes: int) -> Iterator[OrderChange]:
    """All changes that are allowed; where there are more than ``max_changes``, so many of those that are
    expected to be best.
    """
    changes = list(_changes(pipe, orders, now))
    if len(changes) > max_changes:
        tails = _tails(pipe, orders, now)
        changes.sort(key=lambda change: (_expected(pipe, now, tails, change), change))
    yield from islice(
        (each for each in changes if allowed(pipe, each.device, each.order)), max(1, max_changes)
    )


def _changes(pipe: Pipe, orders: Orders, now: OrderRun) -> Iterator[OrderChange]:
    """In every block of ops that follow each other on the critical path, two neighbours swapped, one op
    before all others, one behind them.
    """
    for device, first, last in _blocks(_critical(pipe, orders, now)):
        order = orders[device]
        head, block, tail = order[:first], order[first : last + 1], order[last + 1 :]
        changed: dict[str, tuple[int, int]] = {}
        for at in range(len(block) - 1):
            changed.setdefault(block[:at] + block[at + 1] + block[at] + block[at + 2 :], (at, at + 1))
        for at in range(len(block)):
            changed.setdefault(block[at] + block[:at] + block[at + 1 :], (0, at))
            changed.setdefault(block[:at] + block[at + 1 :] + block[at], (at, len(block) - 1))
        changed.pop(block, None)
        for new, (low, high) in sorted(changed.items()):
            yield OrderChange(device, head + new + tail, first + low, first + high)


def _tails(pipe: Pipe, orders: Orders, now: OrderRun) -> Ends:
    """From the end of each op to that of the run, laid out as ``OrderRun.ends``."""
    tails: Ends = [{letter: [0.0] * len(ends) for letter, ends in mine.items()} for mine in now.ends]
    places = [_places(order) for order in orders]
    ops = [
        (now.ends[device][letter][k], device, at)
        for device, mine in enumerate(places)
        for at, (letter, k) in enumerate(mine)
    ]
    for _, device, at in sorted(ops, reverse=True):  # whatever waits for an op ends after it
        letter, k = places[device][at]
        tail_s = 0.0
        if at + 1 < len(places[device]):
            after, count = places[device][at + 1]
            tail_s = pipe.times[device][after] + tails[device][after][count]
        fed = pipe.feeds[device].get(letter)
        if fed is not None:
            tail_s = max(tail_s, pipe.times[fed[0]][fed[1]] + tails[fed[0]][fed[1]][k])
        tails[device][letter][k] = tail_s
    return tails


def _expected(pipe: Pipe, now: OrderRun, tails: Ends, change: OrderChange) -> float:
    """The longest path through the ops between ``low`` and ``high`` in their new order, as if nothing else
    moved (Balas and Vazacopoulos 1998): an estimate of the makespan; inf where an op comes before its source.
    """
    device, order, _, high = change
    took, heads = pipe.times[device], _heads(pipe, now, change)
    if heads is None:
        return inf
    behind_s = longest_s = 0.0
    if high + 1 < len(order):
        after = order[high + 1]
        behind_s = took[after] + tails[device][after][order.count(after, 0, high + 1)]
    later: dict[Op, float] = {}
    for (letter, k), end_s in reversed(heads.items()):
        fed = pipe.feeds[device].get(letter)
        if fed is not None:
            other, what = fed
            tail_s = later.get((what, k)) if other == device else None
            behind_s = max(
                behind_s, pipe.times[other][what] + (tails[other][what][k] if tail_s is None else tail_s)
            )
        later[letter, k] = behind_s
        longest_s = max(longest_s, end_s + behind_s)
        behind_s += took[letter]
    return longest_s


def _heads(pipe: Pipe, now: OrderRun, change: OrderChange) -> dict[Op, float] | None:
    """When the ops between ``low`` and ``high`` end in their new order, as if nothing else moved; None where
    one comes before its source.
    """
    device, order, low, high = change
    took, ends = pipe.times[device], now.ends
    counts = {letter: order.count(letter, 0, low) for letter in took}
    end_s = ends[device][order[low - 1]][counts[order[low - 1]] - 1] if low else 0.0
    found: dict[Op, float] = {}
    for letter in order[low : high + 1]:
        k = counts[letter]
        counts[letter] += 1
        source = pipe.sources[device][letter]
        if source is not None and source[0] == device and counts[source[1]] <= k:
            return None
        if source is not None:
            op = source[1], k
            end_s = max(
                end_s, found[op] if source[0] == device and op in found else ends[source[0]][source[1]][k]
            )
        end_s += took[letter]
        found[letter, k] = end_s
    return found


def _critical(pipe: Pipe, orders: Orders, now: OrderRun) -> list[Place]:
    """The ops that the makespan is made of, from first to last."""
    at = [_places(order) for order in orders]
    device = max(range(len(orders)), key=lambda device: max(map(max, now.ends[device].values())))
    position = len(orders[device]) - 1
    path = [(device, position)]
    while True:
        letter, k = at[device][position]
        source = pipe.sources[device][letter]
        before = at[device][position - 1] if position else None
        free_s = now.ends[device][before[0]][before[1]] if before else 0.0
        ready_s = now.ends[source[0]][source[1]][k] if source is not None else 0.0
        if before and free_s >= ready_s:
            position -= 1
        elif source is not None:
            device = source[0]
            position = at[device].index((source[1], k))
        else:
            return path[::-1]
        path.append((device, position))


def _places(order: str) -> list[Op]:
    """Position -> (letter, how many of it came before)."""
    counts: dict[str, int] = {}
    places = []
    for letter in order:
        places.append((letter, counts.get(letter, 0)))
        counts[letter] = counts.get(letter, 0) + 1
    return places


def _blocks(path: Sequence[Place]) -> Iterator[tuple[int, int, int]]:
    """(device, first and last position) of the runs of at least two neighbours in ``path``."""
    first = path[0]
    for here, after in pairwise([*path, (-1, -1)]):
        if after != (here[0], here[1] + 1):
            if here != first:
                yield (*first, here[1])
            first = after
