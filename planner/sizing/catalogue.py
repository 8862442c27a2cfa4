"""Sizes and shares for every number of nodes that a job may be left with, computed ahead.

Owns what is looked up at a failure, in microseconds and without planning. Knows no node names: placement,
copies and routes depend on who died and are computed then. Good for the templates, f and micro-batches
that it was made for; others need another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from oobleckd.planner.costs.model import Floats
from oobleckd.planner.plan import Template
from oobleckd.planner.sizing.instantiate import Instantiation, instantiate


class CatalogueEntry(msgspec.Struct, frozen=True):
    """An instantiation on ``num_nodes`` nodes; ``runs``: (size, share, how many pipelines), in order."""

    num_nodes: int
    runs: tuple[tuple[int, int, int], ...]
    idle: int
    step_s: float

    def expand(self) -> Instantiation:
        """The instantiation, pipeline by pipeline."""
        sizes: tuple[int, ...] = ()
        shares: tuple[int, ...] = ()
        for size, share, count in self.runs:
            sizes += (size,) * count
            shares += (share,) * count
        return Instantiation(sizes, shares, self.idle, self.step_s)


def entries(
    templates: Sequence[Template],
    numbers: Iterable[int],
    f: int,
    num_micro_batches: int,
    reduce_s: Sequence[float] | Floats | None = None,
) -> tuple[CatalogueEntry, ...]:
    """An entry for each of ``numbers`` of nodes, as ``instantiate`` finds them. Raises PlanError below n0."""
    made = []
    for num_nodes in numbers:
        found = instantiate(templates, num_nodes, f, num_micro_batches, reduce_s)
        pairs = zip(found.sizes, found.shares, strict=True)
        runs = tuple((*pair, sum(1 for _ in group)) for pair, group in groupby(pairs))
        made.append(CatalogueEntry(num_nodes, runs, found.idle, found.step_s))
    return tuple(made)


@dataclass(slots=True)
class Catalogue:
    """Entries by number of nodes, from ``n0`` up to what has been asked for."""

    n0: int
    by_nodes: dict[int, CatalogueEntry] = field(default_factory=dict)

    def look_up(self, num_nodes: int) -> Instantiation | None:
        """The instantiation on ``num_nodes`` nodes; None where it has not been computed."""
        entry = self.by_nodes.get(num_nodes)
        return entry.expand() if entry else None

    def add(self, made: Iterable[CatalogueEntry]) -> None:
        """Take entries in."""
        self.by_nodes.update((entry.num_nodes, entry) for entry in made)

    def missing(self, num_nodes: int) -> list[int]:
        """Numbers of nodes from ``num_nodes`` down to n0 that have no entry: the next loss comes first."""
        return [number for number in range(num_nodes, self.n0 - 1, -1) if number not in self.by_nodes]
