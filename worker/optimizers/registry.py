"""Finds a rule by the name that a job has for it: one of ours, or of a package installed on this node.

A job names an entry point and nothing else: what runs is what somebody installed here.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib.metadata import entry_points

from oobleckd.protocol.optimizers import ENTRY_POINTS, RULES
from oobleckd.worker.optimizers.adafactor import Adafactor
from oobleckd.worker.optimizers.adam import Adam
from oobleckd.worker.optimizers.lion import Lion
from oobleckd.worker.optimizers.muon import Muon
from oobleckd.worker.optimizers.rule import OptimizerRule
from oobleckd.worker.optimizers.sgd import Sgd
from oobleckd.worker.runtime.errors import UserError

_OURS: dict[str, OptimizerRule] = {
    "adamw": Adam(),
    "adam": Adam(decoupled=False),
    "sgd": Sgd(),
    "lion": Lion(),
    "muon": Muon(),
    "adafactor": Adafactor(),
}


def rule_of(name: str) -> OptimizerRule:
    """The rule ``name``. Raises UserError where this node has none, or it cannot be loaded."""
    return _OURS.get(name) or _installed(name)


@lru_cache(maxsize=16)
def _installed(name: str) -> OptimizerRule:
    # A job has the name of what an administrator installed here, and no code. (D-training-008)
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = [*RULES, *sorted(entry_points(group=ENTRY_POINTS).names)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        raise UserError(
            f"optimizer.name: there is no rule {name!r}, and no package on this machine has one of that name "
            f"(entry points {ENTRY_POINTS})",
            hint,
        )
    point = next(iter(found))
    try:
        rule: OptimizerRule = point.load()()
        assert callable(rule.slots)
        assert callable(rule.update_)
    except Exception as error:
        raise UserError(
            f"optimizer.name: {name!r} of {point.value} cannot be loaded: {type(error).__name__}: {error}",
            "mend the package that is installed on this machine (docs/optimizers.md)",
        ) from error
    return rule
