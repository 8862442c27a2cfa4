"""The ledger of a round on one device: which weight gradients it owes, and which are in its sums.

Owns the exactly-once rule on this side: a (layer, micro-batch) is counted once, and only where it is owed.
That the ledgers of all holders make up a step is ``exchange``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """``owed``: layer -> micro-batches whose weight gradients this device has to add, or has added. ``done``:
    layer -> those that are in its sums. ``completions``: how often a layer may have become complete.
    """

    owed: dict[int, set[int]] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)
    completions: int = 0

    @classmethod
    def of(cls, layers: Iterable[int]) -> Ledger:
        """An empty one for the ``layers`` held."""
        ledger = cls()
        for layer in layers:
            ledger.owed[layer], ledger.done[layer] = set(), set()
        return ledger

    def owe(self, layer: int, micro_batch: int) -> None:
        """A route asks for it."""
        self.owed[layer].add(micro_batch)

    def missing(self, micro_batches: Collection[int]) -> set[tuple[int, int]]:
        """Of ``micro_batches`` what is owed and not in the sums: (layer, micro-batch)."""
        wanted = set(micro_batches)
        return {(layer, mb) for layer, owed in self.owed.items() for mb in (owed & wanted) - self.done[layer]}

    def excuse(self, micro_batches: Collection[int]) -> None:
        """``micro_batches`` are not owed any more, but for what is in the sums and stays there."""
        for layer, done in self.done.items():
            self.owed[layer] -= set(micro_batches) - done
        self.completions += 1

    def forget(self) -> None:
        """Nothing is owed, and what was added counts for nothing."""
        for layer in self.owed:
            self.owed[layer], self.done[layer] = set(), set()
        self.completions += 1

    def count(self, layer: int, micro_batch: int) -> None:
        """Note that the weight gradients of (micro-batch, layer) went into the sums; asserts that it is
        exactly once.
        """
        assert micro_batch not in self.done[layer], (
            f"layer {layer} of micro-batch {micro_batch} counted twice"
        )
        assert micro_batch in self.owed[layer], f"layer {layer} of micro-batch {micro_batch} was not owed"
        self.done[layer].add(micro_batch)
        self.completions += self.complete(layer)

    def inherit(self, layer: int, micro_batch: int) -> None:
        """Count what a dead device had counted, which is in this one's sums now."""
        self.owed[layer].add(micro_batch)
        self.count(layer, micro_batch)

    def complete(self, layer: int) -> bool:
        """Whether everything that this device owes to ``layer`` is in its sums."""
        return self.owed[layer] <= self.done[layer]

    def counted(self, layers: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Layer -> micro-batches in the sums, ascending."""
        return {layer: tuple(sorted(self.done[layer])) for layer in layers}

    @property
    def totals(self) -> tuple[int, int]:
        """How many (layer, micro-batch) are done, and how many owed."""
        return sum(map(len, self.done.values())), sum(map(len, self.owed.values()))
