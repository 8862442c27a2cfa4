"""Gradient sums that do not depend on the order or grouping of their terms.

A micro-batch's gradient ``g`` (float32) enters a sum as an integer, ``g * 2**exponent`` rounded. Sums are kept
in float64, where addition of integers is exact, and so associative, as long as no partial sum grows too
large; so any split of the work gives the same bits. One division at the end turns the sum into the mean.
Exponents are per key, training state, and follow the magnitude of the last committed sum. ``exact = false``
sums in float32 with the same interface. Owns no ledger: who is counted is the caller's.

Rounding costs nothing, the addition does it: a sum that gathers terms lies between 2**52 and 2**53 (``_BASE`` is
added to it), where float64 has no fractions. A tie would be rounded to the even *sum*, which depends on the
order; so the factor is a hair more than a power of two, and half an integer lies a hair beyond the tie: a
term is rounded to the nearest integer, half of one away from zero, whatever it is added to, and whether the product with the
factor is rounded to float64 before that (far below the hair) or not. (int64
would give more bits at more than twice the time on a CPU, whose conversion from float32 is slow;
docs/decisions.md.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.guard import Guard

SUM_BITS = 51
"""Sums stay below ``2**SUM_BITS``: what fits on both sides of ``_BASE``."""

START_EXPONENT = 34
"""Exponent of a fresh key: gradients below 2**17 / contributions fit, and 2**-35 is the rounding error."""

HEADROOM_BITS = 5
"""How much gradients may grow from one step to the next before they overflow, as a power of two."""

_BASE = 1.5 * 2.0**52
_NO_TIES = 1.0 + 2.0**-50
_TERM_BITS = 48
"""Terms stay below ``2**_TERM_BITS``, so that what ``_NO_TIES`` adds to one is less than a quarter."""

_MAX_RISE = 8
_LARGEST_EXPONENT = 120
_SMALL = 1 << 14
"""Keys of at most so many numbers are added in one go: every call for a key of its own would take longer than its numbers."""
_CPU_CHUNK = 1 << 16
_GPU_CHUNK = 1 << 24


class Sum:
    """The sum of one use of one bucket on one device, by key: float64 integers (exact) or float32.

    Lies in regions: the first holds all small keys, one behind the other, each other one a large key (``_large``). ``guarded``: what
    changes in its memory besides additions is found when the sums are taken.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        exact: bool,
        device: torch.device,
        *,
        guarded: bool = False,
    ) -> None:
        self.exact = exact
        sizes = [math.prod(shape) for shape in shapes]
        self._small = [key for key, size in enumerate(sizes) if exact and size <= _SMALL]
        self._large = [key for key, size in enumerate(sizes) if not exact or size > _SMALL]
        self._terms = _Terms([shapes[key] for key in self._small], device)
        kind = torch.float64 if exact else torch.float32
        lengths = [self._terms.flat.numel(), *(sizes[key] for key in self._large)]
        self._regions = [torch.empty(length, dtype=kind, device=device) for length in lengths]
        self._shapes = tuple(shapes)
        self._tensors = self._by_key(self._regions)
        self._empty = [True] * len(lengths)
        self._gathers = [False] * len(lengths)  # _BASE is in it
        self._guard = Guard(len(lengths), device) if guarded else None
        size = min(max(lengths[1:], default=0), _chunk(device)) if exact else 0
        self._wide = torch.empty(size, dtype=torch.float64, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """The sums by key; zeros where nothing was added. Raises SumsChanged."""
        self._check()
        for number, region in enumerate(self._regions):
            if self._empty[number]:
                region.zero_()
            elif self._gathers[number]:
                region.sub_(_BASE)
            self._empty[number] = self._gathers[number] = False
        self._accept()
        return self._tensors

    def memory(self) -> Tensor | None:
        """Some of the memory in which something has been added up, as it is; None where nothing was."""
        filled = (region for region, empty in zip(self._regions, self._empty, strict=True) if not empty)
        return next((region for region in filled if region.numel()), None)

    def copy(self) -> list[Tensor]:
        """The sums by key, out of place and in the memory of the host."""
        copies = []
        for region, empty, gathers in zip(self._regions, self._empty, self._gathers, strict=True):
            copies.append(torch.empty(region.shape, dtype=region.dtype))
            if empty:
                copies[-1].zero_()
            else:
                copies[-1].copy_(region)
            if gathers and not empty:
                copies[-1].sub_(_BASE)
        return self._by_key(copies)

    def merge(self, others: Sequence[Tensor]) -> None:
        """Add sums of other contributions, by key. Raises SumsChanged."""
        for into, tensor in zip(self.tensors, others, strict=True):
            into.add_(tensor.to(into.device))
        self._accept()

    def zero_(self) -> None:
        """Forget all contributions. Costs nothing: the first one overwrites."""
        self._empty = [True] * len(self._regions)

    def add(
        self, grads: Sequence[Tensor], exponents: Sequence[int], num_contributions: int
    ) -> tuple[bool, bool]:
        """Add one micro-batch's gradients; returns (NaN or infinity seen, overflow seen).

        Float32 is not looked at: what is not finite stays so in the sum, where its norm shows it. Overflow: ``|g * 2**exponent| >= 2**51 / num_contributions``, where ``num_contributions`` is how many
        there will be in the whole sum over all devices (8, if there will be fewer). The test looks at this
        contribution alone, so it does not depend on the grouping. A gradient that fails either test is not
        added: a round with such a flag is never applied.
        """
        if not self.exact:
            for number, grad in enumerate(grads, 1):
                self._add_float(number, grad.reshape(-1))
            return False, False
        limit = min(2.0**SUM_BITS / num_contributions, 2.0**_TERM_BITS)
        nan = overflow = False
        if self._small:
            small = [grads[key] for key in self._small]
            nan, overflow = self._add_small(small, [exponents[key] for key in self._small], limit)
        for number, key in enumerate(self._large, 1):
            fails = _fails(grads[key], exponents[key], limit)
            nan, overflow = nan or fails[0], overflow or fails[1]
            if not any(fails):
                self._add_rounded(number, grads[key].reshape(-1), exponents[key])
        return nan, overflow

    def _by_key(self, regions: Sequence[Tensor]) -> list[Tensor]:
        cut = dict(zip(self._small, _cut(regions[0], self._terms.shapes), strict=True))
        cut |= {key: regions[1 + i].view(self._shapes[key]) for i, key in enumerate(self._large)}
        return [cut[key] for key in range(len(self._shapes))]

    def _check(self) -> None:
        """That nothing but additions has changed the sums. Raises SumsChanged."""
        if self._guard is not None:
            filled = {n: region for n, region in enumerate(self._regions) if not self._empty[n]}
            self._guard.check(filled)

    def _accept(self) -> None:
        """The sums are right as they are now."""
        if self._guard is not None:
            for number, region in enumerate(self._regions):
                self._guard.clear(number)
                self._guard.wrote(number, region)

    def _reads(self, number: int, part: Tensor) -> None:
        """Before ``part`` of a region is changed."""
        if self._guard is not None and not self._empty[number]:
            self._guard.reads(number, part)

    def _wrote(self, number: int, part: Tensor) -> None:
        """After it."""
        if self._guard is not None:
            self._guard.wrote(number, part)

    def _begins(self, number: int) -> None:
        """Before the first part of a region is changed."""
        if self._guard is not None and self._empty[number]:
            self._guard.clear(number)

    def _add_float(self, number: int, grad: Tensor) -> None:
        region = self._regions[number]
        self._begins(number)
        self._reads(number, region)
        if self._empty[number]:
            region.copy_(grad)
        else:
            region.add_(grad)
        self._wrote(number, region)
        self._empty[number] = False

    def _add_small(
        self, grads: Sequence[Tensor], exponents: Sequence[int], limit: float
    ) -> tuple[bool, bool]:
        scaled, into = self._terms.scaled(grads, exponents), self._regions[0]
        nan = overflow = False
        if not _largest(scaled) < limit:  # or NaN; a hair below the limit none has failed yet
            nan, overflow = self._terms.leave_out(grads, exponents, limit)
        self._begins(0)
        self._reads(0, into)
        if self._empty[0]:
            torch.add(scaled, _BASE, out=into)
        else:
            if not self._gathers[0]:
                into.add_(_BASE)
            into.add_(scaled)
        self._wrote(0, into)
        self._empty[0], self._gathers[0] = False, True
        return nan, overflow

    def _add_rounded(self, number: int, grad: Tensor, exponent: int) -> None:
        # One chunk at a time stays in the cache. The product is exact but for bits far below a half.
        factor, chunk = math.ldexp(_NO_TIES, exponent), self._wide.numel()
        empty, rises = self._empty[number], not self._gathers[number]
        self._begins(number)
        for part, into in zip(_pieces(grad, chunk), _pieces(self._regions[number], chunk), strict=True):
            wide = self._wide[: part.numel()].copy_(part)
            self._reads(number, into)
            if empty:
                into.fill_(_BASE)
            elif rises:
                into.add_(_BASE)
            into.add_(wide, alpha=factor)
            self._wrote(number, into)
        self._empty[number], self._gathers[number] = False, True


class _Terms:
    """One contribution to small keys of ``shapes``, times their factors: ``flat`` holds one behind the other."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.shapes = shapes
        self._sizes = torch.tensor([math.prod(shape) for shape in shapes], dtype=torch.int64, device=device)
        self.flat = torch.empty(int(self._sizes.sum()), dtype=torch.float64, device=device)
        self._by_key = _cut(self.flat, shapes)
        self._exponents: Sequence[int] = ()
        self._factors = self.flat  # of every number; those of ``_exponents``

    def scaled(self, grads: Sequence[Tensor], exponents: Sequence[int]) -> Tensor:
        """``flat``: ``grads`` times the factors of ``exponents``."""
        if exponents != self._exponents:
            factors = [math.ldexp(_NO_TIES, exponent) for exponent in exponents]
            by_key = torch.tensor(factors, dtype=torch.float64, device=self.flat.device)
            self._exponents, self._factors = (
                exponents,
                by_key.repeat_interleave(self._sizes, output_size=self.flat.numel()),
            )
        torch._foreach_copy_(self._by_key, list(grads))
        return self.flat.mul_(self._factors)

    def leave_out(self, grads: Sequence[Tensor], exponents: Sequence[int], limit: float) -> tuple[bool, bool]:
        """Make zeros of the terms that fail a test; whether any failed that for NaN, and that for overflow."""
        nan = overflow = False
        for grad, exponent, term in zip(grads, exponents, self._by_key, strict=True):
            fails = _fails(grad, exponent, limit)
            nan, overflow = nan or fails[0], overflow or fails[1]
            if any(fails):
                term.zero_()
        return nan, overflow


def total(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Sum of one or more parts by key, out of place, in the given order (which matters to float32 alone)."""
    if len(parts) == 1:
        return list(parts[0])
    sums = [torch.add(first, second) for first, second in zip(parts[0], parts[1], strict=True)]
    for part in parts[2:]:
        for into, tensor in zip(sums, part, strict=True):
            into.add_(tensor)
    return sums


def mean_grads(
    sums: Sequence[Tensor], exponents: Sequence[int], num_micro_batches: int, exact: bool
) -> list[Tensor]:
    """The mean gradient over the step's micro-batches by key, float32: one division, in float64 if exact."""
    if not exact:
        return [torch.div(tensor, num_micro_batches) for tensor in sums]
    grads = []
    for tensor, exponent in zip(sums, exponents, strict=True):
        grad = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        divisor = math.ldexp(float(num_micro_batches), exponent)
        chunk = _chunk(tensor.device)
        for part, into in zip(_pieces(tensor.view(-1), chunk), _pieces(grad.view(-1), chunk), strict=True):
            into.copy_(part.div(divisor))
        grads.append(grad)
    return grads


def squared_norms(grads: Sequence[Tensor]) -> tuple[float, ...]:
    """Squared norm of every key in float64, added up chunk by chunk in a fixed order."""
    return tuple(_squared_norm(grad.reshape(-1)) for grad in grads)


def next_exponents(
    sums: Sequence[Tensor], exponents: Sequence[int], num_contributions: int
) -> tuple[int, ...]:
    """Exponents for the next step, from the largest magnitude of every reduced sum of this one.

    Even a contribution as large as the whole sum then keeps ``HEADROOM_BITS`` below the overflow test. An
    exponent rises by at most 8 a step, since gradients that vanish for one step come back, and a key of
    zeros keeps its own.
    """
    wanted = min(SUM_BITS - (num_contributions - 1).bit_length(), _TERM_BITS) - HEADROOM_BITS
    following = []
    for tensor, exponent in zip(sums, exponents, strict=True):
        bits = _magnitude(tensor).bit_length()
        change = min(wanted - bits, _MAX_RISE) if bits else 0
        following.append(max(-_LARGEST_EXPONENT, min(exponent + change, _LARGEST_EXPONENT)))
    return tuple(following)


def smaller_exponents(exponents: Sequence[int]) -> tuple[int, ...]:
    """Exponents for the same step again, after an overflow in these keys."""
    return tuple(max(-_LARGEST_EXPONENT, exponent - HEADROOM_BITS) for exponent in exponents)


def _chunk(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


def _pieces(flat: Tensor, chunk: int) -> Sequence[Tensor]:
    return torch.split(flat, chunk) if flat.numel() > chunk else (flat,)


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of ``flat``, one behind the other."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _fails(grad: Tensor, exponent: int, limit: float) -> tuple[bool, bool]:
    """Whether there is a NaN or an infinity in ``grad``, and else whether it overflows."""
    largest = _largest(grad)
    if not math.isfinite(largest):
        return True, False
    return False, math.ldexp(largest, exponent) >= limit


def _largest(grad: Tensor) -> float:
    """The largest magnitude; NaN if there is a NaN."""
    low, high = torch.aminmax(grad)
    return max(-float(low), float(high))


def _magnitude(tensor: Tensor) -> int:
    low, high = torch.aminmax(tensor)
    return max(-int(low), int(high))


def _squared_norm(flat: Tensor) -> float:
    # Chunks this small are summed by one thread, whatever the number of threads.
    chunk = 1 << 15 if flat.device.type == "cpu" else _GPU_CHUNK
    squares = [part.to(torch.float64).square_().sum() for part in _pieces(flat, chunk)]
    return sum(torch.stack(squares).tolist()) if squares else 0.0
