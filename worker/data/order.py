"""The order in which rows are read: sample n of a job is a row of a source, a function of seed and n.

Every pass over a source visits all its rows in an order of its own, a seeded permutation that is computed and
never stored, so no row is read twice within a pass. Which source of several a sample is of
``oobleckd.tokens.mixture`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oobleckd.tokens.mixture import Mixture
from oobleckd.tokens.permutation import Permutation

_SOURCE_BIT = 48
"""Of a sample's number: the source stands above it."""


class Place(NamedTuple):
    """Where a sample lies: its source, which pass over that, and its row."""

    source: int
    epoch: int
    row: int


class SampleOrder:
    """``rows``: of each source how many; ``names``: theirs, with ``mixture`` (None: there is one source)."""

    def __init__(
        self, seed: int, rows: Sequence[int], names: Sequence[str] = (), mixture: Mixture | None = None
    ) -> None:
        self._rows, self._mixture = tuple(rows), mixture
        # By its name, so that a source more, or less, leaves the order of all others. (D-data-016)
        self._seeds = [f"{seed}:{name}" for name in names] or [f"{seed}"]
        self._passes: dict[int, tuple[int, Permutation]] = {}

    def __call__(self, ordinal: int) -> int:
        """The number of a sample: pass * rows + row, and of several sources the source above; so it comes
        once in a whole run.
        """
        source, number = self._mixture(ordinal) if self._mixture is not None else (0, ordinal)
        rows = self._rows[source]
        epoch, position = divmod(number, rows)
        known = self._passes.get(source)
        if known is None or known[0] != epoch:
            known = self._passes[source] = epoch, Permutation(rows, f"{self._seeds[source]}:{epoch}")
        return (source << _SOURCE_BIT) + epoch * rows + known[1](position)

    def place(self, sample: int) -> Place:
        """Where the sample of that number lies."""
        source = sample >> _SOURCE_BIT if self._mixture is not None else 0
        return Place(source, *divmod(sample - (source << _SOURCE_BIT), self._rows[source]))
