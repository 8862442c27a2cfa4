"""What the planner's pool is asked for somebody who watches: the moment, small enough to travel. Owns the
shapes alone.
"""

from __future__ import annotations

import msgspec

from oobleckd.planner.plan import Detours, Layout, Plan
from oobleckd.planner.policy import Setup, Situation


class StepQuestion(msgspec.Struct, frozen=True):
    """Step ``step`` of ``job`` (numbered from 1), which ``layout`` of ``plan`` runs without ``dead`` and with
    ``detours`` in ``round``.
    """

    job: str
    step: int
    epoch: int
    at: float
    setup: Setup
    plan: Plan
    layout: Layout
    detours: Detours | None
    dead: tuple[str, ...]
    round: int


class LossQuestion(msgspec.Struct, frozen=True):
    """``nodes`` of ``job`` die while ``plan`` runs as ``layout``.

    ``dead``: all devices of the layout that are lost then, ``before``: those that are already. ``situation``:
    the moment after. ``notice_s``: from a loss to the decision; ``back``: steps since the last checkpoint.
    ``others``: what could be planned instead, with stages of other numbers of devices.
    """

    job: str
    policy: str
    nodes: tuple[str, ...]
    plan: Plan
    layout: Layout
    dead: tuple[str, ...]
    before: tuple[str, ...]
    situation: Situation
    notice_s: float
    back: int
    others: tuple[Setup, ...] = ()
