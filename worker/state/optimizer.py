"""What the optimizer of a job makes of the model: the shape of each bucket's state, and clipping.

Owns no rule (``oobleckd.worker.optimizers``), and holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.worker.models import ModelSpec
from oobleckd.worker.optimizers.plan import Parameters, plan_updates
from oobleckd.worker.state.bucket_state import PARAM, SlotShape, StateShape


def parameters_of(spec: ModelSpec, buckets: Sequence[int]) -> Parameters:
    """The parameters of these ``buckets``, one behind the other."""
    found = [spec.buckets[bucket] for bucket in buckets]
    return Parameters(
        tuple(key for bucket in found for key in bucket.keys),
        tuple(shape for bucket in found for shape in bucket.shapes),
        tuple(bucket.uses for bucket in found for _ in bucket.keys),
        spec.num_layers,
    )


def state_shape(
    optimizer: Optimizer,
    params: Parameters,
    parts: Sequence[tuple[int, tuple[int, ...]]] | None = None,
) -> StateShape:
    """What the state of ``params`` consists of, or of ``parts`` of them: (position of the parameter, shape).
    Raises UserError for a rule that this node does not have.
    """
    plan = plan_updates(optimizer, params, parts)
    whole = params.shapes if parts is None else [shape for _, shape in parts]
    dtypes: dict[str, torch.dtype] = {PARAM: torch.float32}
    shapes: dict[str, dict[int, tuple[int, ...]]] = {PARAM: dict(enumerate(whole))}
    for key, slots in enumerate(plan.slots):
        for slot in slots:
            shapes.setdefault(slot.name, {})[key] = slot.shape
            narrow = optimizer.state == "bf16" and slot.narrow and dtypes.get(slot.name) != torch.float32
            dtypes[slot.name] = torch.bfloat16 if narrow else torch.float32
    kept = tuple(SlotShape.of(name, dtypes[name], by_key) for name, by_key in shapes.items() if by_key)
    frozen = frozenset(key for key, recipe in enumerate(plan.recipes) if recipe.frozen)
    return StateShape(kept, plan.batches, frozen)


def clip_scale(total_norm: float, clip_norm: float) -> float:
    """Factor for all gradients that brings their global norm down to ``clip_norm`` (0: no clipping).

    ``total_norm``: of the mean gradient over all parameters of the model, not over those held here. 1.0
    exactly where nothing is clipped, so that no multiplication shows in the bits.
    """
    if clip_norm == 0 or total_norm <= clip_norm:
        return 1.0
    return clip_norm / total_norm
