"""Which templates run on N nodes, and how many micro-batches each pipeline computes.

Owns sizes and shares; knows no node names (``transfer`` places sizes on nodes). Exact: no other
multiset of sizes with as many pipelines as promised has a faster slowest pipeline.

Within time T a pipeline of template k takes ``caps[k] = floor((T - fill) / period) + 1``
micro-batches, so the best T is the smallest one with which the sizes that sum up to N reach M.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.guarantee import most_pipelines, most_usable
from planner.plan import Template
from planner.policy import PlanError

Counts = NDArray[np.int64]
NEVER = np.iinfo(np.int64).min // 4
LARGEST_TABLE = 2**18  # entries; beyond it pipelines without micro-batches are allowed
ROUNDING = 1e-9  # T = fill + x * period must count x + 1 micro-batches after rounding


class Instantiation(msgspec.Struct, frozen=True):
    """Pipelines by size, ascending, each with its share of the micro-batches.

    ``idle``: nodes without a place, not 0 only where the sizes cannot sum up to all nodes.
    ``step_s``: modelled time of the slowest pipeline in seconds.
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
    templates: Sequence[Template], num_nodes: int, f: int, num_micro_batches: int
) -> Instantiation:
    """The fastest pipelines on ``num_nodes`` nodes: at least f + 1 where n0 allows, else as many as
    it allows; all nodes used wherever sizes sum up to them.

    Sizes of ``templates`` are consecutive. Every pipeline gets a micro-batch where there are enough
    for the fewest pipelines possible. Raises PlanError below n0 nodes.
    """
    by_size = {template.num_nodes: template for template in templates}
    n0, largest = min(by_size), max(by_size)
    if num_nodes < n0:
        raise too_few(num_nodes, n0)
    used = most_usable(num_nodes, n0, largest)
    sizes = _best_sizes(by_size, used, most_pipelines(num_nodes, n0, f), num_micro_batches)
    members = [by_size[size] for size in sizes]
    shares = split_micro_batches(members, num_micro_batches)
    return Instantiation(tuple(sizes), shares, num_nodes - used, slowest_s(members, shares))


def too_few(num_nodes: int, n0: int) -> PlanError:
    """The error for fewer nodes than one pipeline needs."""
    return PlanError(
        f"{num_nodes} usable nodes, and the model needs {n0}",
        f"add {n0 - num_nodes} or more nodes, or raise resources.device_memory",
    )


def slowest_s(members: Sequence[Template], shares: Sequence[int]) -> float:
    """Modelled time of a step in seconds: that of the slowest pipeline."""
    return max(t.time_s(share) for t, share in zip(members, shares, strict=True))


def split_micro_batches(members: Sequence[Template], num_micro_batches: int) -> tuple[int, ...]:
    """Shares of the pipelines ``members`` with the least slowest pipeline; at least one each where
    there are enough. Equal pipelines share evenly, the earlier ones take what is left over.
    """
    num_members = len(members)
    shares = (
        _even_start(members, num_micro_batches) if num_micro_batches >= num_members else [0] * num_members
    )
    heap = [(members[p].time_s(shares[p] + 1), p) for p in range(num_members)]
    heapq.heapify(heap)
    for _ in range(num_micro_batches - sum(shares)):
        _, p = heap[0]
        shares[p] += 1
        heapq.heapreplace(heap, (members[p].time_s(shares[p] + 1), p))
    return tuple(shares)


def _even_start(members: Sequence[Template], num_micro_batches: int) -> list[int]:
    """Shares that the best split cannot undercut: what fits in the time that all pipelines together
    need at full rate, and at least one each; so few are left to hand out one by one.
    """
    rates = [1 / max(t.period_s, 1e-12) for t in members]
    head_start = sum(t.fill_s * rate for t, rate in zip(members, rates, strict=True))
    time_s = (num_micro_batches - len(members) + head_start) / sum(rates)
    shares = [
        max(1, int((time_s - t.fill_s) * rate) + 1) if time_s > t.fill_s else 1
        for t, rate in zip(members, rates, strict=True)
    ]
    return shares if sum(shares) <= num_micro_batches else [1] * len(members)


