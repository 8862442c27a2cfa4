"""How experts of a mixture compute: by ``grouped_mm``, one product for all experts of a block.

Owns that they do so, in which precision they can, what a job may not say of them, what torch does not know of
that product by itself, and which of their parameters a token does not go through. Which families are mixtures
of experts is ``config``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from oobleckd.protocol.job import Train
from oobleckd.worker.runtime.errors import UserError

IMPLEMENTATION = "grouped_mm"
_IMPLEMENTATIONS = ("experts_implementation", "_experts_implementation")
_WEIGHT_DIM = 3
_IN_BF16 = 8
"""Numbers of bfloat16 in 16 bytes, of which ``grouped_mm`` wants rows to be multiples."""
_LOSS = "output_router_logits"
GROUPED_MM: Callable[..., Tensor] = torch._grouped_mm  # noqa: SLF001 - what ``grouped_mm`` shows to a mode
"""The product of all experts of a block, as torch's modes see it."""


def check_given(given: Mapping[str, Any]) -> None:
    """Raises UserError for what the fields of a job's model may not say of experts."""
    if _LOSS in given:
        raise UserError(
            f"model.config.{_LOSS}: transformers' loss of routers is one of all layers together, which no "
            "device has",
            "leave it out; train.router_aux_loss_coef sets one for each router",
        )
    for key in _IMPLEMENTATIONS:
        # The loop over experts asks the device how many tokens each has, so it waits for it in every block,
        # and sums in an order of its own. (D-models-014)
        if given.get(key, IMPLEMENTATION) != IMPLEMENTATION:
            raise UserError(
                f"model.config.{key}: experts compute by {IMPLEMENTATION} alone, not by {given[key]!r}",
                "leave it out",
            )


def check_implementation(config: PretrainedConfig) -> None:
    """Raises UserError where the model that was made of ``config`` computes its experts in another way."""
    found = config._experts_implementation  # noqa: SLF001 - what transformers chose
    if found != IMPLEMENTATION:
        raise UserError(
            f"model.family: experts of {config.model_type} would compute by {found!r}, and only "
            f"{IMPLEMENTATION} is proven",
            "install the versions of torch and transformers in constraints.txt",
        )


def check_precision(train: Train, family: str, model: PreTrainedModel) -> None:
    """Raises UserError where ``train`` has experts in bfloat16, and ``model`` has none, or none that can."""
    if train.experts_precision != "bf16":
        return
    weights = [param for param in params_of_experts(model) if param.dim() == _WEIGHT_DIM]
    if not weights:
        raise UserError(
            f"train.experts_precision: {family}, as model.config has it, has no experts",
            "leave experts_precision out, or train a mixture of experts (docs/experts.md)",
        )
    for size in (size for param in weights for size in param.shape[1:]):
        if size % _IN_BF16:
            raise UserError(
                f"train.experts_precision: experts with a side of {size} cannot compute in bf16: torch's "
                f"{IMPLEMENTATION} wants multiples of {_IN_BF16}",
                'set other sizes in model.config, or train.experts_precision = "fp32"',
            )


class ShapesAlone(TorchFunctionMode):
    """Within, on the meta device: products of experts are shapes of any dtype, where torch knows bfloat16
    alone; and so are tensors that are put together, for which it would import its compiler, for a second.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        if func is GROUPED_MM and args[0].is_meta:
            return shape_of_experts(args[0], args[1])
        if func in _JOINED and args[0][0].is_meta:
            return _joined(*args, new=func is torch.stack, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def shape_of_experts(mat_a: Tensor, mat_b: Tensor) -> Tensor:
    """What ``grouped_mm`` of ``mat_a`` (rows, in) and ``mat_b`` (experts, in, out) has the shape of."""
    return mat_a.new_empty((mat_a.shape[0], mat_b.shape[-1]))


_JOINED = (torch.stack, torch.cat)


def _joined(tensors: Sequence[Tensor], dim: int = 0, *, new: bool) -> Tensor:
    """As ``torch.stack`` where ``dim`` is ``new``, else as ``torch.cat``. Raises RuntimeError as they do."""
    first = tensors[0].shape
    dim %= len(first) + new
    like = [tensor.shape if new else (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors]
    if any(shape != like[0] for shape in like):
        raise RuntimeError(f"tensors of shapes {tuple(first)} and others do not go together")
    size = len(tensors) if new else sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty((*first[:dim], size, *first[dim if new else dim + 1 :]))


def params_of_experts(model: PreTrainedModel) -> dict[nn.Parameter, int]:
    """Parameters of experts, each one tensor for all experts of a block -> how many experts these are."""
    found: dict[nn.Parameter, int] = {}
    for module in model.modules():
        # What transformers puts into every class of experts, whatever the family calls it.
        num = getattr(module, "num_experts", None)
        if isinstance(num, int) and hasattr(module, "has_gate"):
            found |= dict.fromkeys(module.parameters(recurse=False), num)
    return found


def idle_params(model: PreTrainedModel) -> dict[nn.Parameter, int]:
    """Parameters of experts, each one tensor for all experts of a block -> how many of its numbers are of
    experts that a token does not go through.
    """
    chosen = getattr(model.config, "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        return {}
    experts = params_of_experts(model)
    return {param: param.numel() // num * (num - chosen) for param, num in experts.items()}
