"""Exact sums that kernels add to: each number of the sum is read and written once a micro-batch.

The memory holds the integers as they are. A term is added whatever it holds; how large the terms were is kept
beside the sum, where they are added, and looked at when somebody asks. Owns the state of a sum between its
additions; what is done to its memory is ``kernels``'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import limit_of
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.sums.kernels import Kernels, sent
from oobleckd.worker.sums.sum import Sum


class Fused(Sum):
    """The sum of one use of one bucket in one flat tensor on ``device``, which ``kernels`` are for: float64
    integers.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        kernels: Kernels,
        *,
        guarded: bool = False,
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._kernels, self._guarded = kernels, guarded
        self._memory = kernels.memory(sizes, device)
        self._tensors = [
            self._memory.flat[begin : begin + size].view(shape)
            for begin, size, shape in zip(self._memory.begins, sizes, shapes, strict=True)
        ]
        self._empty = True
        self._scales: tuple[int, ...] = ()  # exponents of the terms that are in it
        self._limit = math.inf
        self._unmarked = torch.zeros(3, dtype=torch.bool, device=device)
        self._failed, self._changed = self._unmarked[:2], self._unmarked[2:]  # with earlier scales; in memory

    @property
    def tensors(self) -> list[Tensor]:
        """As of any Sum."""
        if self._empty:
            self._memory.flat.zero_()
            self._memory.checksum.zero_()
            self._empty = False
        elif self._guarded:
            self._check()
        return self._tensors

    @property
    def flags(self) -> tuple[bool, bool]:
        """As of any Sum. On a GPU it waits."""
        nan, overflow = self._look().tolist()
        return nan, overflow

    @property
    def marks(self) -> Tensor:
        """As of any Sum."""
        return torch.cat((self._look(), self._changed)).to(torch.float64)

    def add(self, grads: Sequence[Tensor], exponents: Sequence[int], num_contributions: int) -> None:
        """As of any Sum."""
        if not grads:
            return
        limit = limit_of(num_contributions)
        if (tuple(exponents), limit) != (self._scales, self._limit):
            if not self._empty:
                self._failed = self._look()
                self._memory.seen.zero_()
            self._scales, self._limit = tuple(exponents), limit
        if self._empty:
            self._memory.checksum.zero_()
        # Terms are rounded on their way, so the memory needs no BASE, and no passes that bring it there and
        # take it away. (D-kernels-002)
        self._kernels.add(self._memory, grads, exponents, first=self._empty)
        self._empty = False

    def copy(self) -> list[Tensor]:
        """As of any Sum."""
        if self._empty:
            return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in self._tensors]
        return [tensor.to("cpu", copy=True) for tensor in self._tensors]

    def zero_(self) -> None:
        """As of any Sum."""
        self._empty = True
        self._memory.seen.zero_()
        self._failed, self._changed = self._unmarked[:2], self._unmarked[2:]

    def memory(self) -> Tensor | None:
        """As of any Sum."""
        if self._empty:
            return None
        return next((tensor for tensor in self._tensors if tensor.numel()), None)

    def _check(self) -> None:
        """That nothing but additions has changed the sums, as of ``tensors``."""
        differs = self._kernels.checksum(self._memory.flat) != self._memory.checksum.sum()
        if differs.device.type == "cpu" and differs:
            raise SumsChanged
        self._changed = self._changed | differs

    def _look(self) -> Tensor:
        """Whether there was NaN in a term since ``zero_``, and overflow: bool (2,) on the device."""
        if not self._scales:
            return self._failed
        largest = self._memory.seen.amax(0).view(torch.float32)
        finite = largest.isfinite()
        # Exact: float64 has room for the largest float32 times any factor.
        factors = [math.ldexp(1.0, exponent) for exponent in self._scales]
        scaled = largest.to(torch.float64) * sent(factors, torch.float64, largest.device)
        fails = torch.stack((finite.logical_not().any(), (finite & (scaled >= self._limit)).any()))
        return self._failed | fails

    def _accept(self) -> None:
        """As of any Sum."""
        self._memory.checksum.zero_()
        self._memory.checksum[0] = self._kernels.checksum(self._memory.flat)
