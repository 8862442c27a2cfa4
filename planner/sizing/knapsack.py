"""The most micro-batches that pipelines take whose sizes sum up to a number of nodes.

Owns the two exact answers: with at least so many pipelines (``Knapsack``), and with exactly so many
(``most_of``), which does not grow with the number of nodes. Knows sizes and what each takes, no times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Counts = NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).min // 4)


@dataclass(slots=True)
class Knapsack:
    """The most micro-batches over multisets of sizes with sum ``total`` and r to ``max_members`` members.

    ``caps[k]``: what a member of size ``n0 + k`` takes (NEVER: may not be used). A table over (members,
    nodes); the row of members is exact where ``max_members`` binds and else capped at r. Where neither
    binds, all but a few members are of the densest size (exchange argument: among as many others as
    its size, some sum up to a multiple of it), so the table does not grow with ``total``.
    """

    n0: int
    caps: Counts
    total: int
    r: int
    max_members: int
    filler: int = field(init=False, default=0)
    absorbs: bool = field(init=False)
    table: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.absorbs = self.max_members >= self.total // self.n0
        rows = self.r if self.absorbs else self.max_members
        if self.absorbs and self.total > (self.r - 1) * self._largest:
            self._reduce()
            rows = 0
        self.table = np.full((rows + 1, self.total + 1), NEVER, dtype=np.int64)
        self.table[0, 0] = 0
        if self.absorbs:
            self._fill_by_size()
        else:
            self._fill_by_members()
        np.copyto(self.table, NEVER, where=self.table < NEVER // 2)

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

    def _fill_by_size(self) -> None:
        """Row c: c members (the last row: c or more). Size by size, each as often as it helps."""
        for size, cap in enumerate(self.caps.tolist(), self.n0):
            if cap == NEVER or size > self.total:
                continue
            for row, following in zip(self.table, self.table[1:], strict=False):
                np.maximum(following[size:], row[:-size] + cap, out=following[size:])
            if self.table[-1, size] <= cap or len(self.table) > 1:  # else smaller ones do better together
                _repeat(self.table[-1], size, cap)

    def _fill_by_members(self) -> None:
        """Row c: c members. Row by row, all sizes at once."""
        before = np.full(self._largest, NEVER, dtype=np.int64)
        caps = self.caps[::-1]
        for row, following in zip(self.table, self.table[1:], strict=False):
            window = sliding_window_view(np.concatenate([before, row]), len(caps))[: self.total + 1]
            np.maximum((window + caps).max(axis=1), NEVER, out=following)

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


def _repeat(row: Counts, size: int, cap: int) -> None:
    """Give ``row`` any number of further members of ``size``, in place."""
    height = -(-len(row) // size)
    padded = np.full(height * size, NEVER, dtype=np.int64)
    padded[: len(row)] = row
    taken = cap * np.arange(height)[:, None]
    folded = np.maximum.accumulate(padded.reshape(height, size) - taken, axis=0) + taken
    row[:] = folded.ravel()[: len(row)]
