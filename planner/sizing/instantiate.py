"""Chooses which templates run on N nodes, and how many micro-batches each pipeline computes.

Owns shares, and says what is idle; the search for sizes is ``sizes``'. Knows no node names (``transfer``
places sizes on nodes). Exact: no other multiset of sizes with as many pipelines as promised has a faster
slowest pipeline.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from oobleckd.planner.costs.model import Floats
from oobleckd.planner.plan import Template
from oobleckd.planner.policy import PlanError
from oobleckd.planner.sizing.sizes import best_sizes, best_sizes_with, task_of
from oobleckd.planner.templates.guarantee import max_pipelines, max_usable
from oobleckd.words import count, noun


class Instantiation(msgspec.Struct, frozen=True):
    """Pipelines by size, ascending, each with its share of the micro-batches.

    ``idle``: nodes without a place, not 0 only where the sizes cannot sum up to all nodes.
    ``step_s``: modelled time of the slowest pipeline, with what of the exchange shows if that was asked for,
    in seconds.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    idle: int
    step_s: float

    @property
    def counts(self) -> dict[int, int]:
        """Size -> number of pipelines of that size."""
        return dict(Counter(self.sizes))


def instantiate(
    templates: Sequence[Template],
    num_nodes: int,
    f: int,
    num_micro_batches: int,
    reduce_s: Sequence[float] | Floats | None = None,
) -> Instantiation:
    """The fastest pipelines on ``num_nodes`` nodes: at least f + 1 where n0 allows, else as many as
    it allows; all nodes used wherever sizes sum up to them. ``reduce_s[c]``: what the exchange among c
    pipelines adds to a step, in seconds, for all c up to ``num_nodes // n0`` (None: nothing): one number, or
    one for each size (``exchanged``).

    Sizes of ``templates`` are consecutive. Every pipeline gets a micro-batch where there are enough
    for the fewest pipelines possible. Raises PlanError below n0 nodes.
    """
    by_size = {template.num_nodes: template for template in templates}
    n0, largest = min(by_size), max(by_size)
    if num_nodes < n0:
        raise too_few(num_nodes, n0)
    used = max_usable(num_nodes, n0, largest)
    task = task_of(by_size, used, max_pipelines(num_nodes, n0, f), num_micro_batches)
    if reduce_s is None:
        sizes = best_sizes(task)
        members = [by_size[size] for size in sizes]
    else:
        more_s = _by_size(reduce_s, len(by_size))
        sizes = best_sizes_with(task, more_s)
        members = [longer(by_size[size], float(more_s[len(sizes), size - n0])) for size in sizes]
    shares = split_micro_batches(members, num_micro_batches)
    return Instantiation(tuple(sizes), shares, num_nodes - used, slowest_s(members, shares))


def _by_size(reduce_s: Sequence[float] | Floats, num_sizes: int) -> Floats:
    found = np.asarray(reduce_s, dtype=np.float64)
    return found if found.ndim > 1 else np.repeat(found[:, None], num_sizes, axis=1)


def longer(template: Template, more_s: float) -> Template:
    """``template`` with a pipeline that takes so much longer, whatever its share."""
    return msgspec.structs.replace(template, fill_s=template.fill_s + more_s)


def too_few(num_nodes: int, n0: int, recomputing: int = 0) -> PlanError:
    """The error for fewer nodes than one pipeline needs. ``recomputing``: how many it would need if its
    blocks were computed again (0: as many).
    """
    memory = "raise resources.device_memory"
    enough = f"{recomputing} {noun(recomputing, 'is')} enough then"
    again = f', or set schedule.recompute = "auto" ({enough})' if recomputing else ""
    return PlanError(
        f"{count(num_nodes, 'usable node')}, and the model needs {n0}",
        f"add {n0 - num_nodes} or more nodes, or {memory}{again}",
        memory,
    )


def why_idle(num_nodes: int, n0: int, largest: int) -> str:
    """Why some of ``num_nodes`` nodes have no place: the only reason that there is."""
    return (
        f"{count(num_nodes, 'node')} {noun(num_nodes, 'does')} not split into pipelines of {n0} to {largest}"
    )


def slowest_s(members: Sequence[Template], shares: Sequence[int]) -> float:
    """Modelled time of a step in seconds: that of the slowest pipeline."""
    return max(t.time_s(share) for t, share in zip(members, shares, strict=True))


def split_micro_batches(members: Sequence[Template], num_micro_batches: int) -> tuple[int, ...]:
    """Shares of the pipelines ``members`` with the least slowest pipeline; at least one each where
    there are enough. Equal pipelines share evenly, the earlier ones take what is left over.
    """
    alike: dict[tuple[float, float], list[int]] = defaultdict(list)
    for position, template in enumerate(members):
        alike[template.fill_s, template.period_s].append(position)
    kinds = [members[positions[0]] for positions in alike.values()]
    counts = [len(positions) for positions in alike.values()]
    enough = num_micro_batches >= len(members)
    shares = _even_start(kinds, counts, num_micro_batches) if enough else [0] * len(kinds)
    last = _raise_to(kinds, counts, shares, num_micro_batches)
    given = [0] * len(members)
    for share, positions in zip(shares, alike.values(), strict=True):
        for position in positions:
            given[position] = share
    # What is left goes to the first of those that would be done next, at the same time.
    left = num_micro_batches - sum(given)
    waiting = (position for kind in last for position in list(alike.values())[kind])
    for position in heapq.nsmallest(left, waiting):
        given[position] += 1
    return tuple(given)


def _raise_to(
    kinds: Sequence[Template], counts: Sequence[int], shares: list[int], num_micro_batches: int
) -> list[int]:
    """Raise the ``shares`` of kinds of pipelines, ``counts`` of each, in the order in which they would be
    done with one more, until less is left than the next ones could take; returns those.
    """
    left = num_micro_batches - sum(share * count for share, count in zip(shares, counts, strict=True))
    heap = [(template.time_s(shares[kind] + 1), kind) for kind, template in enumerate(kinds)]
    heapq.heapify(heap)
    while True:
        time_s = heap[0][0]
        following = []
        while heap and heap[0][0] == time_s:
            following.append(heapq.heappop(heap)[1])
        if sum(counts[kind] for kind in following) > left:
            return following
        for kind in following:
            shares[kind] += 1
            left -= counts[kind]
            heapq.heappush(heap, (kinds[kind].time_s(shares[kind] + 1), kind))


def _even_start(kinds: Sequence[Template], counts: Sequence[int], num_micro_batches: int) -> list[int]:
    """Shares that the best split cannot undercut: what fits in the time that all pipelines together
    need at full rate, and at least one each; so few are left to hand out.
    """
    rates = [1 / max(t.period_s, 1e-12) for t in kinds]
    num_members = sum(counts)
    head_start = sum(n * t.fill_s * rate for t, n, rate in zip(kinds, counts, rates, strict=True))
    all_rates = sum(n * rate for n, rate in zip(counts, rates, strict=True))
    time_s = (num_micro_batches - num_members + head_start) / all_rates
    shares = [
        max(1, int((time_s - t.fill_s) * rate) + 1) if time_s > t.fill_s else 1
        for t, rate in zip(kinds, rates, strict=True)
    ]
    taken = sum(share * count for share, count in zip(shares, counts, strict=True))
    return shares if taken <= num_micro_batches else [1] * len(kinds)
