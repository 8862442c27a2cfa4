"""How experts of a mixture compute: transformers' ``grouped_mm``, one product for all experts of a block.

Owns what torch does not know of that product by itself, and which parameters are of experts. Which families
are mixtures of experts is ``config``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

GROUPED_MM: Callable[..., Tensor] = torch._grouped_mm  # noqa: SLF001 - what ``grouped_mm`` shows to a mode
"""The product of all experts of a block, as torch's modes see it."""


def experts_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Parameters of experts, each one tensor for all experts of a block -> how many of its numbers are of
    experts that a token does not go through.
    """
    chosen = getattr(model.config, "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        return {}
    idle: dict[nn.Parameter, int] = {}
    for module in model.modules():
        # What transformers puts into every class of experts, whatever the family calls it.
        num = getattr(module, "num_experts", None)
        if isinstance(num, int) and hasattr(module, "has_gate"):
            own = module.parameters(recurse=False)
            idle |= {param: param.numel() // num * (num - chosen) for param in own}
    return idle


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
