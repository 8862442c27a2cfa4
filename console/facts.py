"""What the console is told: the facts of a feed, and the wish that a screen has. Shapes only.

Every fact bears the time at which it was learnt, in POSIX seconds. How they add up is ``model``'s.
"""

from __future__ import annotations

import msgspec

from oobleckd.protocol.api import Status
from oobleckd.protocol.changes import Change
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, PipelineView, StepView, TemplateView
from oobleckd.protocol.nodeviews import NodeLogView, NodeView
from oobleckd.protocol.watch import CurveView, GoodputView, ImpactView, LayerView, SampledSteps, ScheduleView


class Fact(msgspec.Struct, frozen=True, tag=True):
    """Base of what the feed tells. ``at``: when it was learnt."""

    at: float


class Fetched(Fact, frozen=True):
    """Answers of the daemon; None for what was not asked this time. ``chosen``: of which job pipelines and
    templates are, where somebody chose it.
    """

    status: Status | None = None
    jobs: tuple[JobView, ...] | None = None
    nodes: tuple[NodeView, ...] | None = None
    pipelines: tuple[PipelineView, ...] | None = None
    templates: tuple[TemplateView, ...] | None = None
    incidents: tuple[IncidentView, ...] | None = None
    chosen: str = ""


class JobChosen(Fact, frozen=True):
    """Somebody wants to see ``job``, by its id; "": whichever is at work."""

    job: str


class PastHistory(Fact, frozen=True):
    """The newest committed steps of a job, in order, as the daemon has them."""

    job: str
    steps: tuple[StepView, ...]


class ChangesHeard(Fact, frozen=True):
    """One entry of the event stream."""

    change: Change


class Away(Fact, frozen=True):
    """The daemon does not answer: ``problem`` in one sentence and, where there is one, ``hint``.

    ``answers``: somebody does, but not as this version expects.
    """

    problem: str
    hint: str = ""
    answers: bool = False


class Watched(Fact, frozen=True):
    """Answers about ``job`` that only some screens ask for; None for what was not asked this time."""

    schedules: SampledSteps | None = None
    schedule: ScheduleView | None = None
    modelled: ScheduleView | None = None
    layers: tuple[LayerView, ...] | None = None
    goodput: GoodputView | None = None
    curve: CurveView | None = None
    evaluations: tuple[EvaluationView, ...] | None = None
    impact: ImpactView | None = None
    log: NodeLogView | None = None
    job: str = ""


class QueryRefused(Fact, frozen=True):
    """A question that the daemon does not answer, and why in one sentence. ``what``: the field of ``Fetched``
    or ``Watched``, or steps (``PastHistory``).
    """

    what: str
    problem: str


class Rewound(Fact, frozen=True):
    """A moment of the past, ``at``. ``start``: its facts begin anew with these (none: they go on); then
    ``changes``.

    The past reaches from ``begins`` to ``until``; ``playing``: time goes on there. ``sampled``: when those
    steps began whose op times are known there.
    """

    begins: float
    until: float
    playing: bool
    start: tuple[Fetched | PastHistory | ChangesHeard | Watched, ...] = ()
    changes: tuple[Change, ...] = ()
    sampled: tuple[float, ...] = ()


class Unshown(Fact, frozen=True):
    """The past ``at`` that time cannot be shown, though whoever keeps it is there: ``problem`` in one
    sentence and, where there is one, ``hint``.
    """

    problem: str
    hint: str = ""


AnyFact = Fetched | JobChosen | PastHistory | ChangesHeard | Away | Watched | QueryRefused | Rewound | Unshown


class Wants(msgspec.Struct, frozen=True):
    """What the screen in sight wants beyond what is listed. ``step``: of the schedule (0: the newest known).

    ``impacts``: sets of nodes, each by name in order. ``log``: the node whose newest lines are wanted.
    ``job``: the one that all of it is about, by its id ("": whichever is at work).
    """

    schedule: bool = False
    modelled: bool = False
    layers: bool = False
    goodput: bool = False
    curve: bool = False
    step: int = 0
    impacts: tuple[tuple[str, ...], ...] = ()
    log: str = ""
    job: str = ""
