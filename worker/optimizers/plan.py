"""What an optimizer does with the keys of a bucket: which slots each has, and who is updated together.

Owns the application of ``[optimizer]`` to names and shapes, and the update of one bucket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.optimizers import RULES, Knobs, Slot
from oobleckd.protocol.paramgroups import ParamRecipe, knobs_of, matches, recipe_of
from oobleckd.worker.optimizers.choice import update_of
from oobleckd.worker.optimizers.one_pass import UpdatedKeys, sees_elements
from oobleckd.worker.optimizers.registry import rule_of
from oobleckd.worker.optimizers.rule import OptimizerRule, UpdateStep
from oobleckd.worker.runtime.errors import UserError

_SLOT_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Names, shapes and layers of some parameters, in key order, of a model of ``num_layers``."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    num_layers: int

    def recipes(self, optimizer: Optimizer) -> tuple[ParamRecipe, ...]:
        """What ``optimizer`` does with each."""
        return tuple(
            recipe_of(optimizer, name, shape, uses, self.num_layers)
            for name, shape, uses in zip(self.names, self.shapes, self.uses, strict=True)
        )


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Keys, by position, that one call updates: of one rule, decay and rate, and with the same slots."""

    rule: OptimizerRule
    knobs: Knobs
    weight_decay: float
    lr_scale: float
    keys: tuple[int, ...]
    slots: tuple[str, ...]

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        views: Mapping[str, Mapping[int, Tensor]],
        rounded: Mapping[int, Tensor],
        *,
        applied: int,
        lr: float,
        scale: float,
    ) -> None:
        """Update its keys of a bucket with ``scale`` times ``grads``, which are multiplied in place, and
        round them to the copies that they have.

        ``params`` and ``grads`` in key order, ``views`` by slot and key, ``rounded`` by key. ``applied``
        updates came before this one; ``lr`` is that of the step.
        """
        step = UpdateStep(applied, lr * self.lr_scale, self.weight_decay, self.knobs)
        keys = UpdatedKeys(
            [params[key] for key in self.keys],
            [grads[key] for key in self.keys],
            {slot: [views[slot][key] for key in self.keys] for slot in self.slots},
            [rounded.get(key) for key in self.keys],
        )
        update_of(self.rule, params[0].device.type)(keys, step, scale)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Of the parameters of a bucket. ``slots``: by key position; none of a frozen one."""

    recipes: tuple[ParamRecipe, ...]
    slots: tuple[tuple[Slot, ...], ...]
    batches: tuple[UpdateBatch, ...]


def plan_updates(
    optimizer: Optimizer, params: Parameters, parts: Sequence[tuple[int, tuple[int, ...]]] | None = None
) -> UpdatePlan:
    """What becomes of ``params``, or of ``parts`` of them: (position of the parameter, shape). A pure
    function of its arguments, and of what is installed. Raises UserError for a rule that this node does not
    have.
    """
    recipes, shapes = params.recipes(optimizer), params.shapes
    if parts is not None:
        recipes, shapes = tuple(recipes[key] for key, _ in parts), tuple(shape for _, shape in parts)
    slots = tuple(
        () if recipe.frozen else tuple(rule_of(recipe.rule).slots(shape, knobs_of(optimizer, recipe.rule)))
        for recipe, shape in zip(recipes, shapes, strict=True)
    )
    for recipe, kept in zip(recipes, slots, strict=True):
        _check_slots(recipe.rule, kept)
    return UpdatePlan(recipes, slots, tuple(_batches(optimizer, recipes, slots)))


def uncut(optimizer: Optimizer, params: Parameters) -> frozenset[int]:
    """The positions of ``params`` that are updated as a whole: their rule may look at all of a matrix. Raises
    UserError.
    """
    recipes = params.recipes(optimizer)
    return frozenset(
        key
        for key, recipe in enumerate(recipes)
        if not recipe.frozen and not sees_elements(rule_of(recipe.rule))
    )


def slots_of(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]]) -> list[tuple[Slot, ...]]:
    """What the rule of ``optimizer`` itself keeps of parameters of these shapes. Raises UserError."""
    rule, knobs = rule_of(optimizer.name), knobs_of(optimizer, optimizer.name)
    found = [tuple(rule.slots(shape, knobs)) for shape in shapes]
    for kept in found:
        _check_slots(optimizer.name, kept)
    return found


def _check_slots(rule: str, slots: Sequence[Slot]) -> None:
    names = [slot.name for slot in slots]
    wrong = [name for name in names if not _SLOT_NAME.fullmatch(name) or name == "param"]
    if wrong or len(set(names)) < len(names):
        said = f"a slot {wrong[0]!r}" if wrong else "two slots of one name"
        raise UserError(f"optimizer.name: {rule!r} has {said}", "slots are names such as exp_avg")


def _batches(
    optimizer: Optimizer, recipes: Sequence[ParamRecipe], slots: Sequence[Sequence[Slot]]
) -> list[UpdateBatch]:
    together: dict[tuple[ParamRecipe, tuple[str, ...]], list[int]] = {}
    for key, (recipe, kept) in enumerate(zip(recipes, slots, strict=True)):
        if not recipe.frozen:
            alike = recipe._replace(group=-1), tuple(slot.name for slot in kept)
            together.setdefault(alike, []).append(key)
    return [
        UpdateBatch(
            rule_of(recipe.rule), knobs_of(optimizer, recipe.rule), recipe.weight_decay, recipe.lr_scale,
            tuple(keys), names,
        )
        for (recipe, names), keys in together.items()
    ]  # fmt: skip


def check_groups(optimizer: Optimizer, names: Sequence[str]) -> None:
    """See that the rule of ``optimizer`` is here, and that every group has some of the parameters ``names``.
    Raises UserError.
    """
    rule_of(optimizer.name)
    for rest in filter(None, (sheet.rest for sheet in RULES.values())):
        rule_of(rest)
    taken: set[str] = set()
    for number, group in enumerate(optimizer.group):
        fitting = {name for name in names if matches(group, name)}
        if not fitting - taken:
            where = f"optimizer.group[{number}].match"
            why = "all that it fits are of groups before it" if fitting else "fits no parameter of the model"
            raise UserError(
                f"{where}: {group.match!r}: {why}",
                "`oobleckctl plan FILE --parameters` lists their names",
            )
        taken |= fitting
    if names and taken >= set(names) and all(group.frozen for group in optimizer.group):
        raise UserError("optimizer.group: all parameters are frozen", "leave some to be trained")
