"""The kinds of numbers that tokens are stored in: by name, and by Megatron's code.

Owns both tables and the choice of the smallest. All are little-endian. Megatron has no uint32: what is beyond
uint16 is int32 with it, and so with us.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DType = np.dtype[Any]

NAMED: dict[str, DType] = {
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
    "int64": np.dtype("<i8"),
}
"""What ``data.dtype`` may name."""
CODES: dict[int, DType] = {
    code: np.dtype(kind)
    for code, kind in {
        1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2",
    }.items()
}  # fmt: skip
"""Megatron's, as its index has them."""
# Its index has no code for uint32, so nobody else could read what we would prepare as that. (D-data-012)
_LARGE = 65_500
"""From so many tokens on Megatron writes int32."""


def code_of(kind: DType) -> int:
    """Megatron's code of ``kind``. Raises ValueError where there is none."""
    for code, known in CODES.items():
        if known == kind:
            return code
    raise ValueError(f"an index has no code for {kind.name}")


def smallest(vocabulary: int) -> DType:
    """What holds the numbers of ``vocabulary`` tokens, as Megatron chooses it."""
    return NAMED["uint16"] if vocabulary < _LARGE else NAMED["int32"]
