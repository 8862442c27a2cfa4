"""Stochastic gradient descent with momentum, Nesterov's too (Sutskever et al. 2013), by torch's kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.sgd import sgd

from oobleckd.protocol.optimizers import RULES, Knobs, Slot
from oobleckd.worker.optimizers.one_pass import Element
from oobleckd.worker.optimizers.rule import Slots, UpdateStep


class Sgd:
    """``torch.optim.SGD(fused=True)`` without dampening. A buffer of zeros before the first update comes to
    the same as none.
    """

    element = Element.SGD

    def slots(self, shape: tuple[int, ...], knobs: Knobs) -> Sequence[Slot]:
        """A momentum, where there is one."""
        return RULES["sgd"].slots(shape, knobs)

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        """As of any rule."""
        none: list[Tensor | None] = [None] * len(params)
        sgd(
            list(params),
            list(grads),
            list(slots.get("momentum_buffer", none)),
            fused=True,
            weight_decay=step.weight_decay,
            momentum=step.knobs.momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=step.knobs.nesterov,
            maximize=False,
        )
