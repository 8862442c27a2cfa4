"""Which module of a block is its router: the one place that knows it, of all families.

transformers says of each mixture of experts which class makes ``router_logits``, since it can return them.
That such a module returns logits, weights and the experts chosen is tried on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oobleckd.protocol.job import Train
from oobleckd.worker.runtime.errors import UserError

Scores = Literal["softmax", "sigmoid"]
"""How a family makes shares of router logits, of which the load-balancing loss takes the mean."""
_BY_SIGMOID = frozenset({"deepseek_v3", "dots1", "glm4_moe"})
_KEYS = ("router_aux_loss_coef", "router_z_loss_coef")
"""Of a job's [train]; some families have the first of them in their configuration."""
_TOKENS = 3


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """The router of a block: ``name`` of its module in the block, which sends each token to ``top_k`` of
    ``num_experts``.
    """

    name: str
    num_experts: int
    top_k: int
    scores: Scores


def places_of(model: PreTrainedModel, blocks: Iterable[nn.Module]) -> tuple[RouterPlace | None, ...]:
    """Of each of ``blocks``, on the meta device; None where it has no router that is known."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    if kind is None:
        return tuple(None for _ in blocks)
    scores: Scores = "sigmoid" if model.config.model_type in _BY_SIGMOID else "softmax"
    return tuple(_place(block, kind, model.config.hidden_size, scores) for block in blocks)


def check_given(given: Iterable[str]) -> None:
    """``given``: fields of model.config that the job sets. Raises UserError for one by which transformers
    would add a loss of its own, which is of all layers together.
    """
    for key in _KEYS:
        if key in given:
            # Over the tokens of all layers at once: no block can know it. (D-routers-001)
            raise UserError(
                f"model.config.{key}: the model's own router loss is not computed here",
                f"set train.{key}, which is of each block by itself (docs/experts.md)",
            )


def check_coefficients(train: Train, family: str, places: Iterable[RouterPlace | None]) -> None:
    """Raises UserError where the job asks for a router loss of a model without routers."""
    if any(place is not None for place in places):
        return
    for key in _KEYS:
        if getattr(train, key):
            raise UserError(
                f"train.{key}: no block of {family} has a router that is known here",
                f"leave {key} out, or train a mixture of experts (docs/experts.md)",
            )


def _place(block: nn.Module, kind: type[nn.Module], width: int, scores: Scores) -> RouterPlace | None:
    found = [(name, module) for name, module in block.named_modules() if isinstance(module, kind)]
    if len(found) != 1:
        return None
    name, router = found[0]
    with torch.no_grad():
        told = router(torch.empty((_TOKENS, width), device="meta"))
    match told:
        case (Tensor() as logits, Tensor(), Tensor() as chosen) if (
            logits.shape[:-1] == chosen.shape[:-1] == (_TOKENS,) and not chosen.dtype.is_floating_point
        ):
            return RouterPlace(name, logits.shape[-1], chosen.shape[-1], scores)
    return None
