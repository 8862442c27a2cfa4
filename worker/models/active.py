"""Which parameters of a mixture of experts a token does not go through. Owns the count of them."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def idle_params(model: PreTrainedModel) -> dict[nn.Parameter, int]:
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
