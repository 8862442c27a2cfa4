"""What the console knows: facts in, one frozen ``View`` out. Pure.

Owns which facts there are, how they add up, and the questions that panels ask of the result (which job, how
fresh). Does not fetch (``feed``), does not draw (``widgets``), and has no clock: every fact bears its time,
every question that depends on time takes ``now``. Times are POSIX seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, TypeVar, assert_never

import msgspec

from oobleckd.protocol.api import (
    Change,
    IncidentView,
    JobView,
    NodeView,
    PipelineView,
    Status,
    StepView,
    TemplateView,
)

Link = Literal["waiting", "live", "stale"]
Shape = TypeVar("Shape")

EVENTS_KEPT = 200
STEPS_KEPT = 600
ENDED = frozenset({"done", "failed", "cancelled"})


# --------------------------------------------------------------------------- facts


class Fact(msgspec.Struct, frozen=True, tag=True):
    """Base of what the feed tells. ``at``: when it was learnt."""

    at: float


class Fetched(Fact, frozen=True):
    """Answers of the daemon; None for what was not asked this time."""

    status: Status | None = None
    jobs: tuple[JobView, ...] | None = None
    nodes: tuple[NodeView, ...] | None = None
    pipelines: tuple[PipelineView, ...] | None = None
    templates: tuple[TemplateView, ...] | None = None
    incidents: tuple[IncidentView, ...] | None = None


class History(Fact, frozen=True):
    """The newest committed steps of a job, in order, as the daemon has them."""

    job: str
    steps: tuple[StepView, ...]


class Heard(Fact, frozen=True):
    """One entry of the event stream."""

    change: Change


class Away(Fact, frozen=True):
    """The daemon does not answer: ``problem`` in one sentence and, where there is one, ``hint``."""

    problem: str
    hint: str = ""


AnyFact = Fetched | History | Heard | Away


# --------------------------------------------------------------------------- the view


class Point(msgspec.Struct, frozen=True):
    """A committed step (the first is 1): when, and with which loss (NaN where it is no number)."""

    step: int
    at: float
    loss: float


class View(msgspec.Struct, frozen=True):
    """Everything that the console shows.

    ``heard_at`` is when the daemon last answered (0: never), ``points`` the newest committed steps of ``job``,
    ``events`` the newest changes, ``seq`` the number of the newest one.
    """

    link: Link = "waiting"
    heard_at: float = 0.0
    problem: str = ""
    hint: str = ""
    status: Status | None = None
    job: JobView | None = None
    num_jobs: int = 0
    nodes: tuple[NodeView, ...] = ()
    pipelines: tuple[PipelineView, ...] = ()
    templates: tuple[TemplateView, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    points: tuple[Point, ...] = ()
    events: tuple[Change, ...] = ()
    seq: int = -1

    @property
    def incident(self) -> IncidentView | None:
        """The newest incident, an open one before any that is over."""
        found = [incident for incident in self.incidents if incident.open] or self.incidents
        return found[-1] if found else None

    def clock(self, now: float) -> float:
        """The time that the picture shows: ``now`` while it is live, else when the daemon was last heard."""
        return now if self.link == "live" else self.heard_at

    def age_s(self, now: float) -> float:
        """How old the picture is, in seconds."""
        return max(0.0, now - self.heard_at) if self.heard_at else 0.0


def shown_job(jobs: Iterable[JobView]) -> JobView | None:
    """The job that the overview is about: the one at work, else the next in the queue, else the last."""
    known = tuple(jobs)
    at_work = [job for job in known if job.state not in ENDED and job.state != "queued"]
    queued = [job for job in known if job.state == "queued"]
    return next(iter(at_work or queued or known[-1:]), None)


# --------------------------------------------------------------------------- the fold


def fold(view: View, facts: Iterable[AnyFact]) -> View:
    """``view`` after ``facts``, in their order."""
    for fact in facts:
        match fact:
            case Fetched():
                view = _fetched(view, fact)
            case History():
                view = _history(view, fact)
            case Heard():
                view = _heard(view, fact.change)
            case Away():
                link: Link = "stale" if view.heard_at else "waiting"
                view = msgspec.structs.replace(view, link=link, problem=fact.problem, hint=fact.hint)
            case _:
                assert_never(fact)
    return view


def _fetched(view: View, fact: Fetched) -> View:
    answers = {
        name: getattr(fact, name)
        for name in ("status", "nodes", "pipelines", "templates", "incidents")
        if getattr(fact, name) is not None
    }
    if fact.jobs is not None:
        job = _not_overtaken(view.job, shown_job(fact.jobs))
        answers |= {"job": job, "num_jobs": len(fact.jobs), "points": _still_valid(view, job)}
    return msgspec.structs.replace(view, link="live", heard_at=fact.at, problem="", hint="", **answers)


def _not_overtaken(before: JobView | None, job: JobView | None) -> JobView | None:
    """``job``, but with the newer step where events have overtaken the answer."""
    if before is None or job is None or (before.id, before.epoch) != (job.id, job.epoch):
        return job
    if before.step <= job.step:
        return job
    return msgspec.structs.replace(job, step=before.step, loss=before.loss)


def _still_valid(view: View, job: JobView | None) -> tuple[Point, ...]:
    """The points, without those of another job or of steps that a rollback took back."""
    if view.job is None or job is None or view.job.id != job.id:
        return ()
    return tuple(point for point in view.points if point.step <= job.step)


def _history(view: View, fact: History) -> View:
    if view.job is None or view.job.id != fact.job:
        return view
    told = tuple(Point(step.step, step.at, step.loss) for step in fact.steps)
    last = told[-1].step if told else -1
    newer = tuple(point for point in view.points if point.step > last)
    return msgspec.structs.replace(view, points=(told + newer)[-STEPS_KEPT:])


def _heard(view: View, change: Change) -> View:
    """A change that was told before (the stream was opened anew) changes nothing."""
    if change.kind == "gap":
        return msgspec.structs.replace(view, seq=change.seq, events=_kept(view.events, change))
    if change.seq < view.seq or (change.seq == view.seq and change in view.events):
        return view
    view = msgspec.structs.replace(view, seq=change.seq, events=_kept(view.events, change))
    if change.kind == "step":
        return _step(view, change)
    if change.kind == "incident":
        return _incident(view, change)
    return view


def _kept(events: tuple[Change, ...], change: Change) -> tuple[Change, ...]:
    """An ordinary step is a point of the curves; among the events it would push out all others."""
    if change.kind == "step" and change.level == "info":
        return events
    return (*events[-EVENTS_KEPT + 1 :], change)


class _StepData(msgspec.Struct):
    """``data`` of a change of kind step. JSON has no NaN: it arrives as null."""

    job: str
    step: int
    loss: float | None
    outcome: str
    epoch: int


class _IncidentData(msgspec.Struct):
    """``data`` of the change that closes an incident."""

    view: IncidentView


def _step(view: View, change: Change) -> View:
    data = _data(change, _StepData)
    job = view.job
    if data is None or job is None or data.job != job.id or data.outcome == "repeated":
        return view
    loss = math.nan if data.loss is None else data.loss
    before = tuple(point for point in view.points if point.step < data.step)
    after: tuple[Point, ...] = ()
    if (data.epoch, data.step) <= (job.epoch, job.step):
        # The answer that knows of later steps came first. Of this one it may not have brought the point.
        after = tuple(point for point in view.points if point.step > data.step)
        if data.step > job.step:
            return view  # taken back by a rollback
    else:
        job = msgspec.structs.replace(job, step=data.step, loss=loss, epoch=data.epoch)
    points = (*before, Point(data.step, change.at, loss), *after)[-STEPS_KEPT:]
    return msgspec.structs.replace(view, job=job, points=points)


def _incident(view: View, change: Change) -> View:
    """A closed incident comes with its whole view; an opened one is fetched."""
    data = _data(change, _IncidentData)
    if data is None:
        return view
    others = tuple(incident for incident in view.incidents if incident.id != data.view.id)
    known = len(others) < len(view.incidents)
    incidents = tuple(data.view if i.id == data.view.id else i for i in view.incidents)
    return msgspec.structs.replace(view, incidents=incidents if known else (*others, data.view))


def _data(change: Change, shape: type[Shape]) -> Shape | None:
    """``data`` of a change; None for changes of the same kind that carry something else."""
    try:
        return msgspec.json.decode(msgspec.json.encode(change.data), type=shape)
    except msgspec.ValidationError:
        return None
