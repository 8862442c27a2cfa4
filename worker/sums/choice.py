"""Chooses the kernels that add up sums on a device: compiled C on a CPU, Triton on a GPU, or none.

Owns the choice, made once in a process, and the trial before it: what a GPU's compiler makes of kernels is
compared with torch's operations first.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from oobleckd.worker.sums.arithmetic import largest, mean_grads, squares
from oobleckd.worker.sums.compiled import compiled
from oobleckd.worker.sums.fused import Fused
from oobleckd.worker.sums.kernels import Kernels
from oobleckd.worker.sums.whole import Whole

_log = logging.getLogger(__name__)
_TRIED = ((3,), (70_000,), (2, 2048), (1,))
"""Shapes: less than a block, several and a rest, whole ones, a single number."""
_EXPONENTS = (40, 34, -2, 20)


@functools.cache
def kernels_of(kind: str) -> Kernels | None:
    """Those for devices of this ``torch.device.type``; None where torch's operations do the work."""
    match kind:
        case "cpu":
            found = compiled()
            if found is None:
                _log.info("no compiled sums: install again where there is a C compiler, they are faster")
            return found
        case "cuda":
            return _of_gpu()
    return None


def _of_gpu() -> Kernels | None:
    try:  # it is a part of torch's build for CUDA alone, and takes its time to import
        from oobleckd.worker.sums.triton_kernels import TritonKernels
    except ImportError:
        return None
    # Triton compiles at run time, with a C compiler of the host for its launcher and a driver that nobody has
    # tried: what goes wrong there must cost speed alone. (D-kernels-004)
    try:
        kernels = TritonKernels()
        if as_torch(kernels, torch.device("cuda")):
            return kernels
        _log.warning("Triton's kernels for gradient sums have other bits than torch here: torch adds up")
    except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
        _log.warning("Triton's kernels for gradient sums do not run here, torch adds up: %s", error)
    return None


def as_torch(kernels: Kernels, device: torch.device) -> bool:
    """Whether ``kernels`` make of a few terms on ``device`` what torch's operations do, to the bit. Waits."""
    one = Fused(_TRIED, device, kernels, guarded=True)
    other = Whole(_TRIED, exact=True, device=device, guarded=True)
    for seed in range(3):
        terms = _terms(seed, device)
        one.add(terms, _EXPONENTS, 8)
        other.add([term.to(torch.float32) for term in terms], _EXPONENTS, 8)
    mine, wanted = one.tensors, other.tensors
    chunk = 1 << 15
    means = [torch.empty(shape, device=device) for shape in _TRIED]
    figures = kernels.finish([mine], [2.0**exponent * 3 for exponent in _EXPONENTS], means, chunk)
    grads = mean_grads(wanted, _EXPONENTS, 3.0, exact=True)
    most = torch.stack([each for tensor in wanted for each in largest(tensor, chunk)])
    by_chunk = torch.stack([square for grad in grads for square in squares(grad, chunk)])
    pairs = [
        *zip(mine, wanted, strict=True),
        *zip(means, grads, strict=True),
        (figures.largest, most),
        (figures.squares, by_chunk),
        (one.marks, other.marks),
    ]
    return all(torch.equal(*pair) for pair in pairs)


def _terms(seed: int, device: torch.device) -> list[Tensor]:
    """Gradients of ``_TRIED``, of many magnitudes: float32, the second bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randn(shape, generator=generator).pow(5).mul(2.0**-12) for shape in _TRIED]
    terms[1] = terms[1].to(torch.bfloat16)
    return [term.to(device) for term in terms]
