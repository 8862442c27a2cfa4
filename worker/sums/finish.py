"""What follows from the total of slices of a bucket: mean gradients, and a few figures that the host needs.

``finish`` makes both where the total lies and waits for nothing. *Figures* of a slice, float64: of each of
its chunks (``slices``) the largest magnitude in the total (exact sums alone) and the sum of squares of the
mean gradient. Those of all buckets are one small vector, read once a step, since every read waits until a GPU
has done all that it was given; ``decode`` says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import added, largest, mean_grads, next_exponents, squares, total
from oobleckd.worker.sums.choice import kernels_of
from oobleckd.worker.sums.slices import Slicing, num_chunks


class BucketFigures(NamedTuple):
    """``nan`` and ``overflow``: as of ``Sum.flags``, and NaN also where a norm is not finite. ``changed``:
    memory of somebody's sums was not what was added up, so nothing may come of them. ``norms``: by key, the
    squared norm of the mean gradient; zeros where there is NaN or overflow. ``exponents``: by key, for the
    next step; where there is NaN or overflow those of this one.
    """

    nan: bool
    overflow: bool
    changed: bool
    norms: tuple[float, ...]
    exponents: tuple[int, ...]


def num_rows(*, exact: bool) -> int:
    """How many figures a chunk has."""
    return 2 if exact else 1


def finish(
    parts: Sequence[Sequence[Tensor]],
    exponents: Sequence[int],
    weight: float,
    into: Sequence[Tensor],
    chunk: int,
    *,
    exact: bool,
) -> Tensor:
    """Make the mean gradients of the total of ``parts``, one or more: each a tensor by range, float64
    integers scaled by ``2**exponent`` (exact) or float32. They stay as they are.

    ``weight``: how much the micro-batches in it count together. ``into``: by range, contiguous float32, the
    means. Returns their figures, float64 (``num_rows``, chunks), on the device of the total. Where a sum has
    NaN or an overflow (``Sum.marks``), neither means anything.
    """
    kernels = kernels_of(parts[0][0].device.type) if exact and parts[0] else None
    if kernels is not None:
        divisors = [math.ldexp(weight, exponent) for exponent in exponents]
        return torch.stack(kernels.finish(parts, divisors, into, chunk))
    whole = total(parts)
    means = mean_grads(whole, exponents, weight, exact, into)
    rows = [[square for mean in means for square in squares(mean, chunk)]]
    if exact:
        rows.insert(0, [each for tensor in whole for each in largest(tensor, chunk)])
    if not rows[0]:
        return torch.empty((len(rows), 0), dtype=torch.float64)
    return torch.stack([torch.stack(row) for row in rows])


def decode(
    marks: Sequence[float],
    figures: Sequence[float],
    slicing: Slicing,
    exponents: Sequence[int],
    num_contributions: int,
    *,
    exact: bool,
) -> BucketFigures:
    """What the ``marks`` of a bucket's sums and the ``figures`` of all its chunks mean, row by row, once they
    are numbers of the host.

    ``exponents``: with which the total was made, by key; ``num_contributions``: terms over all devices of the
    sums that the next exponents are for.
    """
    nan, overflow, changed = (mark != 0.0 for mark in marks)
    counts = [num_chunks(size, slicing.chunk) for size in slicing.sizes]
    rest = iter(figures)
    magnitudes = [max(islice(rest, count)) for count in counts] if exact else []
    norms = tuple(added(islice(rest, count)) for count in counts)
    assert next(rest, None) is None, "figures are of keys of other shapes"
    if not (nan or overflow):
        nan = not all(map(math.isfinite, norms))  # what was not finite in a term is so in a float sum
    if nan or overflow:
        return BucketFigures(nan, overflow, changed, (0.0,) * len(norms), tuple(exponents))
    following = next_exponents(magnitudes, exponents, num_contributions) if exact else tuple(exponents)
    return BucketFigures(nan, overflow, changed, norms, following)
