"""AdamW, and clipping by the global norm.

Owns the arithmetic of one update; holds no state. Weight decay applies to every parameter, as torch's
AdamW does by default. The bits of an update depend on a tensor's own values alone, never on which tensors
are updated together, so that any split of the model ends in the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from oobleckd.worker.state.bucket_state import PARAM, SlotShape, StateShape

_SLOTS = (PARAM, "exp_avg", "exp_avg_sq")


def state_shape(shapes: Sequence[tuple[int, ...]]) -> StateShape:
    """What the state of keys of these ``shapes`` consists of."""
    by_key = dict(enumerate(shapes))
    return StateShape(tuple(SlotShape.of(name, torch.float32, by_key) for name in _SLOTS if by_key))


def clip_scale(total_norm: float, clip_norm: float) -> float:
    """Factor for all gradients that brings their global norm down to ``clip_norm`` (0: no clipping).

    ``total_norm``: of the mean gradient over all parameters of the model, not over those held here. 1.0
    exactly where nothing is clipped, so that no multiplication shows in the bits.
    """
    if clip_norm == 0 or total_norm <= clip_norm:
        return 1.0
    return clip_norm / total_norm


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    applied: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update ``params`` and their moments in place, all float32; ``applied`` updates came before this one.

    The four lists have a tensor for each parameter, in the same order, of the same shape and on one device.
    ``grads``: mean gradients, clipped already; they stay as they are. torch's fused kernel, one call per
    device whose elements do not see each other; the same bits as ``torch.optim.AdamW(fused=True)``.
    """
    if not params:
        return
    steps = list(torch.full((len(params),), float(applied), device=params[0].device).unbind())
    adamw(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
