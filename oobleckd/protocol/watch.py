"""What somebody who watches asks the daemon for, beyond what it lists: schedules, goodput, layers at risk,
what would follow, the past.

Owns the shapes only. Times are POSIX seconds where they are called ``at``, else seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from oobleckd.planner.policy import Action, Way
from oobleckd.protocol.api import API_VERSION, Status
from oobleckd.protocol.changes import Change
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.generation import Numbered
from oobleckd.protocol.incidentviews import IncidentView, RejectedView
from oobleckd.protocol.jobviews import CurveBin, JobView, PipelineView, StepView, TemplateView
from oobleckd.protocol.nodeviews import LayerRange, NodeView

OpKind = Literal["F", "B", "I", "W", "U", "S"]
"""Forward, backward, input gradients, weight gradients, update, a forward pass run ahead for
another device.
"""
Scale = Literal["linear", "log"]
"""Whether the bins of a curve are equally wide, or wider the later they are."""
Lost = Literal["detect", "plan", "reconfigure", "copy", "redone", "skipped", "degraded", "waiting", "bubble"]


class OpView(msgspec.Struct, frozen=True, array_like=True):
    """One op of one device, in seconds after the step began on the first device to begin it.

    ``stage``: hop of the route, from 0 on. ``origin``: whose it was before it was re-routed, "" if it was
    this device's own from the start. ``early``: an update made before all votes were in. ``again``: it had
    been done once, by somebody who died. ``gather_s``: of it, the time in which weights that others of the
    stage hold were waited for.
    """

    kind: OpKind
    stage: int
    micro_batch: int
    start_s: float
    stop_s: float
    origin: str = ""
    early: bool = False
    again: bool = False
    gather_s: float = 0.0


class LaneView(msgspec.Struct, frozen=True):
    """The ops of one device in one step, in order. ``dead``: it is lost, and the ops are those it did before,
    if any are known.

    ``bubble``: share of the step in which it waited.
    """

    device: str
    pipeline: int
    stages: tuple[int, ...]
    ops: tuple[OpView, ...]
    bubble: float
    dead: bool = False


class ScheduleView(Numbered, frozen=True):
    """One step as it was (``measured``), or as the planner has it. ``step``: numbered from 1; ``span_s``:
    from its beginning to its end.
    """

    job: str
    step: int
    epoch: int
    at: float
    measured: bool
    span_s: float
    lanes: tuple[LaneView, ...]
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect


class SampledSteps(msgspec.Struct, frozen=True):
    """Steps of ``job`` whose op times the daemon has, oldest first."""

    job: str
    steps: tuple[int, ...]
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect


class LayerView(msgspec.Struct, frozen=True):
    """Who holds ``layer`` now. ``copies``: live ones; where several devices share a stage, whole ones, whose
    shards ``devices`` hold.
    """

    layer: int
    copies: int
    devices: tuple[str, ...]


class GoodputView(msgspec.Struct, frozen=True):
    """Where the time of a job's live devices went, in device-seconds since it began.

    ``useful_s``, ``evaluated_s`` (evaluations, which lose nothing and train nothing) and all of ``lost_s``
    add up to ``total_s``; *bubble* is the share of the newest sampled
    step, taken off what is useful.

    Measured: ``step_s``, what a step takes now, ``best_step_s``, the least that it ever took, at ``best_at``
    (POSIX seconds), and ``of_fault_free``, the second as a share of the first. Modelled: ``plan_step_s`` of
    the plan in force, and ``best_plan_step_s`` of the best plan on ``best_plan_nodes``: all nodes that
    joined, also those that are gone by now. 0: not known.
    """

    job: str
    total_s: float
    useful_s: float
    lost_s: dict[Lost, float]
    of_fault_free: float
    step_s: float = 0.0
    best_step_s: float = 0.0
    best_at: float = 0.0
    plan_step_s: float = 0.0
    best_plan_step_s: float = 0.0
    best_plan_nodes: int = 0
    evaluated_s: float = 0.0
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect

    @property
    def goodput(self) -> float:
        """The share of its devices' time that was not lost to failures, 0 where there was none yet. Bubbles
        are no part of it: every pipeline has them, whatever fails, and MFU shows them.
        """
        if not self.total_s:
            return 0.0
        return max(0.0, 1 - (sum(self.lost_s.values()) - self.lost_s.get("bubble", 0.0)) / self.total_s)


class CurveMark(msgspec.Struct, frozen=True):
    """Something that happened to the run after ``step`` steps: an incident, or a ``rollback`` to ``step``."""

    step: int
    at: float
    kind: Literal["incident", "rollback"]
    id: str = ""
    nodes: tuple[str, ...] = ()
    total_s: float = 0.0
    steps_lost: int = 0


class CurveView(msgspec.Struct, frozen=True):
    """A job's run from its first step to its newest, the ``step``-th: ``bins`` of steps, in order; of equal
    width but for the last one, or with ``log`` of widths that grow with their place, so that the beginning of
    a run is seen as well as its end. Bins begin where the job does, which is later than its first step where
    it was resumed. ``evaluations`` (the newest of each bin) and ``marks`` lie in it.
    """

    job: str
    step: int
    bins: tuple[CurveBin, ...]
    log: bool = False
    evaluations: tuple[EvaluationView, ...] = ()
    marks: tuple[CurveMark, ...] = ()
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect


class ImpactView(msgspec.Struct, frozen=True):
    """What would follow if ``nodes`` died now, all at once. Computed by the daemon from the plan in force,
    with the job's policy.

    ``lost_layers``: without a copy then. ``steps_back``: how far the job would roll back (0: not at all).
    ``stops``: too few nodes would be left to go on. ``stall_s``: modelled, from the loss until the plan that
    follows runs: noticed, repaired, deployed, copied (0 where it ``stops``). ``throughput``: share of the
    present one afterwards. ``copied_bytes`` on the way to it. ``plan``: the pipelines that would follow.
    ``can_lose``: nodes that could still be lost then. ``reason`` is for people; for programs ``way`` is what
    the plan would be, and ``actions`` what it would do to each pipeline or place that it changes.
    """

    job: str
    nodes: tuple[str, ...]
    lost_layers: tuple[int, ...]
    steps_back: int
    stops: bool
    stall_s: float
    throughput: float
    copied_bytes: int
    copy_s: float
    can_lose: int
    plan: tuple[PipelineView, ...]
    reason: str
    rejected: tuple[RejectedView, ...] = ()
    way: Way = ""
    actions: tuple[Action, ...] = ()
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that is listed, as of change ``seq``. ``layers``: of the active job. ``held``: empty, as
    ``nodes`` have it.
    """

    at: float
    seq: int
    status: Status
    jobs: tuple[JobView, ...]
    nodes: tuple[NodeView, ...]
    pipelines: tuple[PipelineView, ...]
    templates: tuple[TemplateView, ...]
    incidents: tuple[IncidentView, ...]
    layers: tuple[LayerView, ...] = ()
    held: tuple[LayerRange, ...] = ()


