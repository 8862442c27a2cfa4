"""Optimizer rules in numbers: which keys of `[optimizer]` each takes, and what it keeps of a parameter.

Owns the descriptions that planner, command line and worker share; the arithmetic is the worker's
(``oobleckd.worker.optimizers``). Rules of installed packages are not here: what they keep, they say
themselves on the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

ENTRY_POINTS = "oobleckd.optimizers"
"""The group of entry points of installed packages: each is a class that is called without arguments, and is a
rule.
"""
Option = bool | int | float | str
PLUGIN_KEYS = frozenset({"betas", "eps", "momentum", "nesterov", "options"})
"""What a rule of one's own may be told."""
KEYED = ("betas", "eps", "momentum", "nesterov", "options")
"""Keys that not every rule takes."""
_FLOAT_BYTES, _HALF_BYTES = 4, 2


class Knobs(NamedTuple):
    """What a rule is told of `[optimizer]`, the same for all parameters and steps. ``options``: of a rule of
    one's own.
    """

    betas: tuple[float, float]
    eps: float
    momentum: float
    nesterov: bool
    options: Mapping[str, Option] = {}


class Slot(NamedTuple):
    """What a rule keeps of a parameter under one name: numbers of ``shape`` in float32, zero before the first
    update. ``narrow``: they may be kept in bfloat16 (``optimizer.state``).
    """

    name: str
    shape: tuple[int, ...]
    narrow: bool = False

    def num_bytes(self, *, bf16: bool) -> int:
        """Of all of them."""
        return math.prod(self.shape) * (_HALF_BYTES if bf16 and self.narrow else _FLOAT_BYTES)


class RuleSheet(NamedTuple):
    """A rule that comes with oobleckd. ``slots``: of a parameter of a shape. ``keys``: those of ``KEYED``
    that it takes. ``narrows``: whether any of its slots may be kept in bfloat16. ``momentum``, ``nesterov``:
    where the job says nothing. ``rest``: the rule for parameters that it does not take.
    """

    summary: str
    keys: frozenset[str]
    slots: Callable[[tuple[int, ...], Knobs], tuple[Slot, ...]]
    narrows: bool
    momentum: float = 0.0
    nesterov: bool = False
    rest: str = ""


# The first moment moves by a tenth in a step and survives eight bits. The second one moves by a thousandth,
# which bfloat16 rounds away, so it stays where it was: it is never kept narrow. (D-training-005)
def _two_moments(shape: tuple[int, ...], _: Knobs) -> tuple[Slot, ...]:
    return Slot("exp_avg", shape, narrow=True), Slot("exp_avg_sq", shape)


def _one_moment(shape: tuple[int, ...], _: Knobs) -> tuple[Slot, ...]:
    return (Slot("exp_avg", shape, narrow=True),)


def _momentum(shape: tuple[int, ...], knobs: Knobs) -> tuple[Slot, ...]:
    return (Slot("momentum_buffer", shape, narrow=True),) if knobs.momentum else ()


def _factored(shape: tuple[int, ...], _: Knobs) -> tuple[Slot, ...]:
    if len(shape) < 2:
        return (Slot("variance", shape),)
    return Slot("row_var", (*shape[:-1], 1)), Slot("col_var", (*shape[:-2], 1, shape[-1]))


_ADAM = frozenset({"betas", "eps"})
_MOMENTUM = frozenset({"momentum", "nesterov"})
RULES = {
    "adamw": RuleSheet("Adam with decoupled weight decay", _ADAM, _two_moments, narrows=True),
    "adam": RuleSheet("Adam; weight decay goes into the gradient", _ADAM, _two_moments, narrows=True),
    "sgd": RuleSheet("SGD; weight decay goes into the gradient", _MOMENTUM, _momentum, narrows=True),
    "lion": RuleSheet("the sign of a moment", frozenset({"betas"}), _one_moment, narrows=True),
    "muon": RuleSheet(
        "orthogonal steps of hidden matrices; the rest by adamw", _ADAM | _MOMENTUM, _momentum,
        narrows=True, momentum=0.95, nesterov=True, rest="adamw",
    ),
    "adafactor": RuleSheet("second moments by row and column", frozenset(), _factored, narrows=False),
}  # fmt: skip
"""By ``optimizer.name``."""


def takes(name: str) -> frozenset[str]:
    """Which of ``KEYED`` the rule ``name`` takes."""
    return RULES[name].keys if name in RULES else PLUGIN_KEYS
