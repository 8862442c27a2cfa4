"""Gradient sums that do not depend on the order or grouping of their terms.

A micro-batch's gradient ``g`` (float32) enters a sum as an integer, ``g * 2**exponent`` rounded. Sums are
kept in float64, where addition of integers is exact, and so associative, as long as no partial sum grows too
large; so any split of the work gives the same bits. One division at the end turns the sum into the mean.
Exponents are per key, training state, and follow the magnitude of the last committed sum. ``exact = false``
sums in float32 with the same interface. Owns no ledger: who is counted is the caller's.

Rounding costs nothing, the addition does it: a sum that gathers terms lies between 2**52 and 2**53 (``BASE``
is added to it), where float64 has no fractions. A tie would be rounded to the even *sum*, which depends on
the order; so the factor is a hair more than a power of two, and half an integer lies a hair beyond the tie: a
term is rounded to the nearest integer, half of one away from zero, whatever it is added to, and whether the
product with the factor is rounded to float64 before that (far below the hair) or not. (int64 would give more
bits at more than twice the time on a CPU, whose conversion from float32 is slow; docs/decisions.md.)

Three kinds have the same bits: ``Fused`` where there are kernels (``choice``), which round each term in a
register and need no ``BASE`` in memory; else, by torch's operations, ``Chunked`` on a CPU and ``Whole`` on a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oobleckd.worker.sums.arithmetic import (
    HEADROOM_BITS,
    START_EXPONENT,
    added,
    mean_grads,
    smaller_exponents,
    total,
)
from oobleckd.worker.sums.choice import kernels_of
from oobleckd.worker.sums.chunked import Chunked
from oobleckd.worker.sums.finish import BucketFigures, decode, finish, num_rows
from oobleckd.worker.sums.fused import Fused
from oobleckd.worker.sums.slices import KeyRange, Shard, Slicing, members, shards, slicing
from oobleckd.worker.sums.sum import NUM_MARKS, Sum
from oobleckd.worker.sums.whole import Whole

__all__ = [
    "HEADROOM_BITS",
    "NUM_MARKS",
    "START_EXPONENT",
    "BucketFigures",
    "Chunked",
    "Fused",
    "KeyRange",
    "Shard",
    "Slicing",
    "Sum",
    "Whole",
    "added",
    "decode",
    "empty",
    "finish",
    "mean_grads",
    "members",
    "num_rows",
    "shards",
    "slicing",
    "smaller_exponents",
    "total",
]


def empty(
    shapes: Sequence[tuple[int, ...]], exact: bool, device: torch.device, *, guarded: bool = False
) -> Sum:
    """A sum without terms: a key for each of ``shapes``, float64 if ``exact``, else float32, on ``device``.

    ``guarded``: memory that changes between two additions is found (``guard``).
    """
    kernels = kernels_of(device.type) if exact else None
    if kernels is not None:
        return Fused(shapes, device, kernels, guarded=guarded)
    kind = Chunked if device.type == "cpu" else Whole
    return kind(shapes, exact, device, guarded=guarded)
