"""Sums in the memory of a GPU: all keys in one piece of it, and nobody waits for the device while terms are
added.

A term is added whatever it holds; what it holds is looked at on the device (``marks``), once for all of
them. Waiting at every key would leave the device without work as often: a tenth to a quarter of a step
(docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import BASE, NO_TIES, limit_of
from oobleckd.worker.sums.guard import Guard
from oobleckd.worker.sums.sum import Sum

_ALIGNED = 32
"""Numbers: keys begin where a GPU reads several at once."""


class Whole(Sum):
    """The sum of one use of one bucket in one flat tensor on a GPU: float64 (exact) or float32, keys at
    aligned places.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], exact: bool, device: torch.device, *, guarded: bool = False
    ) -> None:
        self._exact = exact
        sizes = [math.prod(shape) for shape in shapes]
        rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        kind = torch.float64 if exact else torch.float32
        self._flat = torch.zeros(sum(rooms), dtype=kind, device=device)
        parts = torch.split(self._flat, rooms) if rooms else ()
        self._tensors = [
            part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)
        ]
        self._empty, self._gathers = True, False  # BASE is in it
        self._guard = Guard(1, device) if guarded else None
        self._unmarked = torch.zeros((), dtype=torch.bool, device=device)
        self._changed = self._unmarked
        # By key, of the terms since zero_: the largest magnitude (NaN if there was one), as it came and as it
        # was added.
        self._seen = torch.zeros((2, len(sizes)), dtype=torch.float32, device=device)
        self._largest, self._scaled = [list(row.unbind()) for row in self._seen.unbind()]
        self._limit = math.inf

    @property
    def tensors(self) -> list[Tensor]:
        """As of any Sum."""
        if self._guard is not None and not self._empty:
            self._changed = self._changed | self._guard.changed({0: self._flat})
        if self._empty:
            self._flat.zero_()
        elif self._gathers:
            self._flat.sub_(BASE)
        self._empty = self._gathers = False
        self._accept()
        return self._tensors

    @property
    def flags(self) -> tuple[bool, bool]:
        """As of any Sum. Waits for the device."""
        nan, overflow, _ = self.marks.tolist()
        return bool(nan), bool(overflow)

    @property
    def marks(self) -> Tensor:
        """As of any Sum."""
        nan = overflow = self._unmarked
        if self._exact and not self._empty:
            largest, scaled = self._seen.unbind()
            finite = largest.isfinite()
            nan = finite.logical_not().any()
            # In float64: not every limit is a number of float32.
            overflow = (finite & (scaled.to(torch.float64) >= self._limit)).any()
        return torch.stack((nan, overflow, self._changed)).to(torch.float64)

    def add(self, grads: Sequence[Tensor], exponents: Sequence[int], num_contributions: int) -> None:
        """As of any Sum. All calls between two of ``zero_`` have the same exponents and number."""
        if not grads:
            return
        grads = list(grads)
        if self._guard is not None:
            self._guard.clear(0) if self._empty else self._guard.reads(0, self._flat)
        if self._exact:
            self._look_at(grads, exponents, num_contributions)
            self._add_rounded(grads, exponents)
        elif self._empty:
            torch._foreach_copy_(self._tensors, grads)
        else:
            torch._foreach_add_(self._tensors, grads)
        self._empty, self._gathers = False, self._exact
        if self._guard is not None:
            self._guard.wrote(0, self._flat)

    def copy(self) -> list[Tensor]:
        """As of any Sum."""
        if self._empty:
            return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in self._tensors]
        copies = [tensor.to("cpu", copy=True) for tensor in self._tensors]
        return [copy.sub_(BASE) for copy in copies] if self._gathers else copies

    def zero_(self) -> None:
        """As of any Sum."""
        self._empty, self._gathers = True, False
        self._changed = self._unmarked
        self._seen.zero_()

    def memory(self) -> Tensor | None:
        """As of any Sum."""
        if self._empty:
            return None
        return next((tensor for tensor in self._tensors if tensor.numel()), None)

    def _look_at(self, grads: list[Tensor], exponents: Sequence[int], num_contributions: int) -> None:
        """Remember how large the terms are."""
        # Kept on the GPU until somebody asks for the flags: to look at each term waited for the GPU some
        # 190 times a micro-batch, 82,200 tokens/s in place of 107,800. A round that fails is never applied.
        # (D-exactness-008)
        norms = torch._foreach_norm(grads, math.inf, dtype=torch.float32)  # noqa: SLF001 - of a list no other
        torch._foreach_maximum_(self._largest, norms)
        # Exact, or infinite or next to nothing, which is as much or as little.
        torch._foreach_mul_(norms, [math.ldexp(1.0, exponent) for exponent in exponents])
        torch._foreach_maximum_(self._scaled, norms)
        self._limit = limit_of(num_contributions)

    def _add_rounded(self, grads: list[Tensor], exponents: Sequence[int]) -> None:
        if self._empty:
            self._flat.fill_(BASE)
        elif not self._gathers:
            self._flat.add_(BASE)
        for into, grad, exponent in zip(self._tensors, grads, exponents, strict=True):
            into.add_(grad, alpha=math.ldexp(NO_TIES, exponent))

    def _accept(self) -> None:
        """As of any Sum."""
        if self._guard is not None:
            self._guard.clear(0)
            self._guard.wrote(0, self._flat)
