"""Lion (Chen et al. 2023, Algorithm 2): steps of one size, in the direction of a moment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oobleckd.protocol.optimizers import RULES, Knobs, Slot
from oobleckd.worker.optimizers.one_pass import Element
from oobleckd.worker.optimizers.rule import Slots, UpdateStep


class Lion:
    """Moves each number by ``lr`` up or down, and decays it as AdamW does."""

    element = Element.LION

    def slots(self, shape: tuple[int, ...], knobs: Knobs) -> Sequence[Slot]:
        """One moment."""
        return RULES["lion"].slots(shape, knobs)

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        """As of any rule."""
        towards, keeps = step.knobs.betas
        moments = list(slots["exp_avg"])
        signs = torch._foreach_lerp(moments, list(grads), 1 - towards)  # noqa: SLF001 - of a list, torch has no other
        torch._foreach_sign_(signs)
        torch._foreach_mul_(list(params), 1 - step.lr * step.weight_decay)
        torch._foreach_add_(list(params), signs, alpha=-step.lr)
        torch._foreach_lerp_(moments, list(grads), 1 - keeps)
