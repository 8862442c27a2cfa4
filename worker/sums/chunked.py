"""Keeps gradient sums in a CPU's memory: small keys in one piece, large ones chunk by chunk in the cache.

A term that fails a test (NaN, infinity, overflow) is found before it is added, and left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import BASE, NO_TIES, chunk_of, cut, limit_of, pieces_of
from oobleckd.worker.sums.guard import Guard, SumsChanged
from oobleckd.worker.sums.sum import Sum

# Key by key each took an aminmax, two numbers out of it, a conversion and an addition: 0.27 ms for a block
# of 12 small keys, now 0.14. (D-exactness-007)
_SMALL = 1 << 14
"""Keys of at most so many numbers are added in one go: every call for a key of its own would take longer than
its numbers.
"""


class Chunked(Sum):
    """The sum of one use of one bucket in a CPU's memory: float64 (exact) or float32.

    Lies in regions: the first holds all small keys, one behind the other, each other one a large key
    (``_large``).
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        exact: bool,
        device: torch.device,
        *,
        guarded: bool = False,
    ) -> None:
        self._exact = exact
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
        self._gathers = [False] * len(lengths)  # BASE is in it
        self._nan = self._overflow = False
        self._guard = Guard(len(lengths), device) if guarded else None
        size = min(max(lengths[1:], default=0), chunk_of(device)) if exact else 0
        self._wide = torch.empty(size, dtype=torch.float64, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """As of any Sum."""
        self._check()
        for number, region in enumerate(self._regions):
            if self._empty[number]:
                region.zero_()
            elif self._gathers[number]:
                region.sub_(BASE)
            self._empty[number] = self._gathers[number] = False
        self._accept()
        return self._tensors

    @property
    def flags(self) -> tuple[bool, bool]:
        """As of any Sum."""
        return self._nan, self._overflow

    @property
    def marks(self) -> Tensor:
        """As of any Sum. What has changed was raised when it was found."""
        return torch.tensor((self._nan, self._overflow, False), dtype=torch.float64)

    def memory(self) -> Tensor | None:
        """As of any Sum."""
        filled = (region for region, empty in zip(self._regions, self._empty, strict=True) if not empty)
        return next((region for region in filled if region.numel()), None)

    def copy(self) -> list[Tensor]:
        """As of any Sum."""
        copies = []
        for region, empty, gathers in zip(self._regions, self._empty, self._gathers, strict=True):
            copies.append(torch.empty(region.shape, dtype=region.dtype))
            if empty:
                copies[-1].zero_()
            else:
                copies[-1].copy_(region)
            if gathers and not empty:
                copies[-1].sub_(BASE)
        return self._by_key(copies)

    def zero_(self) -> None:
        """As of any Sum."""
        self._empty = [True] * len(self._regions)
        self._nan = self._overflow = False

    def add(self, grads: Sequence[Tensor], exponents: Sequence[int], num_contributions: int) -> None:
        """As of any Sum. A gradient that fails a test is not added."""
        if not self._exact:
            for number, grad in enumerate(grads, 1):
                self._add_float(number, grad.reshape(-1))
            return
        limit = limit_of(num_contributions)
        if self._small:
            small = [grads[key] for key in self._small]
            self._note(*self._add_small(small, [exponents[key] for key in self._small], limit))
        for number, key in enumerate(self._large, 1):
            fails = _fails(grads[key], exponents[key], limit)
            self._note(*fails)
            if not any(fails):
                self._add_rounded(number, grads[key].reshape(-1), exponents[key])

    def _note(self, nan: bool, overflow: bool) -> None:
        self._nan, self._overflow = self._nan or nan, self._overflow or overflow

    def _by_key(self, regions: Sequence[Tensor]) -> list[Tensor]:
        found = dict(zip(self._small, cut(regions[0], self._terms.shapes), strict=True))
        found |= {key: regions[1 + i].view(self._shapes[key]) for i, key in enumerate(self._large)}
        return [found[key] for key in range(len(self._shapes))]

    def _check(self) -> None:
        """That nothing but additions has changed the sums. Raises SumsChanged."""
        if self._guard is not None:
            filled = {n: region for n, region in enumerate(self._regions) if not self._empty[n]}
            if filled and bool(self._guard.changed(filled)):
                raise SumsChanged

    def _accept(self) -> None:
        """As of any Sum."""
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
            torch.add(scaled, BASE, out=into)
        else:
            if not self._gathers[0]:
                into.add_(BASE)
            into.add_(scaled)
        self._wrote(0, into)
        self._empty[0], self._gathers[0] = False, True
        return nan, overflow

    def _add_rounded(self, number: int, grad: Tensor, exponent: int) -> None:
        # One chunk at a time stays in the cache. The product is exact but for bits far below a half.
        factor, chunk = math.ldexp(NO_TIES, exponent), self._wide.numel()
        empty, rises = self._empty[number], not self._gathers[number]
        self._begins(number)
        for part, into in zip(pieces_of(grad, chunk), pieces_of(self._regions[number], chunk), strict=True):
            wide = self._wide[: part.numel()].copy_(part)
            self._reads(number, into)
            if empty:
                into.fill_(BASE)
            elif rises:
                into.add_(BASE)
            into.add_(wide, alpha=factor)
            self._wrote(number, into)
        self._empty[number], self._gathers[number] = False, True


class _Terms:
    """One contribution to small keys of ``shapes``, times their factors: ``flat`` holds one
    behind the other.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.shapes = shapes
        self._sizes = torch.tensor([math.prod(shape) for shape in shapes], dtype=torch.int64, device=device)
        self.flat = torch.empty(int(self._sizes.sum()), dtype=torch.float64, device=device)
        self._by_key = cut(self.flat, shapes)
        self._exponents: Sequence[int] = ()
        self._factors = self.flat  # of every number; those of ``_exponents``

    def scaled(self, grads: Sequence[Tensor], exponents: Sequence[int]) -> Tensor:
        """``flat``: ``grads`` times the factors of ``exponents``."""
        if exponents != self._exponents:
            factors = [math.ldexp(NO_TIES, exponent) for exponent in exponents]
            # A factor for every number and not one a key, which would need a call a key. The product is
            # rounded to float64 first, far below the hair that keeps ties apart: the integers are the same.
            # (D-exactness-007)
            by_key = torch.tensor(factors, dtype=torch.float64, device=self.flat.device)
            self._exponents, self._factors = (
                exponents,
                by_key.repeat_interleave(self._sizes, output_size=self.flat.numel()),
            )
        torch._foreach_copy_(self._by_key, list(grads))
        return self.flat.mul_(self._factors)

    def leave_out(self, grads: Sequence[Tensor], exponents: Sequence[int], limit: float) -> tuple[bool, bool]:
        """Make zeros of the terms that fail a test; whether any failed that for NaN, and that for
        overflow.
        """
        nan = overflow = False
        for grad, exponent, term in zip(grads, exponents, self._by_key, strict=True):
            fails = _fails(grad, exponent, limit)
            nan, overflow = nan or fails[0], overflow or fails[1]
            if any(fails):
                term.zero_()
        return nan, overflow


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
