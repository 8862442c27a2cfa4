"""What an update is made of: the keys that it is told of, and the rules that see one number at a time.

Clipping, such a rule and the copies in bfloat16 can be one pass over memory: compiled C makes it on a CPU
(``compiled``). For rules that look at whole matrices, and where there is nothing compiled, torch does the
same in three (``torch_passes``), to the same bits. ``choice`` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from oobleckd.worker.optimizers.rule import OptimizerRule, UpdateStep


class Element(IntEnum):
    """What is done to one number; ``update.c`` has the same numbers for it."""

    ADAMW = 0
    ADAM = 1
    SGD = 2
    LION = 3


class ElementRule(OptimizerRule, Protocol):
    """A rule whose arithmetic sees one number of a parameter at a time, and is one that is known."""

    @property
    def element(self) -> Element:
        """Which one. The first of its slots may be kept in bfloat16."""

    def __hash__(self) -> int:
        """Rules with the same arithmetic may be one."""


def sees_elements(rule: OptimizerRule) -> bool:
    """Whether ``rule`` is known to see one number at a time: then parts of a parameter may be updated
    alone.
    """
    return isinstance(getattr(rule, "element", None), Element)


@dataclass(frozen=True, slots=True)
class UpdatedKeys:
    """Parameters that are updated together, all on one device, with the same slots; each is contiguous.

    ``params``, float32; ``grads``, float32: mean gradients. ``slots``: by name, as they are kept, in float32
    or bfloat16, a tensor for each parameter. ``rounded``: a copy in bfloat16 for each parameter, or None.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    slots: Mapping[str, Sequence[Tensor]]
    rounded: Sequence[Tensor | None]


Update = Callable[[UpdatedKeys, UpdateStep, float], None]
"""Of a rule: multiplies the gradients by a number, 1 for nothing, makes the update and rounds the parameters
to their copies, all in place.
"""
