"""What follows from the total of a bucket: mean gradients, and a few figures that the host needs of it.

``finish`` makes both where the total lies and waits for nothing. The figures of all buckets are one small
vector, read once a step, since every read waits until a GPU has done all that it was given; ``decode`` says
what they mean. BucketFigures of a bucket, float64, one behind the other: the ``NUM_MARKS`` marks of its sums
(``Sum.marks``); of each key the largest magnitude in the total (exact sums alone); of each key the sums of
squares of its mean gradient, a number for each of ``num_squares`` chunks of a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import (
    added,
    largest,
    mean_grads,
    next_exponents,
    num_squares,
    squares,
    total,
)
from oobleckd.worker.sums.choice import kernels_of
from oobleckd.worker.sums.sum import NUM_MARKS


class Finished(NamedTuple):
    """``grads``: by key, mean gradients, float32, in the shapes of the total. ``figures``: one-dimensional,
    float64. Both on the device of the total.
    """

    grads: list[Tensor]
    figures: Tensor


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


def finish(
    parts: Sequence[Sequence[Tensor]],
    marks: Tensor,
    exponents: Sequence[int],
    weight: float,
    *,
    exact: bool,
) -> Finished:
    """What follows from the total of ``parts``, one or more: each by key float64 integers scaled by
    ``2**exponent`` (exact) or float32. They stay as they are.

    ``marks``: float64 (``NUM_MARKS``,) on its device, of all sums in it together. ``weight``: how much the
    micro-batches in it count together. Where the marks say NaN or overflow, gradients mean nothing.
    """
    kernels = kernels_of(parts[0][0].device.type) if exact and parts[0] else None
    if kernels is not None:
        divisors = [math.ldexp(weight, exponent) for exponent in exponents]
        means = kernels.finish(parts, divisors)
        return Finished(means.grads, torch.cat((marks, means.largest, means.squares)))
    whole = total(parts)
    grads = mean_grads(whole, exponents, weight, exact)
    figures = [marks]
    if exact and grads:
        figures.append(largest(whole))
    if by_chunk := [square for grad in grads for square in squares(grad)]:
        figures.append(torch.stack(by_chunk))
    return Finished(grads, torch.cat(figures))


def num_figures(shapes: Sequence[tuple[int, ...]], device: torch.device, *, exact: bool) -> int:
    """How many figures a bucket with keys of these ``shapes`` has on ``device``."""
    chunks = sum(num_squares(math.prod(shape), device) for shape in shapes)
    return NUM_MARKS + len(shapes) * exact + chunks


def decode(
    figures: Sequence[float],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    exponents: Sequence[int],
    num_contributions: int,
    *,
    exact: bool,
) -> BucketFigures:
    """What the ``figures`` of a bucket mean, once they are numbers of the host.

    ``shapes``: of its keys; ``device``: where the total was; ``exponents``: with which it was made;
    ``num_contributions``: terms over all devices of the sums that the next exponents are for.
    """
    nan, overflow, changed = (mark != 0.0 for mark in figures[:NUM_MARKS])
    rest = iter(figures[NUM_MARKS:])
    magnitudes = [next(rest) for _ in shapes] if exact else []
    counts = [num_squares(math.prod(shape), device) for shape in shapes]
    norms = tuple(added(next(rest) for _ in range(count)) for count in counts)
    assert next(rest, None) is None, "figures are of keys of other shapes"
    if not (nan or overflow):
        nan = not all(map(math.isfinite, norms))  # what was not finite in a term is so in a float sum
    if nan or overflow:
        return BucketFigures(nan, overflow, changed, (0.0,) * len(norms), tuple(exponents))
    following = next_exponents(magnitudes, exponents, num_contributions) if exact else tuple(exponents)
    return BucketFigures(nan, overflow, changed, norms, following)
