"""Kernels for a CPU: ``kernels.c``, compiled when oobleckd was installed and called by ctypes.

Where there is no such library there are no kernels (``oobleckd.worker.runtime.library``). Owns how its
functions are called.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from oobleckd.worker.runtime.library import in_parts, library, num_parts
from oobleckd.worker.sums.arithmetic import NO_TIES
from oobleckd.worker.sums.arithmetic import total as total_of
from oobleckd.worker.sums.kernels import ChunkFigures, Kernels, SumMemory

INTERFACE = 2
"""Of ``kernels.c``, where it is raised too."""

_KINDS = {torch.bfloat16: 0, torch.float32: 1}
_ADDRESS, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


# One pass where torch's operations take six, at a third of the time of a core. (D-kernels-001)
class Compiled(Kernels):
    """The functions of ``library``. While one runs, other threads of Python do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.oobleckd_sums_add.restype = None
        library.oobleckd_sums_add.argtypes = [
            *(_ADDRESS, _INT64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
            *(_INT32, _INT64, _INT64, _ADDRESS, _ADDRESS),
        ]
        library.oobleckd_sums_checksum.restype = _INT64
        library.oobleckd_sums_checksum.argtypes = [_ADDRESS, _INT64]
        library.oobleckd_sums_square.restype = None
        library.oobleckd_sums_square.argtypes = [_ADDRESS, _INT64, _INT64, _ADDRESS, _ADDRESS]
        library.oobleckd_sums_finish.restype = _INT64
        library.oobleckd_sums_finish.argtypes = [
            *(_ADDRESS, _ADDRESS, _INT64, ctypes.c_double, _ADDRESS, _ADDRESS),
        ]

    def memory(self, sizes: Sequence[int], device: torch.device) -> SumMemory:
        """As of any Kernels."""
        return SumMemory.of(sizes, device, num_parts(sum(sizes)))

    def add(
        self, memory: SumMemory, grads: Sequence[Tensor], exponents: Sequence[int], *, first: bool
    ) -> None:
        """As of any Kernels."""
        terms = _terms(grads, memory.sizes)
        parts, num_keys = memory.seen.shape
        begins, sizes = _integers(memory.begins), _integers(memory.sizes)
        addresses = (_ADDRESS * num_keys)(*[term.data_ptr() for term in terms])
        kinds = (_INT32 * num_keys)(*[_KINDS[term.dtype] for term in terms])
        factors = _factors(tuple(exponents))
        total, seen, checksum = memory.flat.data_ptr(), memory.seen, memory.checksum

        def add_part(part: int) -> None:
            self._library.oobleckd_sums_add(
                total, num_keys, begins, sizes, addresses, kinds, factors, first, part, parts,
                seen[part].data_ptr(), checksum[part].data_ptr(),
            )  # fmt: skip

        in_parts(parts, add_part)

    def checksum(self, flat: Tensor) -> Tensor:
        """As of any Kernels."""
        value: int = self._library.oobleckd_sums_checksum(flat.data_ptr(), flat.numel())
        return torch.tensor(value)

    def square(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """As of any Kernels."""
        rows, columns = words.shape
        by_row, by_column = (torch.empty(size, dtype=torch.int64) for size in (rows, columns))
        self._library.oobleckd_sums_square(
            words.contiguous().data_ptr(), rows, columns, by_row.data_ptr(), by_column.data_ptr()
        )
        return by_row, by_column

    def finish(
        self, parts: Sequence[Sequence[Tensor]], divisors: Sequence[float], into: Sequence[Tensor], chunk: int
    ) -> ChunkFigures:
        """As of any Kernels. C leaves the squares of a chunk in the cache, and torch adds them up there."""
        first, *more = parts
        total, other = (_plain(each) for each in (first, total_of(more) if more else ()))
        sizes = [tensor.numel() for tensor in total]
        others = [tensor.data_ptr() for tensor in other] or [0] * len(total)
        begins = [
            (tensor.data_ptr(), beside, mean.data_ptr())
            for tensor, beside, mean in zip(total, others, into, strict=True)
        ]
        chunks = [(key, at) for key, size in enumerate(sizes) for at in range(0, max(1, size), chunk)]
        largest = torch.empty(len(chunks), dtype=torch.int64)  # bits of a float64, in the order of numbers
        squares = torch.empty(len(chunks), dtype=torch.float64)
        num = num_parts(sum(sizes))

        def finish_part(part: int) -> None:
            buffer, by_chunk = torch.empty(chunk, dtype=torch.float64), squares.unbind()
            for number in range(part, len(chunks), num):
                key, at = chunks[number]
                (total_at, other_at, mean_at), size = begins[key], min(chunk, sizes[key] - at)
                largest[number] = self._library.oobleckd_sums_finish(
                    total_at + 8 * at, other_at + 8 * at if other_at else None, size, divisors[key],
                    mean_at + 4 * at, buffer.data_ptr(),
                )  # fmt: skip
                # In the order of additions that it always had: torch's, which depends on the CPU.
                torch.sum(buffer[:size], dim=0, out=by_chunk[number])

        in_parts(num, finish_part)
        return ChunkFigures(largest.view(torch.float64), squares)


def compiled(folder: Path = Path(__file__).parent) -> Compiled | None:
    """The kernels of the library in ``folder``, if there is one that this code can use."""
    found = library(folder, "_kernels", "oobleckd_sums_interface", INTERFACE)
    return Compiled(found) if found is not None else None


@functools.lru_cache(maxsize=256)  # of the buckets of a device, which stay the same
def _integers(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (_INT64 * len(values))(*values)


@functools.lru_cache(maxsize=256)  # of a step's micro-batches
def _factors(exponents: tuple[int, ...]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(exponents))(*[math.ldexp(NO_TIES, exponent) for exponent in exponents])


def _plain(total: Sequence[Tensor]) -> list[Tensor]:
    """Sums as C reads them, which they are already."""
    return [tensor.to(torch.float64).contiguous() for tensor in total]


def _terms(grads: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """``grads`` as C reads them; most are so as they come."""
    if (
        tuple(map(Tensor.numel, grads)) == sizes
        and all(map(Tensor.is_contiguous, grads))
        and _KINDS.keys() >= {grad.dtype for grad in grads}
    ):
        return grads
    return [_dense(grad, size) for grad, size in zip(grads, sizes, strict=True)]


def _dense(grad: Tensor, size: int) -> Tensor:
    """``grad`` as C reads it: one number behind the other, in a dtype that it knows."""
    if grad.numel() != size:
        raise ValueError(f"a gradient of {grad.numel()} numbers for a sum of {size}")
    known = grad if grad.dtype in _KINDS else grad.to(torch.float32)
    return known.contiguous()
