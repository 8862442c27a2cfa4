"""Incidents (recoveries from a loss) as the HTTP API shows them (``api`` has what all answers share)."""

from __future__ import annotations

from typing import Literal

import msgspec

from oobleckd.planner.policy import Action, RejectionCause, Way
from oobleckd.protocol.generation import Numbered
from oobleckd.protocol.parts import (
    LossCause,
)

Phase = Literal["detect", "plan", "reconfigure", "copy", "resume"]
RollbackCause = Literal[
    "", "last-copy-lost", "policy", "corruption", "data-changed", "checkpoint-damaged", "journal-lost"
]
"""Why a job went back: a layer has no copy left, its policy does so at every loss, or something cannot be
trusted. "": a version that did not say.
"""


class PhaseView(msgspec.Struct, frozen=True):
    """One timed phase of an incident, offset from the first evidence."""

    phase: Phase
    start_s: float
    duration_s: float


class RejectedView(msgspec.Struct, frozen=True):
    """A way that a policy did not take, with its modelled cost in seconds, and why not: ``what`` and ``why``
    for people, ``way`` and ``cause`` for programs.

    ``at_least``: the cost is a bound from below. ``step_s``, ``copied_bytes``, ``precopy_s``: of the plan it
    would have been, and until its copies are made before the stop (0: none, or not known). ``risk_s``: of the
    cost, for a last copy that the next loss may take along. ``can_lose``: nodes (-1: not known).
    """

    what: str
    cost_s: float
    why: str
    way: Way = ""
    cause: RejectionCause = ""
    at_least: bool = False
    step_s: float = 0.0
    copied_bytes: int = 0
    precopy_s: float = 0.0
    risk_s: float = 0.0
    can_lose: int = -1


class SourceView(msgspec.Struct, frozen=True):
    """``device`` sent so much of the layers that a new plan had others hold."""

    device: str
    num_bytes: int


class RollbackView(msgspec.Struct, frozen=True):
    """A job went on from the state of ``step``, ``steps_lost`` before where it was. ``source``: the folder of
    that checkpoint; "init": fresh weights.
    """

    step: int
    steps_lost: int
    source: str
    cause: RollbackCause = ""


class ReasonView(msgspec.Struct, frozen=True):
    """The reason of an incident in parts. ``back``: why the job went back, and how far ("": it did not).
    ``plan``: what became of the plan, and why. ``rerouted``: until there is another plan, the micro-batches
    of these devices go to other holders of their layers. ``staged_bytes`` of the copies were made before the
    stop.

    For programs: ``rollback`` is the last one, ``way`` what the plan is, and ``actions`` what it does to each
    pipeline or place that it changes.
    """

    back: str = ""
    plan: str = ""
    rerouted: tuple[str, ...] = ()
    staged_bytes: int = 0
    rollback: RollbackView | None = None
    way: Way = ""
    actions: tuple[Action, ...] = ()


class LossView(msgspec.Struct, frozen=True):
    """A node, or where its spare took the place a ``device`` of it, was lost."""

    node: str
    cause: LossCause
    device: str = ""


class IncidentView(Numbered, frozen=True):
    """One recovery from evidence to resumed step. ``step`` is the one that was interrupted, numbered from 1.

    ``steps_lost`` is 0 unless a layer's last copy died and the job went back to a checkpoint.
    ``layer_gradients`` were computed again, of ``step_layer_gradients`` that one step has, and
    ``layer_forwards``, of as many. ``cost_s``: what was modelled of the way taken, until the next loss is
    expected (0: there was no choice); ``rejected``: the others. ``sources``: who the copies came from, most
    bytes first; some may have been pre-copied. ``reason`` is a sentence, ``parts`` what it is made of;
    ``cause`` is one, too, and ``losses`` what was lost of what, for programs.
    """

    id: str
    job: str
    cause: str
    nodes: tuple[str, ...]
    at: float
    epoch: int
    step: int
    open: bool
    phases: tuple[PhaseView, ...]
    total_s: float
    reason: str
    steps_lost: int = 0
    copied_bytes: int = 0
    layer_gradients: int = 0
    step_layer_gradients: int = 0
    committed_s: float = 0.0
    layer_forwards: int = 0
    cost_s: float = 0.0
    rejected: tuple[RejectedView, ...] = ()
    sources: tuple[SourceView, ...] = ()
    parts: ReasonView = ReasonView()
    losses: tuple[LossView, ...] = ()
