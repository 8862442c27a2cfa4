"""Orders of F, I and W on the stages of a pipeline: when they end, and a search for a better one.

Owns the search on orders that somebody else begins (``decoupled``). An order is a word such as
``FFIFIWIWW``: the k-th letter of a kind is for the k-th micro-batch. Micro-batches are alike, so some
best schedule has them in order (of two in the wrong order swap the names from there on). A send
belongs to the op before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.work import StageWork

Orders = tuple[str, ...]
Ends = list[dict[str, list[float]]]
Place = tuple[int, int]  # stage, position in its order

TENURE = 12  # rounds in which the search does not go back to an order it has left
PATIENCE = 60  # rounds without a better makespan after which the search ends
ROUNDING = 1e-9


class Found(NamedTuple):
    """The best orders of a search, and how many ops it did not have to run in trials."""

    makespan_s: float
    orders: Orders
    ops_left: int


class Run(NamedTuple):
    """``ends[stage][kind][k]``: when the k-th op of ``kind`` ends; ``makespan_s``: when the last does."""

    makespan_s: float
    ends: Ends


def durations(works: Sequence[StageWork]) -> list[dict[str, float]]:
    """Stage -> seconds of F, I and W with what they send."""
    return [{"F": w.forward_s + w.send_s, "I": w.input_s + w.return_s, "W": w.weight_s} for w in works]


def least_makespan_s(works: Sequence[StageWork], num_micro_batches: int) -> float:
    """A bound from below: a stage cannot begin before the first activations are there, has all its ops
    to do, and after its last I the stages before it have theirs.
    """
    if num_micro_batches == 0:
        return 0.0
    times = durations(works)
    head_s = best_s = 0.0
    for stage, took in enumerate(times):
        after_s, chain_s = num_micro_batches * took["W"], 0.0
        for before in reversed(times[:stage]):
            chain_s += before["I"]
            after_s = max(after_s, chain_s + before["W"])
        best_s = max(best_s, head_s + num_micro_batches * (took["F"] + took["I"]) + after_s)
        head_s += took["F"]
    return best_s


def allowed(order: str, work: StageWork) -> bool:
    """Whether every I has its F before it, every W its I, and the device room for all that is held."""
    forwards = inputs = weights = 0
    for kind in order:
        forwards += kind == "F"
        inputs += kind == "I"
        weights += kind == "W"
        if not forwards >= inputs >= weights:
            return False
    return work.fits(work.peak_bytes(order))


def run(times: Sequence[dict[str, float]], orders: Orders) -> Run | None:
    """Run ``orders``, all allowed, as early as they can; None where stages wait for each other."""
    ends: Ends = [{"F": [], "I": [], "W": []} for _ in orders]
    now_s = [0.0] * len(orders)
    position = [0] * len(orders)
    there_and_back = (*range(len(orders)), *reversed(range(len(orders) - 1)))
    moved = True
    while moved:
        moved = False
        for stage in there_and_back:
            took, mine, order = times[stage], ends[stage], orders[stage]
            sources = _sources(ends, stage)
            began, at_s = position[stage], now_s[stage]
            for kind in order[began:]:
                source, done = sources[kind], mine[kind]
                if source is not None:
                    if len(source) == len(done):
                        break
                    at_s = max(at_s, source[len(done)])
                at_s += took[kind]
                done.append(at_s)
                position[stage] += 1
            now_s[stage] = at_s
            moved = moved or position[stage] > began
    finished = all(at == len(order) for at, order in zip(position, orders, strict=True))
    return Run(max(now_s), ends) if finished else None


def _sources(ends: Ends, stage: int) -> dict[str, list[float] | None]:
    """Kind -> the ends of the ops whose results it needs."""
    return {
        "F": ends[stage - 1]["F"] if stage else None,
        "I": ends[stage + 1]["I"] if stage + 1 < len(ends) else ends[stage]["F"],
        "W": ends[stage]["I"],
    }


def improve(works: Sequence[StageWork], orders: Orders, num_ops: int, good_enough_s: float) -> Found:
    """The best orders that a search from ``orders`` finds.

    Tabu search of job shops (Nowicki and Smutnicki 1996): only a change on the critical path can help.
    Every round takes the best change of one order, even for the worse, but not back to one just left. Ends
    at ``good_enough_s``, or after ``num_ops`` ops were run in trials.
    """
    times = durations(works)
    size = sum(map(len, orders))
    now = run(times, orders)
    assert now is not None, "the search begins with orders that run"
    best_s, best = now.makespan_s, orders
    left_at: dict[tuple[int, str], int] = {}
    since = number = 0
    while num_ops > 0 and number - since < PATIENCE and best_s > good_enough_s * (1 + ROUNDING):
        number += 1
        options: list[tuple[float, int, str, Run]] = []
        for stage, order in _changes(orders, now):
            if not allowed(order, works[stage]):
                continue
            num_ops -= size
            tried = run(times, (*orders[:stage], order, *orders[stage + 1 :]))
            if tried is None:
                continue
            tabu = number - left_at.get((stage, order), -TENURE) < TENURE
            if not tabu or tried.makespan_s < best_s * (1 - ROUNDING):
                options.append((tried.makespan_s, stage, order, tried))
        if not options:
            break
        makespan_s, stage, order, now = min(options, key=lambda option: option[:3])
        left_at[stage, orders[stage]] = number
        orders = (*orders[:stage], order, *orders[stage + 1 :])
        if makespan_s < best_s * (1 - ROUNDING):
            best_s, best, since = makespan_s, orders, number
    return Found(best_s, best, num_ops)


def _changes(orders: Orders, now: Run) -> Iterator[tuple[int, str]]:
    """(stage, its new order): in every block of ops that follow each other on the critical path, two
    neighbours swapped, one op before all others, one behind them.
    """
    for stage, first, last in _blocks(_critical(orders, now)):
        order = orders[stage]
        head, block, tail = order[:first], order[first : last + 1], order[last + 1 :]
        changed = {
            *(block[:at] + block[at + 1] + block[at] + block[at + 2 :] for at in range(len(block) - 1)),
            *(block[at] + block[:at] + block[at + 1 :] for at in range(len(block))),
            *(block[:at] + block[at + 1 :] + block[at] for at in range(len(block))),
        }
        yield from ((stage, head + new + tail) for new in sorted(changed - {block}))


def _critical(orders: Orders, now: Run) -> list[Place]:
    """The ops that the makespan is made of, from first to last."""
    at = [_places(order) for order in orders]
    stage = max(range(len(orders)), key=lambda stage: max(map(max, now.ends[stage].values())))
    position = len(orders[stage]) - 1
    path = [(stage, position)]
    while True:
        kind, k = at[stage][position]
        source = _sources(now.ends, stage)[kind]
        before = at[stage][position - 1] if position else None
        free_s = now.ends[stage][before[0]][before[1]] if before else 0.0
        ready_s = source[k] if source is not None else 0.0
        if before and free_s >= ready_s:
            position -= 1
        elif source is not None:
            stage += {"F": -1, "I": 1}[kind]
            position = at[stage].index((kind, k))
        else:
            return path[::-1]
        path.append((stage, position))


def _places(order: str) -> list[tuple[str, int]]:
    """Position -> (kind, how many of the kind came before)."""
    counts = {"F": 0, "I": 0, "W": 0}
    places = []
    for kind in order:
        places.append((kind, counts[kind]))
        counts[kind] += 1
    return places


def _blocks(path: Sequence[Place]) -> Iterator[tuple[int, int, int]]:
    """(stage, first and last position) of the runs of at least two neighbours in ``path``."""
    first = path[0]
    for here, after in pairwise([*path, (-1, -1)]):
        if after != (here[0], here[1] + 1):
            if here != first:
                yield (*first, here[1])
            first = after
