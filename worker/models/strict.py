"""Positions that are counted in floats, on a GPU that repeats itself: torch's strict mode has no such sum
there.

OPT counts positions as a running sum of a mask of float ones, which ``use_deterministic_algorithms`` refuses
on CUDA (``oobleckd.worker.device.context``). The sum is whole, so of integers it has the same bits; it is
made so on every device, so that a CPU proves it. That no family does anything else that is refused is a test
(tests/unit/worker/test_strict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SUMS: frozenset[Callable[..., Any]] = frozenset({torch.cumsum, Tensor.cumsum})


class WholeSums(TorchFunctionMode):
    """Within, running sums of float32 without a gradient are of whole numbers, below 2**24."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        kwargs = kwargs or {}
        if func in _SUMS and args and args[0].dtype == torch.float32 and not args[0].requires_grad:
            whole: Tensor = func(args[0].to(torch.int64), *args[1:], **kwargs)
            return whole if "dtype" in kwargs else whole.to(torch.float32)
        return func(*args, **kwargs)