def _best_sizes(by_size: dict[int, Template], used: int, r: int, num_micro_batches: int) -> list[int]:
    """Sizes with sum ``used``, ascending, at least ``r`` of them, with the least slowest pipeline.

    Bisection over the times that a pipeline can take. First with a micro-batch for every pipeline;
    where that cannot be, pipelines that only hold copies are allowed.
    """
    fewest = max(r, -(-used // max(by_size)))
    busy = fewest <= num_micro_batches and (
        used // min(by_size) <= num_micro_batches or used * num_micro_batches <= LARGEST_TABLE
    )
    fills = np.array([by_size[size].fill_s for size in sorted(by_size)])
    periods = np.array([max(by_size[size].period_s, 1e-12) for size in sorted(by_size)])
    times = np.unique((fills[:, None] + np.arange(num_micro_batches) * periods[:, None]).ravel())
    low, high = 0, len(times) - 1
    best: list[int] = []
    while low <= high:
        middle = (low + high) // 2
        caps = np.floor((times[middle] - fills) / periods + ROUNDING).astype(np.int64) + 1
        caps = np.where(caps > 0, np.minimum(caps, num_micro_batches), NEVER if busy else 0)
        knapsack = _Knapsack(min(by_size), caps, used, r, num_micro_batches if busy else used)
        if knapsack.most() >= num_micro_batches:
            best, high = knapsack.sizes(), middle - 1
        else:
            low = middle + 1
    assert best, "the slowest time of all admits every multiset of sizes"
    return best


@dataclass(slots=True)
class _Knapsack:
    """The most micro-batches over multisets of sizes with sum ``total`` and r to ``at_most`` members.

    ``caps[k]``: what a member of size ``n0 + k`` takes (NEVER: may not be used). A table over (members,
    nodes); the row of members is exact where ``at_most`` binds and else capped at r. Where neither
    binds, all but a few members are of the densest size (exchange argument: among as many others as
    its size, some sum up to a multiple of it), so the table does not grow with ``total``.
    """

    n0: int
    caps: Counts
    total: int
    r: int
    at_most: int
    filler: int = field(init=False, default=0)
    absorbs: bool = field(init=False)
    table: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.absorbs = self.at_most >= self.total // self.n0
        rows = self.r if self.absorbs else self.at_most
        if self.absorbs and self.total > (self.r - 1) * self._largest:
            self._reduce()
            rows = 0
        self._fill(rows)

    @property
    def _largest(self) -> int:
        return self.n0 + len(self.caps) - 1

    def most(self) -> int:
        """Most micro-batches; negative when no such multiset exists."""
        if self.filler and self._cap_of(self._densest()) == NEVER:
            return NEVER
        return int(self._final().max()) + self.filler * self._cap_of(self._densest())

    def sizes(self) -> list[int]:
        """A multiset that takes ``most``, ascending; on ties the smaller size (more copies)."""
        row = len(self.table) - 1 - int(self._final()[::-1].argmax())
        nodes = self.table.shape[1] - 1
        found = [self._densest()] * self.filler
        while nodes:
            size, row = self._step(row, nodes)
            found.append(size)
            nodes -= size
        return sorted(found)

    def _densest(self) -> int:
        sizes = np.arange(self.n0, self._largest + 1)
        return int(sizes[np.argmax(self.caps / sizes)])

    def _cap_of(self, size: int) -> int:
        return int(self.caps[size - self.n0])

    def _reduce(self) -> None:
        """Put aside members of the densest size that some best multiset has for sure."""
        densest = self._densest()
        self.filler = max(0, (self.total - (densest - 1) * self._largest) // densest)
        self.total -= self.filler * densest

    def _final(self) -> Counts:
        """The last column's admissible rows: those with at least r members (others NEVER)."""
        column = self.table[:, -1].copy()
        if len(column) > 1:
            column[: self.r] = NEVER
        return column

    def _fill(self, rows: int) -> None:
        """Row c of the table: c members (the last row: c or more, where it absorbs)."""
        self.table = np.full((rows + 1, self.total + 1), NEVER, dtype=np.int64)
        self.table[0, 0] = 0
        for nodes in range(self.n0, self.total + 1):
            window = self.table[:, max(0, nodes - self._largest) : nodes - self.n0 + 1]
            gains = (window + self.caps[: window.shape[1]][::-1]).max(axis=1)
            gains = np.maximum(gains, NEVER)  # two NEVERs stay one
            if rows:
                self.table[1:, nodes] = gains[:-1]
            if self.absorbs:
                self.table[-1, nodes] = max(self.table[-1, nodes], gains[-1])

    def _step(self, row: int, nodes: int) -> tuple[int, int]:
        """(size of a member, row before it) that leads to entry (row, nodes)."""
        before = [row - 1] if row else []
        if self.absorbs and row == len(self.table) - 1:
            before = [row, *before]
        for size in range(self.n0, min(self._largest, nodes) + 1):
            for earlier in before:
                value = self.table[earlier, nodes - size] + self.caps[size - self.n0]
                if value == self.table[row, nodes] and self.table[earlier, nodes - size] > NEVER // 2:
                    return size, earlier
        raise AssertionError("every reached entry has a predecessor")
