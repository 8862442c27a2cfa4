"""How experts of a mixture compute: transformers' ``grouped_mm``, one product for all experts of a block.

Owns what torch does not know of that product by itself. Which families are mixtures of experts is
``config``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GROUPED_MM: Callable[..., Tensor] = torch._grouped_mm  # noqa: SLF001 - what ``grouped_mm`` shows to a mode
"""The product of all experts of a block, as torch's modes see it."""


class ShapesAlone(TorchFunctionMode):
    """Within, products of experts on the meta device are shapes, of any dtype; torch knows them of bfloat16
    alone.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        if func is GROUPED_MM and args[0].is_meta:
            return shape_of_experts(args[0], args[1])
        return func(*args, **(kwargs or {}))


def shape_of_experts(mat_a: Tensor, mat_b: Tensor) -> Tensor:
    """What ``grouped_mm`` of ``mat_a`` (rows, in) and ``mat_b`` (experts, in, out) has the shape of."""
    return mat_a.new_empty((mat_a.shape[0], mat_b.shape[-1]))
