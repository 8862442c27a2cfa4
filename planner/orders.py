"""Orders of F, I and W on the devices of a pipeline: when they end, and a search for a better one.

Owns the search on orders that somebody else begins (``decoupled``). An order is a word such as
``FFIFIWIWW`` (``pipe`` has the letters): the k-th of a letter is for the k-th micro-batch. Micro-batches are alike, so some
best schedule has them in order (of two in the wrong order swap the names from there on). A send
belongs to the op before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.pipe import Pipe

Orders = tuple[str, ...]
Ends = list[dict[str, list[float]]]
Place = tuple[int, int]  # device, position in its order

TENURE = 12  # rounds in which the search does not go back to an order it has left
PATIENCE = 60  # rounds without a better makespan after which the search ends
ROUNDING = 1e-9


class Found(NamedTuple):
    """The best orders of a search, and how many ops it did not have to run in trials."""

    makespan_s: float
    orders: Orders
    ops_left: int


class Run(NamedTuple):
    """``ends[device][letter][k]``: when the k-th op of ``letter`` ends; ``makespan_s``: when the last does."""

    makespan_s: float
    ends: Ends


def least_makespan_s(pipe: Pipe, num_micro_batches: int) -> float:
    """A bound from below: a device cannot begin before the first activations are there, has all its ops
    to do, and after its last I (of its first stage: what is nearer to the end comes before) the stages before it have theirs.
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


def run(pipe: Pipe, orders: Orders) -> Run | None:
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
    return Run(max(now_s), ends) if finished else None


def improve(pipe: Pipe, orders: Orders, num_ops: int, good_enough_s: float) -> Found:
    """The best orders that a search from ``orders`` finds.

    Tabu search of job shops (Nowicki and Smutnicki 1996): only a change on the critical path can help.
    Every round takes the best change of one order, even for the worse, but not back to one just left. Ends
    at ``good_enough_s``, or after ``num_ops`` ops were run in trials.
    """
    size = sum(map(len, orders))
    now = run(pipe, orders)
    assert now is not None, "the search begins with orders that run"
    best_s, best = now.makespan_s, orders
    left_at: dict[tuple[int, str], int] = {}
    since = number = 0
    while num_ops > 0 and number - since < PATIENCE and best_s > good_enough_s * (1 + ROUNDING):
        number += 1
        options: list[tuple[float, int, str, Run]] = []
        for device, order in _changes(pipe, orders, now):
            if not allowed(pipe, device, order):
                continue
            num_ops -= size
            tried = run(pipe, (*orders[:device], order, *orders[device + 1 :]))
            if tried is None:
                continue
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
    return Found(best_s, best, num_ops)


def _changes(pipe: Pipe, orders: Orders, now: Run) -> Iterator[tuple[int, str]]:
    """(device, its new order): in every block of ops that follow each other on the critical path, two
    neighbours swapped, one op before all others, one behind them.
    """
    for device, first, last in _blocks(_critical(pipe, orders, now)):
        order = orders[device]
        head, block, tail = order[:first], order[first : last + 1], order[last + 1 :]
        changed = {
            *(block[:at] + block[at + 1] + block[at] + block[at + 2 :] for at in range(len(block) - 1)),
            *(block[at] + block[:at] + block[at + 1 :] for at in range(len(block))),
            *(block[:at] + block[at + 1 :] + block[at] for at in range(len(block))),
        }
        yield from ((device, head + new + tail) for new in sorted(changed - {block}))


def _critical(pipe: Pipe, orders: Orders, now: Run) -> list[Place]:
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


def _places(order: str) -> list[tuple[str, int]]:
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
