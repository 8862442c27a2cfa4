"""The interface of an optimizer rule.

What a rule must promise, the engine builds on: which parameters a device holds, and so which are updated
together, changes with every loss, and a device that takes a place over makes the same updates once more.
``python -m oobleckd.worker.optimizers NAME`` looks whether a rule keeps its word (``kit``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from oobleckd.protocol.optimizers import Knobs, Slot

Slots = Mapping[str, Sequence[Tensor]]
"""By the slot's name a tensor for each parameter, in their order."""


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """Of one update: ``applied`` ones came before it; ``lr`` is that of the step and the parameters' group,
    and ``weight_decay`` their decay.
    """

    applied: int
    lr: float
    weight_decay: float
    knobs: Knobs


class OptimizerRule(Protocol):
    """How parameters are updated. Holds no state: what it remembers lies in slots.

    The numbers of a parameter after an update are a function of that parameter, its gradient, its slots and
    the ``UpdateStep`` alone, to the bit: not of the other parameters in the call, their number or order, of
    the clock, or of a generator.
    """

    def slots(self, shape: tuple[int, ...], knobs: Knobs) -> Sequence[Slot]:
        """What is kept of a parameter of ``shape``, in an order that does not change."""

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        """Update ``params`` and ``slots`` in place; called without autograd.

        All float32, on one device, with the same slots, and at least one. ``grads``: mean gradients, clipped
        already; they stay as they are. A slot that is kept narrow comes as float32 and is rounded afterwards.
        """
