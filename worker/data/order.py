"""The order in which rows are read: sample n of a job is a row of a source, a function of seed and n.

Every pass over a source visits all its rows in an order of its own, a seeded permutation that is computed and
never stored (a Feistel network with cycle walking, Black and Rogaway 2002), so no row is read twice within a
pass. Which source of several a sample is of ``oobleckd.tokens.mixture`` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oobleckd.tokens.mixture import Mixture

_NUM_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1
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


@dataclass(slots=True)
class Permutation:
    """A seeded permutation of ``range(size)``: call it with a position.

    A Feistel network permutes the smallest power of four that is not below ``size``; positions that fall
    outside are sent through again until they fall inside, fewer than four times on average.
    """

    size: int
    keys: tuple[int, ...]
    half_bits: int

    def __init__(self, size: int, seed: str) -> None:
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(f"order:{seed}".encode(), digest_size=8 * _NUM_FEISTEL_ROUNDS).digest()
        self.keys = tuple(int.from_bytes(digest[i : i + 8], "big") for i in range(0, len(digest), 8))

    def __call__(self, position: int) -> int:
        """Where ``position`` goes."""
        position = self._network(position)
        while position >= self.size:
            position = self._network(position)
        return position

    def _network(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self.half_bits | right


def _mix(value: int) -> int:
    """A well-mixed 64-bit hash (the finalizer of splitmix64, Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
