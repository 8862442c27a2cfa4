"""Muon (Jordan et al. 2024): momentum, made orthogonal by Newton and Schulz's iteration in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim._muon import muon

from oobleckd.protocol.optimizers import RULES, Knobs, Slot
from oobleckd.worker.optimizers.rule import Slots, UpdateStep

_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.775, 2.0315), 5, 1e-7  # torch's, and the authors'


class Muon:
    """``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``, of matrices alone.

    Steps are scaled to those of AdamW (Liu et al. 2025), so that one learning rate and one decay serve the
    matrices and the rest of the model; and a weight that is stored transposed moves as one that is not.
    Matrix by matrix: products of matrices repeat to the bit on devices of one kind, as a forward pass's do.
    """

    def slots(self, shape: tuple[int, ...], knobs: Knobs) -> Sequence[Slot]:
        """A momentum."""
        return RULES["muon"].slots(shape, knobs)

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        """As of any rule."""
        # The original scale is of rows over columns, so a weight that is stored transposed would move
        # otherwise; and the rest of the model would need a rate of its own. (D-training-009)
        muon(
            list(params),
            list(grads),
            list(slots["momentum_buffer"]),
            lr=step.lr,
            weight_decay=step.weight_decay,
            momentum=step.knobs.momentum,
            nesterov=step.knobs.nesterov,
            ns_coefficients=_COEFFICIENTS,
            ns_steps=_ITERATIONS,
            eps=_EPS,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )
