"""States of hidden parameters of any shapes, and rules that break what every rule promises."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.optimizers import ENTRY_POINTS, Knobs, Slot
from oobleckd.worker.optimizers.plan import Parameters
from oobleckd.worker.optimizers.rule import Slots, UpdateStep
from oobleckd.worker.state.bucket_state import BucketState, StateShape
from oobleckd.worker.state.optimizer import state_shape

ADAMW = Optimizer()
_NUM_LAYERS = 4


def shape_of(shapes: Sequence[tuple[int, ...]], optimizer: Optimizer = ADAMW) -> StateShape:
    """Of the state of parameters of a block."""
    names = tuple(f"block.{number}" for number in range(len(shapes)))
    return state_shape(optimizer, Parameters(names, tuple(shapes), ((1,),) * len(shapes), _NUM_LAYERS))


def narrowed(optimizer: Optimizer) -> Optimizer:
    """The same with moments in bfloat16."""
    return msgspec.structs.replace(optimizer, state="bf16")


def drawn(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(shapes: Sequence[tuple[int, ...]], optimizer: Optimizer, steps: int, lr: float) -> BucketState:
    """After ``steps`` updates, from ``drawn(shapes, 0)`` with the gradients ``drawn(shapes, step + 1)``."""
    state = BucketState.fresh(shape_of(shapes, optimizer), drawn(shapes, 0))
    for step in range(steps):
        state.update_(drawn(shapes, step + 1), applied=step, lr=lr)
    return state


def installed(folder: Path, module: str = __name__, **rules: str) -> Path:
    """A package with ``rules`` (name -> the class of ``module``) in ``folder``, as pip leaves it."""
    info = folder / "strange-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n", encoding="utf-8")
    points = "".join(f"{name} = {module}:{rule}\n" for name, rule in rules.items())
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{points}", encoding="utf-8")
    return folder


class Good:
    """Plain gradient descent."""

    def slots(self, shape: tuple[int, ...], _knobs: Knobs) -> Sequence[Slot]:
        return (Slot("last", shape),)

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        for param, grad, last in zip(params, grads, slots["last"], strict=True):
            param.sub_(grad, alpha=step.lr * self.scale(params))
            last.copy_(grad)

    def scale(self, _params: Sequence[Tensor]) -> float:
        return 1.0


class ReadsAnother(Good):
    """Trusts in the size of its neighbour."""

    def scale(self, params: Sequence[Tensor]) -> float:
        return float(params[-1].norm())


class UsesTheClock(Good):
    """Warms up by the hour."""

    def scale(self, _params: Sequence[Tensor]) -> float:
        return min(1.0, time.monotonic() % 3600 / 3600)


class DependsOnGrouping(Good):
    """A smaller step where more is updated together."""

    def scale(self, params: Sequence[Tensor]) -> float:
        return 1 / len(params)


class Draws(Good):
    """Noise in the step."""

    def scale(self, _params: Sequence[Tensor]) -> float:
        return float(torch.rand(()))


class Remembers(Good):
    """Counts for itself."""

    def __init__(self) -> None:
        self.count = 0

    def scale(self, _params: Sequence[Tensor]) -> float:
        self.count += 1
        return 1 / (1 + self.count // 8)


class WritesIntoGradients(Good):
    """Clips in place."""

    def update_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], slots: Slots, step: UpdateStep
    ) -> None:
        for grad in grads:
            grad.clamp_(-0.1, 0.1)
        super().update_(params, grads, slots, step)
