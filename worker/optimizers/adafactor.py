"""Adafactor (Shazeer and Stern 2018): second moments of a matrix by row and column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor

from oobleckd.protocol.optimizers import RULES, Knobs, Slot
from oobleckd.worker.optimizers.rule import Slots, UpdateStep

_BETA2_DECAY, _SMALLEST_STEP, _CLIP = -0.8, 1e-3, 1.0  # torch's and the paper's


class Adafactor:
    """``torch.optim.Adafactor(foreach=False)``: parameter by parameter."""

    def slots(self, shape: tuple[int, ...], knobs: Knobs) -> Sequence[Slot]:
        """Row and column of a matrix; of a vector every number's."""
        return RULES["adafactor"].slots(shape, knobs)

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        """As of any rule."""
        none: list[Tensor | None] = [None] * len(params)
        rows, columns, all_of = (list(slots.get(name, none)) for name in ("row_var", "col_var", "variance"))
        adafactor(
            list(params),
            list(grads),
            rows,
            columns,
            all_of,
            [torch.tensor(float(step.applied)) for _ in params],
            foreach=False,
            d=_CLIP,
            lr=step.lr,
            beta2_decay=_BETA2_DECAY,
            weight_decay=step.weight_decay,
            eps1=torch.finfo(torch.float32).eps,
            eps2=_SMALLEST_STEP,
            maximize=False,
        )
