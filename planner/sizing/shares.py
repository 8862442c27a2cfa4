"""Which micro-batches of a step each pipeline has, of so many as its share is: a block, or every so manieth.

Owns both ways. Blocks are as they have always been, and floats are added up in their order. Dealt out, the
first micro-batches of a step are shared as all of them are, so that a step of fewer is as fast as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def blocks_of(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Contiguous blocks, one behind the other."""
    found, first = [], 0
    for share in shares:
        found.append(tuple(range(first, first + share)))
        first += share
    return tuple(found)


def dealt_out(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """In turn, and in proportion: of the first k of m micro-batches a pipeline has about its share times
    k / m.
    """
    # As seats are given out by Sainte-Lague (1910): turn t of a share s comes at (2 t + 1) / (2 s) of the
    # way, in whole numbers.
    whole = math.lcm(*(share for share in shares if share))
    turns = sorted(
        ((2 * turn + 1) * (whole // share), pipeline)
        for pipeline, share in enumerate(shares)
        for turn in range(share)
    )
    found: list[list[int]] = [[] for _ in shares]
    for micro_batch, (_, pipeline) in enumerate(turns):
        found[pipeline].append(micro_batch)
    return tuple(map(tuple, found))
