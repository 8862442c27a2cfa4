"""The interface of kernels: what is done to exact sums in their memory, in as few passes as it takes.

Owns what a sum's memory consists of, and what kernels promise: compiled C on a CPU (``compiled``), Triton on
a GPU (``triton_kernels``). Where there are none, ``chunked`` and ``whole`` do the same with torch's own
operations, in more passes and to the same bits. Kernels own no memory and no decision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 32
"""Numbers: keys begin where a CPU or a GPU reads several at once."""


@dataclass(frozen=True, slots=True)
class SumMemory:
    """Of one sum: ``flat``, float64, holds keys of ``sizes`` numbers at ``begins``, with zeros in the gaps.

    ``seen``: int32 (parts, keys), the largest magnitude of the terms in each as the bits of a float32, whose
    order is that of the numbers, with NaN above all. ``checksum``: int64 (parts,), together the sum of the
    bits of ``flat`` modulo 2**64, as far as additions have made it. A part is what one thread does of an
    addition. All on one device.
    """

    flat: Tensor
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    seen: Tensor
    checksum: Tensor

    @staticmethod
    def of(sizes: Sequence[int], device: torch.device, num_parts: int = 1) -> SumMemory:
        """Zeros, for keys of ``sizes`` numbers."""
        begins, length = [], 0
        for size in sizes:
            begins.append(length)
            length += -(-size // _ALIGNED) * _ALIGNED
        return SumMemory(
            torch.zeros(length, dtype=torch.float64, device=device),
            tuple(begins),
            tuple(sizes),
            torch.zeros((num_parts, len(sizes)), dtype=torch.int32, device=device),
            torch.zeros(num_parts, dtype=torch.int64, device=device),
        )


class ChunkFigures(NamedTuple):
    """``largest``: the largest magnitude in each chunk of a total; ``squares``: the sum of squares of the
    mean gradient there. Both float64 (chunks,), on the device of the total.
    """

    largest: Tensor
    squares: Tensor


class Kernels(ABC):
    """Of one kind of device. Bytes in docstrings are of one number, from and to memory."""

    @abstractmethod
    def memory(self, sizes: Sequence[int], device: torch.device) -> SumMemory:
        """Memory for a sum of keys of ``sizes`` numbers."""

    @abstractmethod
    def add(
        self, memory: SumMemory, grads: Sequence[Tensor], exponents: Sequence[int], *, first: bool
    ) -> None:
        """Add one micro-batch's gradients times ``2**exponent``, each rounded to the nearest integer.

        ``grads``: by key, float32 or bfloat16, on the memory's device. ``first``: what is in the memory is
        nobody's, and is overwritten. 20 bytes with float32 and 18 with bfloat16, 8 less where it is the
        first.
        """

    @abstractmethod
    def checksum(self, flat: Tensor) -> Tensor:
        """The sum of the bits of ``flat``, float64, modulo 2**64: int64 (), on its device. 8 bytes."""

    def square(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the rows and of the columns of ``words``, int64 (rows, columns), modulo 2**64: int64
        (rows,) and (columns,). 8 bytes a word on a CPU, 16 on a GPU.
        """
        return words.sum(1), words.sum(0)

    @abstractmethod
    def finish(
        self, parts: Sequence[Sequence[Tensor]], divisors: Sequence[float], into: Sequence[Tensor], chunk: int
    ) -> ChunkFigures:
        """Make means of the total of ``parts``, one or more: float64 integers by range, each to be divided by
        its divisor, rounded once. They stay as they are. ``into``: by range, contiguous float32, the means.
        ``chunk``: numbers whose squares are added up to one.

        12 bytes on a CPU, where squares stay in the cache, and 20 of two parts; 28 on a GPU. What more parts
        there are is added up first.
        """


def sent(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` on ``device``, without waiting for what a GPU has to do before."""
    # From memory that is not pinned a GPU copies when it has done all else, and the host waits for that.
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
