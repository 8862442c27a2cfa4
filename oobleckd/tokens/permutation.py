"""A seeded permutation that is computed and never stored: a Feistel network with cycle walking (Black and
Rogaway 2002). Of one position at a time, or of many at once, with the same result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_NUM_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1
Positions = npt.NDArray[np.uint64]
_Value = TypeVar("_Value", int, npt.NDArray[Any])


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

    def many(self, positions: Positions) -> Positions:
        """Where each of ``positions`` goes."""
        found = self._network(positions)
        while (outside := found >= self.size).any():
            found[outside] = self._network(found[outside])
        return found

    def _network(self, value: _Value) -> _Value:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        found: _Value = left << self.half_bits | right
        return found


def mix(value: _Value) -> _Value:
    """A well-mixed 64-bit hash (the finalizer of splitmix64, Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    found: _Value = value ^ (value >> 31)
    return found
