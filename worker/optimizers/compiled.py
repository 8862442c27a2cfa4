"""Updates in one pass on a CPU: ``update.c``, compiled when oobleckd was installed and called by ctypes.

Owns the library, and with which roundings it is told to compute.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from oobleckd.worker.optimizers.one_pass import Element, UpdatedKeys
from oobleckd.worker.optimizers.rule import UpdateStep
from oobleckd.worker.runtime.library import in_parts, library, num_parts

INTERFACE = 1
"""Of ``update.c``, where it is raised too."""

_ADDRESS, _INT64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class Roundings:
    """How torch's kernels round on this CPU. ``width``: numbers that they take at once; ``fuses``: whether
    products and sums are rounded once; ``nan``: the bits of NaN in bfloat16.
    """

    width: int
    fuses: bool
    nan: int


class _Step(ctypes.Structure):
    """``struct step`` of ``update.c``."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum")),
        *((name, ctypes.c_double) for name in ("bias1", "bias2_root", "scale")),
        *((name, ctypes.c_int32) for name in ("rule", "nesterov", "fuses", "width", "nan", "narrow")),
    )


class CompiledPass:
    """An ``Update`` by the function of a ``library``, with the ``roundings`` of torch. While it runs, other
    threads of Python do.

    30 bytes a number with two slots in float32 and a copy, 4 more where gradients are multiplied; in three
    passes it were 42.
    """

    def __init__(self, library: ctypes.CDLL, element: Element, roundings: Roundings) -> None:
        self._update, self._element, self._roundings = library.oobleckd_update, element, roundings
        self._update.restype = None
        self._update.argtypes = [
            *(ctypes.POINTER(_Step), _INT64),
            *(_ADDRESS,) * 6,
            *(_INT64, _INT64),
        ]

    def __call__(self, keys: UpdatedKeys, step: UpdateStep, scale: float) -> None:
        """As of any ``Update``."""
        assert all(map(Tensor.is_contiguous, keys.grads))  # all else is a piece of a flat storage
        count, slots = len(keys.params), list(keys.slots.values())
        narrow = bool(slots) and slots[0][0].dtype == torch.bfloat16
        told = _told(self._element, step, scale, self._roundings, narrow=narrow)
        sizes = list(map(Tensor.numel, keys.params))
        copies = [copy for copy in keys.rounded if copy is not None]
        addresses, none = _ADDRESS * count, [None] * count
        by_key = (
            (_INT64 * count)(*sizes),
            *[addresses(*map(Tensor.data_ptr, each)) for each in (keys.params, keys.grads, *slots)],
            *[addresses(*none)] * (2 - len(slots)),
            addresses(*[None if copy is None else copy.data_ptr() for copy in keys.rounded]),
        )
        parts = num_parts(sum(sizes))
        in_parts(parts, lambda part: self._update(told, count, *by_key, part, parts))
        # Whoever has kept a parameter for a backward pass is told, as of torch's own operations.
        increment_version([*keys.params, *copies, *itertools.chain.from_iterable(slots)])


def update_library(folder: Path = Path(__file__).parent) -> ctypes.CDLL | None:
    """The library in ``folder``, if there is one that this code can use."""
    return library(folder, "_update", "oobleckd_update_interface", INTERFACE)


def _told(
    element: Element, step: UpdateStep, scale: float, roundings: Roundings, *, narrow: bool
) -> ctypes.Structure:
    (beta1, beta2), knobs = step.knobs.betas, step.knobs
    # torch counts updates in float32.
    number = ctypes.c_float(ctypes.c_float(step.applied).value + 1.0).value
    return _Step(
        step.lr, beta1, beta2, knobs.eps, step.weight_decay, knobs.momentum,
        1.0 - beta1**number, math.sqrt(1.0 - beta2**number), scale,
        element, knobs.nesterov, roundings.fuses, roundings.width, roundings.nan, narrow,
    )  # fmt: skip
