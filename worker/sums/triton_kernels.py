"""Kernels for an NVIDIA GPU, by Triton, which comes with torch's build for CUDA.

Imported only where there is such a GPU. Owns how they are launched, and what the GPU is told: where the
gradients of a bucket lie, which is the same in most micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from oobleckd.worker.sums import triton_source
from oobleckd.worker.sums.arithmetic import NO_TIES, pieces_of
from oobleckd.worker.sums.arithmetic import total as total_of
from oobleckd.worker.sums.kernels import ChunkFigures, Kernels, SumMemory, sent
from oobleckd.worker.sums.slices import num_chunks

_BLOCK = 2048
"""Numbers of one program of a kernel."""
_OPTIONS = {"enable_fp_fusion": False}
_ALIGNED_BYTES = 16
_MOST_TOLD = 64
"""Tables that are kept for a sum."""


@dataclass(frozen=True, slots=True)
class _GpuMemory(SumMemory):
    """With what the GPU is told of it. ``keys``: int64 (2, keys), beginnings and sizes. ``blocks``: int64 (2,
    blocks), of each the key and the first number in it. ``told``: by what the host has told it already.
    """

    keys: Tensor
    blocks: Tensor
    told: dict[tuple[object, ...], Tensor]


class TritonKernels(Kernels):
    """Of the current GPU."""

    def memory(self, sizes: Sequence[int], device: torch.device) -> SumMemory:
        """As of any Kernels."""
        plain = SumMemory.of(sizes, device)
        blocks = [(key, begin) for key, size in enumerate(sizes) for begin in range(0, size, _BLOCK)]
        return _GpuMemory(
            plain.flat, plain.begins, plain.sizes, plain.seen, plain.checksum,
            keys=torch.tensor([plain.begins, plain.sizes], dtype=torch.int64, device=device),
            blocks=torch.tensor(blocks, dtype=torch.int64, device=device).view(-1, 2).t().contiguous(),
            told={},
        )  # fmt: skip

    def add(
        self, memory: SumMemory, grads: Sequence[Tensor], exponents: Sequence[int], *, first: bool
    ) -> None:
        """As of any Kernels. One launch for all keys."""
        assert isinstance(memory, _GpuMemory)
        terms = [_dense(grad, size) for grad, size in zip(grads, memory.sizes, strict=True)]
        places = [word for term in terms for word in (term.data_ptr(), term.dtype == torch.bfloat16)]
        where = _told(memory, torch.int64, places).view(-1, 2)
        factors = _told(memory, torch.float64, [math.ldexp(NO_TIES, exponent) for exponent in exponents])
        if num_blocks := memory.blocks.shape[1]:
            triton_source.add[num_blocks,](
                memory.flat, factors, where, memory.keys[0], memory.keys[1], memory.blocks[0],
                memory.blocks[1], memory.seen, memory.checksum, first, _BLOCK, **_OPTIONS,
            )  # fmt: skip

    def checksum(self, flat: Tensor) -> Tensor:
        """As of any Kernels."""
        return flat.view(torch.int64).sum()

    def finish(
        self, parts: Sequence[Sequence[Tensor]], divisors: Sequence[float], into: Sequence[Tensor], chunk: int
    ) -> ChunkFigures:
        """As of any Kernels. torch adds up the parts, and the squares in the order in which it does without
        kernels.
        """
        total = total_of(parts)
        device = total[0].device
        by_key = sent(divisors, torch.float64, device)
        count = sum(num_chunks(tensor.numel(), chunk) for tensor in total)
        largest = torch.zeros(count, dtype=torch.int64, device=device)
        buffer = torch.empty(min(chunk, max(map(Tensor.numel, total))), dtype=torch.float64, device=device)
        squares: list[Tensor] = []
        for key, (tensor, mean) in enumerate(zip(total, into, strict=True)):
            pieces = zip(pieces_of(tensor.view(-1), chunk), pieces_of(mean.view(-1), chunk), strict=True)
            for part, piece in pieces:
                size = part.numel()
                if size:
                    triton_source.finish[triton.cdiv(size, _BLOCK),](
                        part, by_key[key], piece, buffer, largest[len(squares)], size, _BLOCK, **_OPTIONS
                    )
                squares.append(buffer[:size].sum())
        return ChunkFigures(largest.view(torch.float64), torch.stack(squares))


def _told(memory: _GpuMemory, dtype: torch.dtype, numbers: Sequence[float]) -> Tensor:
    """``numbers`` on the GPU: as they were sent there once, if they were."""
    # The allocator gives the gradients of a layer the same places in most micro-batches.
    key = (dtype, *numbers)
    if key not in memory.told:
        if len(memory.told) >= _MOST_TOLD:
            memory.told.clear()
        memory.told[key] = sent(numbers, dtype, memory.flat.device)
    return memory.told[key]


def _dense(grad: Tensor, size: int) -> Tensor:
    """``grad`` as a kernel reads it: one number behind the other, several at once."""
    if grad.numel() != size:
        raise ValueError(f"a gradient of {grad.numel()} numbers for a sum of {size}")
    known = grad if grad.dtype in {torch.bfloat16, torch.float32} else grad.to(torch.float32)
    dense = known.contiguous()
    return dense if dense.data_ptr() % _ALIGNED_BYTES == 0 else dense.clone()
