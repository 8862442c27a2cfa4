"""Adam (Kingma and Ba 2015), and AdamW (Loshchilov and Hutter 2019), by torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from oobleckd.protocol.optimizers import RULES, Knobs, Slot
from oobleckd.worker.optimizers.one_pass import Element
from oobleckd.worker.optimizers.rule import Slots, UpdateStep


@dataclass(frozen=True, slots=True)
class Adam:
    """``decoupled``: AdamW, whose weight decay leaves the gradient alone.

    One call of the fused kernel for all parameters, whose elements do not see each other; the same bits as
    ``torch.optim.AdamW(fused=True)``, and ``Adam``.
    """

    decoupled: bool = True

    @property
    def element(self) -> Element:
        """As of any ElementRule."""
        return Element.ADAMW if self.decoupled else Element.ADAM

    def slots(self, shape: tuple[int, ...], knobs: Knobs) -> Sequence[Slot]:
        """Two moments."""
        return RULES["adamw"].slots(shape, knobs)

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        """As of any rule."""
        counts = torch.full((len(params),), float(step.applied), device=params[0].device)
        kernel = adamw if self.decoupled else adam
        kernel(
            list(params),
            list(grads),
            list(slots["exp_avg"]),
            list(slots["exp_avg_sq"]),
            [],
            list(counts.unbind()),
            fused=True,
            amsgrad=False,
            beta1=step.knobs.betas[0],
            beta2=step.knobs.betas[1],
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=step.knobs.eps,
            maximize=False,
        )