class Past(msgspec.Struct, frozen=True):
    """The state at a moment and what came after it: ``snapshot`` is the last before the moment asked for,
    ``changes`` follow it in order, up to ``until``.

    ``begins``: the oldest moment that the daemon can show. ``steps``: the newest of the snapshot's job that
    were committed by then, and ``before`` the newest changes before it, as far as they are still known.
    """

    begins: float
    until: float
    snapshot: Snapshot
    changes: tuple[Change, ...]
    schedules: tuple[ScheduleView, ...] = ()
    steps: tuple[StepView, ...] = ()
    before: tuple[Change, ...] = ()
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect


BUNDLE_VERSION = 1
"""Of the format of a bundle."""


class Bundle(msgspec.Struct, frozen=True):
    """An incident as a file, to be looked at elsewhere: the past around it. ``version`` of the format,
    ``made_by`` which oobleckd.
    """

    version: int
    made_by: str
    incident: IncidentView
    past: Past


class DebugView(msgspec.Struct, frozen=True):
    """The daemon itself, for whoever looks for a fault of it. ``threads`` and ``tasks``: name -> stack, the
    innermost call last.
    """

    version: str
    python: str
    up_s: float
    threads: dict[str, tuple[str, ...]]
    tasks: dict[str, tuple[str, ...]]
    counters: dict[str, int]
    journal: str
    trouble: str
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect
