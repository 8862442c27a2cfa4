"""Which rule updates a parameter, with which decay and share of the learning rate.

Owns the order of decisions: groups by name, decay by kind, and for a rule that does not take all parameters
the rule of the rest. A function of the parameter's name, shape and layers alone, so that any split of the
model ends in the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from oobleckd.protocol.joboptimizer import Optimizer, OptimizerGroup
from oobleckd.protocol.optimizers import RULES, Knobs


class ParamRecipe(NamedTuple):
    """How one parameter is updated. ``group``: number of the `[[optimizer.group]]` that it belongs to, -1 for
    none. ``frozen``: not at all; it has no slots.
    """

    rule: str
    weight_decay: float
    lr_scale: float = 1.0
    frozen: bool = False
    group: int = -1


class ParameterRow(msgspec.Struct, frozen=True):
    """One parameter in the answer of ``plan --parameters``. ``group``: the pattern of its group, "" without.
    ``state_bytes``: weights and slots together.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    rule: str
    lr_scale: float
    weight_decay: float
    frozen: bool
    state_bytes: int


def knobs_of(optimizer: Optimizer, rule: str) -> Knobs:
    """What ``rule`` is told: the table's keys, and where they are left out what is usual for it."""
    sheet = RULES.get(rule)
    momentum, nesterov = (sheet.momentum, sheet.nesterov) if sheet is not None else (0.0, False)
    return Knobs(
        optimizer.betas,
        optimizer.eps,
        momentum if optimizer.momentum is UNSET else optimizer.momentum,
        nesterov if optimizer.nesterov is UNSET else optimizer.nesterov,
        optimizer.options,
    )


def recipe_of(
    optimizer: Optimizer, name: str, shape: Sequence[int], uses: Sequence[int], num_layers: int
) -> ParamRecipe:
    """Of the parameter ``name``, which the layers ``uses`` compute with, of ``num_layers``: the first is the
    embedding, the last the head.
    """
    # Biases of experts (gate_up_proj_bias) have a row for each; no other name ends so.
    is_matrix, embeds = len(shape) >= 2 and not name.endswith("_bias"), 0 in uses
    hidden = not embeds and num_layers - 1 not in uses
    sheet = RULES.get(optimizer.name)
    takes_it = sheet is None or not sheet.rest or (hidden and is_matrix and len(shape) == 2)
    rule = optimizer.name if takes_it or sheet is None else sheet.rest
    decays = optimizer.decay == "all" or (is_matrix and not embeds)
    weight_decay = optimizer.weight_decay if decays else 0.0
    for number, group in enumerate(optimizer.group):
        if matches(group, name):
            own = weight_decay if group.weight_decay is UNSET else group.weight_decay
            return ParamRecipe(rule, own, group.lr_scale, group.frozen, number)
    return ParamRecipe(rule, weight_decay)


def matches(group: OptimizerGroup, name: str) -> bool:
    """Whether the parameter ``name`` is of ``group``."""
    return _pattern(group.match).fullmatch(name) is not None


def _pattern(glob: str) -> re.Pattern[str]:
    """``*``: any characters, dots among them; ``?``: one."""
    return re.compile("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in glob))
