"""Computes totals, means, norms and the next exponents from sums, key by key, on a CPU and on a GPU.

A *key* is one parameter tensor of a bucket. Its sum has the parameter's shape, and holds integers in float64
(exact) or float32. Owns no memory: how terms are gathered is ``chunked``'s and ``whole``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# float64 and not int64, which has no quick conversion from float32 on a CPU: 0.7-0.8 ns a number and not
# 1.5-1.6. The range is twelve bits less, and still resolves 2**-38 of the largest gradient.
# (D-exactness-002)
SUM_BITS = 51
"""Sums stay below ``2**SUM_BITS``: what fits on both sides of ``BASE``."""

START_EXPONENT = 34
"""Exponent of a fresh key: gradients below 2**17 / contributions fit, and 2**-35 is the rounding error."""

HEADROOM_BITS = 5
"""How much gradients may grow from one step to the next before they overflow, as a power of two."""

TERM_BITS = 48
"""Terms stay below ``2**TERM_BITS``, so that what ``NO_TIES`` adds to one is less than a quarter."""

# Between 2**52 and 2**53 float64 has no fractions, so the addition rounds: multiply, round and add are one
# pass. A tie would go to the even sum and depend on the order; 1 + 2**-50 leaves none. (D-exactness-003)
BASE = 1.5 * 2.0**52
NO_TIES = 1.0 + 2.0**-50

_MAX_RISE = 8
_LARGEST_EXPONENT = 120
_CPU_CHUNK = 1 << 16
_GPU_CHUNK = 1 << 24
_CPU_SQUARES = 1 << 15
_GPU_SQUARES = 1 << 20


def limit_of(num_contributions: int) -> float:
    """What the magnitude of a term must stay below, as an integer, where so many are added up."""
    return min(2.0**SUM_BITS / num_contributions, 2.0**TERM_BITS)


def total(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Sum of one or more parts by key, in the given order (which matters to float32 alone).

    Every part has a tensor for each key, of the same shapes and dtype; so has the result, out of place where
    there are two parts or more.
    """
    if len(parts) == 1:
        return list(parts[0])
    sums = [torch.add(first, second) for first, second in zip(parts[0], parts[1], strict=True)]
    for part in parts[2:]:
        for into, tensor in zip(sums, part, strict=True):
            into.add_(tensor)
    return sums


def mean_grads(
    sums: Sequence[Tensor],
    exponents: Sequence[int],
    weight: float,
    exact: bool,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The step's mean gradient by key: one division, in float64 if exact.

    ``sums``: by key, float64 integers scaled by ``2**exponent`` (exact) or float32; ``weight``: how much the
    micro-batches in them count together. The result has their shapes and is always float32, rounded once; it
    is in the contiguous tensors ``into``, where they are given.
    """
    means = list(into) if into is not None else [_float32_like(tensor) for tensor in sums]
    for tensor, exponent, mean in zip(sums, exponents, means, strict=True):
        if not exact:
            torch.div(tensor, weight, out=mean)
            continue
        divisor = math.ldexp(weight, exponent)
        chunk = chunk_of(tensor.device)
        for part, piece in zip(
            pieces_of(tensor.view(-1), chunk), pieces_of(mean.view(-1), chunk), strict=True
        ):
            piece.copy_(part.div(divisor))
    return means


def _float32_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)


def squares(grad: Tensor, chunk: int) -> list[Tensor]:
    """The sum of squares of each ``chunk`` of ``grad`` (float32, any shape), float64 scalars where it lies.

    Chunks are of a fixed size, so threads leave no trace.
    """
    return [part.to(torch.float64).square_().sum() for part in pieces_of(grad.reshape(-1), chunk)]


def added(values: Iterable[float]) -> float:
    """The sum of float64 ``values``, rounded once: the same in any order, and with any Python."""
    # Python's sum adds floats otherwise from 3.12 on: two nodes, or a cluster and a single process, could
    # have had different last bits. (D-exactness-010)
    values = tuple(values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def largest(tensor: Tensor, chunk: int) -> list[Tensor]:
    """The largest magnitude in each ``chunk`` of ``tensor`` (of any shape), 0 where that is empty, as float64
    scalars where it lies.
    """
    pieces = pieces_of(tensor.reshape(-1), chunk)
    if not tensor.numel():
        return [tensor.new_zeros((), dtype=torch.float64)]
    if tensor.device.type != "cpu":
        norms = torch._foreach_norm(list(pieces), math.inf)  # noqa: SLF001 - torch's only norm of a list
        return [norm.to(torch.float64) for norm in norms]
    found = [torch.aminmax(piece) for piece in pieces]
    return [torch.maximum(low.neg(), high).to(torch.float64) for low, high in found]


def next_exponents(
    magnitudes: Sequence[float], exponents: Sequence[int], num_contributions: int
) -> tuple[int, ...]:
    """Exponents for the next step, from the largest magnitude of every reduced sum of this one.

    ``magnitudes``: by key, integers; ``exponents``: those with which the sums were made. Even a contribution
    as large as the whole sum then keeps ``HEADROOM_BITS`` below the overflow test. An exponent rises by at
    most 8 a step, since gradients that vanish for one step come back, and a key of zeros keeps its own.
    """
    # All experts of a fused tensor together: one alone grows beyond the headroom in every few steps, the
    # largest of them never did. (D-routers-003)
    wanted = min(SUM_BITS - (num_contributions - 1).bit_length(), TERM_BITS) - HEADROOM_BITS
    following = []
    for magnitude, exponent in zip(magnitudes, exponents, strict=True):
        bits = int(magnitude).bit_length()
        change = min(wanted - bits, _MAX_RISE) if bits else 0
        following.append(max(-_LARGEST_EXPONENT, min(exponent + change, _LARGEST_EXPONENT)))
    return tuple(following)


def smaller_exponents(exponents: Sequence[int]) -> tuple[int, ...]:
    """Exponents for the same step again, after an overflow in these keys."""
    return tuple(max(-_LARGEST_EXPONENT, exponent - HEADROOM_BITS) for exponent in exponents)


def cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of the one-dimensional ``flat`` in ``shapes``, one behind the other; together they cover it."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def chunk_of(device: torch.device) -> int:
    """How many numbers are worked on at once on ``device``: on a CPU as many as stay in its cache."""
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def pieces_of(flat: Tensor, chunk: int) -> Sequence[Tensor]:
    """``flat`` in pieces of at most ``chunk`` numbers."""
    return torch.split(flat, chunk) if flat.numel() > chunk else (flat,)


def square_chunk(device: torch.device) -> int:
    """How many squares are added up to one number on ``device``, at most."""
    # Chunks this small are summed by one thread, whatever the number of threads. On a GPU each is a launch
    # or two and a number to be read; a slice of a bucket consists of whole ones. (D-exactness-022)
    return _CPU_SQUARES if device.type == "cpu" else _GPU_SQUARES
