"""What a job that goes on from a checkpoint of another one changes, key by key, and what follows for bits.

Pure: of two jobs and the step between them. Owns which keys of a job.toml mean another model, other samples,
other bits, or nothing of these; not where the checkpoint is.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from oobleckd.protocol.job import Job, table_of
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.learningrate import lr_at
from oobleckd.protocol.optimizers import RULES
from oobleckd.protocol.paramgroups import knobs_of

Effect = Literal["model", "order", "rate", "bits", "none"]
"""Of a key: the checkpoint has no weights for it, or means something else by them (``model``); other samples
are drawn (``order``); the learning rate is another one (``rate``); the bits are, for any other reason
(``bits``); nothing shows in any bit.
"""
_ORDER = ("train.global_batch", "train.sequence", "train.seed", "eval.held_out")
_RAMP = "train.batch_ramp."
_RATE = ("lr", "schedule", "warmup_steps", "warmup_tokens", "min_lr_ratio", "decay_steps", "decay_type")
_FOLDERS = ("data.cache", "data.prepared", "data.tokenizer")
"""Where something lies: what it is has digests, which devices compare."""


class KeyChange(NamedTuple):
    """A key, such as ``train.steps``, and its two values; None where one of the jobs does not have it."""

    key: str
    was: Any
    now: Any

    @property
    def effect(self) -> Effect:
        """What follows of it."""
        table, _, rest = self.key.partition(".")
        if table == "model":
            return _of_model(rest)
        if self.key in _ORDER or self.key.startswith(_RAMP) or (table == "data" and self.key not in _FOLDERS):
            return "order"
        if self.key == "train.steps" or (table == "optimizer" and rest in _RATE):
            return "rate"
        return "bits" if table in {"train", "optimizer"} else "none"

    def __str__(self) -> str:
        return f"{self.key} {_said(self.was)} -> {_said(self.now)}"


def changes(was: Job, now: Job) -> tuple[KeyChange, ...]:
    """What differs between the jobs, but for their names, in the order of a job.toml."""
    old, new = _flat(table_of(was)), _flat(table_of(now))
    keys = [*old, *(key for key in new if key not in old)]
    found = (KeyChange(key, old.get(key), new.get(key)) for key in keys if key != "name")
    return tuple(each for each in found if each.was != each.now)


def same_rates(was: Job, now: Job, step: int) -> bool:
    """Whether the first ``step`` steps have the same learning rate in both."""
    return all(lr_at(each, was) == lr_at(each, now) for each in range(step))


def keeps_alike(was: Optimizer, now: Optimizer) -> bool:
    """Whether one keeps of every parameter what the other does, so that it goes on from its checkpoint."""
    groups = [[(group.match, group.frozen) for group in each.group] for each in (was, now)]
    frozen = any(is_frozen for each in groups for _, is_frozen in each)
    return _kept(was) == _kept(now) and (not frozen or groups[0] == groups[1])


def _kept(optimizer: Optimizer) -> object:
    """Of a matrix and a vector, by the rule and by that of the rest."""
    sheet = RULES.get(optimizer.name)
    if sheet is None:
        return optimizer.name, optimizer.state
    knobs = knobs_of(optimizer, optimizer.name)
    rules = [sheet, *([RULES[sheet.rest]] if sheet.rest else [])]
    slots = [slot for rule in rules for shape in ((2, 3), (3,)) for slot in rule.slots(shape, knobs)]
    return bool(sheet.rest), [(slot, slot.narrow and optimizer.state == "bf16") for slot in slots]


def _of_model(key: str) -> Effect:
    if key == "checkpoint":  # the weights are those of the other job
        return "none"
    return "bits" if key.startswith("config.") and "drop" in key else "model"


def _flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Key -> value, of all tables in it; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        found |= _flat(value, name) if isinstance(value, dict) else {name: value}
    return found


def _said(value: Any) -> str:
    if value is None or value == "":
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{len(value)} tables" if _is_tables(value) else str(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
