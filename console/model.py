"""What the console knows: facts in, one frozen ``View`` out. Pure.

Owns how facts add up, and the questions that panels ask of the result (which job, how fresh). Does not know
what facts there are (``facts``), which events stay (``kept``), does not fetch (``feed``), does not draw
(``widgets``), and has no clock: every fact bears its time, every question that depends on time takes ``now``.
Times are POSIX seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal, assert_never

import msgspec

from oobleckd.console.facts import (
    AnyFact,
    Away,
    ChangesHeard,
    Fetched,
    JobChosen,
    PastHistory,
    QueryRefused,
    Rewound,
    Unshown,
    Watched,
)
from oobleckd.console.kept import kept
from oobleckd.protocol.api import Status
from oobleckd.protocol.changes import Change, IncidentBegan, IncidentOver, NodeLost, StepCommitted
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, PipelineView, TemplateView
from oobleckd.protocol.nodeviews import NodeLogView, NodeView
from oobleckd.protocol.parts import SPIKES
from oobleckd.protocol.watch import CurveView, GoodputView, ImpactView, LayerView, SampledSteps, ScheduleView

Link = Literal["waiting", "live", "stale", "replay"]

STEPS_KEPT = 600
IMPACTS_KEPT = 16
ENDED = frozenset({"done", "failed", "cancelled"})
# What is fetched for all screens; a refusal of one of these is about the daemon and not about a plan.
LISTS = ("status", "jobs", "nodes", "pipelines", "templates", "incidents")
# Of these lists, what is of one job alone.
OF_A_JOB = frozenset({"pipelines", "templates"})


# --------------------------------------------------------------------------- the view


class StepPoint(msgspec.Struct, frozen=True):
    """A committed step (the first is 1): when, and with which loss (NaN where it is no number). ``skipped``:
    it made no update.
    """

    step: int
    at: float
    loss: float
    skipped: bool = False


class Tape(msgspec.Struct, frozen=True):
    """Of a picture of the past: how far it reaches, and whether time goes on. ``sampled``: when steps with
    known op times began.
    """

    begins: float
    until: float
    playing: bool
    sampled: tuple[float, ...] = ()


class View(msgspec.Struct, frozen=True):
    """Everything that the console shows.

    ``heard_at`` is when the daemon last answered (0: never). ``jobs`` are all that there are, ``chosen`` the
    one that somebody wants to see ("": whichever is at work), ``job`` the one that is seen; ``num_queued``:
    how many others wait. ``points`` are the newest committed steps of ``job``, ``curve`` its run from the
    first step on, ``evaluations`` its newest ones, ``log`` the newest lines of a node, ``events`` the newest
    changes, ``seq`` the number of the newest one.
    ``problem``: why it is not live, or why a moment of the past is not shown. ``schedule`` is measured,
    ``modelled`` of the plan in force; ``refused`` names questions that had no answer, and why. ``tape`` is
    there while the past is shown.
    """

    link: Link = "waiting"
    heard_at: float = 0.0
    problem: str = ""
    hint: str = ""
    answers: bool = False
    status: Status | None = None
    job: JobView | None = None
    jobs: tuple[JobView, ...] = ()
    chosen: str = ""
    num_queued: int = 0
    nodes: tuple[NodeView, ...] = ()
    pipelines: tuple[PipelineView, ...] = ()
    templates: tuple[TemplateView, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    points: tuple[StepPoint, ...] = ()
    events: tuple[Change, ...] = ()
    seq: int = -1
    schedules: SampledSteps | None = None
    schedule: ScheduleView | None = None
    modelled: ScheduleView | None = None
    layers: tuple[LayerView, ...] = ()
    goodput: GoodputView | None = None
    curve: CurveView | None = None
    evaluations: tuple[EvaluationView, ...] = ()
    impacts: tuple[ImpactView, ...] = ()
    log: NodeLogView | None = None
    refused: tuple[tuple[str, str], ...] = ()
    tape: Tape | None = None

    @property
    def own_incidents(self) -> tuple[IncidentView, ...]:
        """The incidents of the job that is shown; of all, while none is."""
        if self.job is None:
            return self.incidents
        return tuple(each for each in self.incidents if each.job in {self.job.id, ""})

    @property
    def incident(self) -> IncidentView | None:
        """The newest incident of the job that is shown, an open one before any that is over."""
        own = self.own_incidents
        found = [incident for incident in own if incident.open] or own
        return found[-1] if found else None

    def impact(self, nodes: Iterable[str]) -> ImpactView | None:
        """What would follow without ``nodes``, where that is known."""
        wanted = tuple(sorted(nodes))
        return next((impact for impact in self.impacts if tuple(sorted(impact.nodes)) == wanted), None)

    def refusal(self, what: str) -> str:
        """Why a question has no answer; "" where it has one, or was not asked yet."""
        return dict(self.refused).get(what, "")

    @property
    def best_rate(self) -> tuple[float, float]:
        """The most samples a second that were measured, and when (POSIX seconds); 0 where nobody says."""
        if self.goodput is None or self.job is None or self.goodput.best_step_s <= 0:
            return 0.0, 0.0
        batch = self.job.spec.batch_sizes.size(max(0, self.job.step - 1))
        return batch / self.goodput.best_step_s, self.goodput.best_at

    @property
    def plan_share(self) -> float:
        """What the plan does of what the best plan of all nodes that joined would, both modelled; 0 where
        nobody says.
        """
        if self.goodput is None or not self.goodput.plan_step_s:
            return 0.0
        return self.goodput.best_plan_step_s / self.goodput.plan_step_s

    def clock(self, now: float) -> float:
        """The time that the picture shows: ``now`` while it is live, else when the daemon was last heard."""
        return now if self.link == "live" else self.heard_at

    def age_s(self, now: float) -> float:
        """How old the picture is, in seconds."""
        return max(0.0, now - self.heard_at) if self.heard_at else 0.0


def shown_job(jobs: Iterable[JobView], chosen: str = "") -> JobView | None:
    """The job that the screens are about: the ``chosen`` one, by its id; else the one at work, else the next
    in the queue, else the last.
    """
    known = tuple(jobs)
    if found := next((job for job in known if chosen and job.id == chosen), None):
        return found
    at_work = [job for job in known if job.state not in ENDED and job.state != "queued"]
    queued = [job for job in known if job.state == "queued"]
    return next(iter(at_work or queued or known[-1:]), None)


def identity(job: JobView) -> tuple[str, float]:
    """What a job is known by: its id is a name and a number, which a fresh state folder gives again."""
    # By the id alone a new job was drawn over an old one's curves until it had overtaken them.
    # (D-console-013)
    return job.id, job.submitted_at


def is_other_history(before: JobView | None, jobs: Iterable[JobView]) -> bool:
    """Whether these are the jobs of another cluster: a daemon never forgets a job."""
    return before is not None and identity(before) not in map(identity, jobs)


def _same(before: JobView | None, job: JobView | None) -> bool:
    return before is not None and job is not None and identity(before) == identity(job)


# --------------------------------------------------------------------------- the fold


def fold(view: View, facts: Iterable[AnyFact]) -> View:
    """``view`` after ``facts``, in their order."""
    for fact in facts:
        match fact:
            case Fetched():
                view = _fetched(view, fact)
            case JobChosen():
                view = _chosen(view, fact.job)
            case PastHistory():
                view = _history(view, fact)
            case ChangesHeard():
                view = _heard(_died_since(view, fact.change), fact.change)
            case Away():
                view = _away(view, fact)
            case Watched():
                view = _watched(view, fact)
            case QueryRefused():
                others = tuple(pair for pair in view.refused if pair[0] != fact.what)
                view = msgspec.structs.replace(view, refused=(*others, (fact.what, fact.problem)))
            case Rewound():
                view = _rewound(view, fact)
            case Unshown():
                view = msgspec.structs.replace(view, link="replay", problem=fact.problem, hint=fact.hint)
            case _:
                assert_never(fact)
    return view


def _away(view: View, fact: Away) -> View:
    """The last picture stays what it was: of the past, old, or none."""
    link: Link = "replay" if view.tape is not None else "stale" if view.heard_at else "waiting"
    return msgspec.structs.replace(
        view, link=link, problem=fact.problem, hint=fact.hint, answers=fact.answers
    )


def _fetched(view: View, fact: Fetched) -> View:
    told = {name for name in LISTS if getattr(fact, name) is not None}
    if fact.chosen != view.chosen:
        told -= OF_A_JOB
    answers = {name: getattr(fact, name) for name in told}
    if fact.jobs is not None:
        job = _not_overtaken(view.job, shown_job(fact.jobs, view.chosen))
        queued = sum(other.state == "queued" and (job is None or other.id != job.id) for other in fact.jobs)
        answers |= {"job": job, "num_queued": queued, "points": _still_valid(view, job)}
        answers |= _outdated(view, job, answers.get("pipelines"))
        if is_other_history(view.job, fact.jobs):
            answers |= {"events": (), "seq": -1}
    refused = answers.pop("refused", view.refused)
    return msgspec.structs.replace(
        view, link="live", heard_at=fact.at, problem="", hint="", answers=False,
        refused=_without(refused, told), **answers,
    )  # fmt: skip


# A console that follows what is at work has nothing to say of a queue; one that stays with what was chosen
# must not mix two jobs' answers. (D-console-016)
def _chosen(view: View, chosen: str) -> View:
    """Another job: of the one before nothing stays, and what is asked of this one is on its way."""
    job = shown_job(view.jobs, chosen)
    if _same(view.job, job):
        return msgspec.structs.replace(view, chosen=chosen)
    queued = sum(other.state == "queued" and (job is None or other.id != job.id) for other in view.jobs)
    return msgspec.structs.replace(
        view, chosen=chosen, job=job, num_queued=queued, points=(), pipelines=(), templates=(),
        **_outdated(view, job, None),
    )  # fmt: skip


def _without(refused: tuple[tuple[str, str], ...], answered: Collection[str]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in refused if pair[0] not in answered)


def _outdated(view: View, job: JobView | None, pipelines: tuple[PipelineView, ...] | None) -> dict[str, Any]:
    """What was answered of another job, or of a plan that is no more."""
    before = view.job
    if before is None:
        return {}
    same_plan = pipelines is None or pipelines == view.pipelines
    if _same(before, job) and job is not None and before.epoch == job.epoch and same_plan:
        return {}
    lists = tuple(pair for pair in view.refused if pair[0] in LISTS)
    of_plan: dict[str, Any] = {"modelled": None, "impacts": (), "refused": lists}
    if _same(before, job):
        return of_plan
    return of_plan | {
        "schedules": None,
        "schedule": None,
        "layers": (),
        "goodput": None,
        "curve": None,
        "evaluations": (),
    }


def _watched(view: View, fact: Watched) -> View:
    if fact.job and view.job is not None and fact.job != view.job.id:
        return view
    names = ("schedules", "schedule", "modelled", "layers", "goodput", "curve", "evaluations", "log")
    answers = {name: value for name in names if (value := getattr(fact, name)) is not None}
    answered = set(answers)
    if fact.impact is not None:
        others = tuple(impact for impact in view.impacts if impact.nodes != fact.impact.nodes)
        answers["impacts"] = (*others, fact.impact)[-IMPACTS_KEPT:]
        answered.add("impact")
    return msgspec.structs.replace(view, refused=_without(view.refused, answered), **answers)


def _rewound(view: View, fact: Rewound) -> View:
    """The picture of a moment; its ``link`` says that it is none of now."""
    if fact.start:
        view = fold(View(), fact.start)
    view = msgspec.structs.replace(view, link="replay", problem="", hint="")
    for change in fact.changes:
        view = _heard(_died(view, change), change)
    tape = Tape(fact.begins, fact.until, fact.playing, fact.sampled)
    return msgspec.structs.replace(view, heard_at=fact.at, tape=tape)


def _died_since(view: View, change: Change) -> View:
    """A loss that is newer than all answers: the list of a large cluster comes seconds later."""
    return _died(view, change) if change.at > view.heard_at else view


def _died(view: View, change: Change) -> View:
    """Between two lists of the nodes: who died is known from the change alone."""
    lost = change.data
    if not isinstance(lost, NodeLost):
        return view
    said: dict[str, Any] = {"state": "lost", "reason": lost.cause, "cause": lost.code}
    nodes = tuple(
        msgspec.structs.replace(node, **said) if node.name == lost.node else node for node in view.nodes
    )
    return msgspec.structs.replace(view, nodes=nodes)


def _not_overtaken(before: JobView | None, job: JobView | None) -> JobView | None:
    """``job``, but with the newer step where events have overtaken the answer."""
    if before is None or job is None or not _same(before, job) or before.epoch != job.epoch:
        return job
    if before.step <= job.step:
        return job
    return msgspec.structs.replace(job, step=before.step, loss=before.loss)


def _still_valid(view: View, job: JobView | None) -> tuple[StepPoint, ...]:
    """The points, without those of another job or of steps that a rollback took back."""
    if job is None or not _same(view.job, job):
        return ()
    return tuple(point for point in view.points if point.step <= job.step)


def _history(view: View, fact: PastHistory) -> View:
    if view.job is None or view.job.id != fact.job:
        return view
    told = tuple(StepPoint(step.step, step.at, step.loss, step.outcome == "skipped") for step in fact.steps)
    last = told[-1].step if told else -1
    newer = tuple(point for point in view.points if point.step > last)
    refused = _without(view.refused, {"steps"})
    return msgspec.structs.replace(view, points=(told + newer)[-STEPS_KEPT:], refused=refused)


def _heard(view: View, change: Change) -> View:
    """A change that was told before (the stream was opened anew) changes nothing."""
    if change.kind == "gap":
        events = (
            view.events if change.seq >= view.seq else ()
        )  # else the numbers are those of another cluster
        return msgspec.structs.replace(view, seq=change.seq, events=kept(events, change))
    if change.seq < view.seq or (change.seq == view.seq and _was_told(view.events, change)):
        return view
    view = msgspec.structs.replace(view, seq=change.seq, events=kept(view.events, change))
    match change.data:
        case StepCommitted():
            return _step(view, change.at, change.data)
        case IncidentOver():
            return _recovered(view, change.data.view)
        case IncidentBegan() if view.link == "replay":  # else it is fetched
            return _opened(view, change.at, change.data)
        case _:
            return view


def _was_told(events: tuple[Change, ...], change: Change) -> bool:
    """Whether it is among the newest ones; a notice has the number of the change before it."""
    return change in takewhile(lambda each: each.seq >= change.seq, reversed(events))


_number = attrgetter("step")  # by which points are in order


def _step(view: View, at_s: float, data: StepCommitted) -> View:
    job = view.job
    if job is None or data.job != job.id or data.outcome == "repeated":
        return view
    loss = math.nan if data.loss is None else data.loss
    at = bisect_left(view.points, data.step, key=_number)
    before, after = view.points[:at], view.points[at:at]
    if (data.epoch, data.step) <= (job.epoch, job.step):
        # The answer that knows of later steps came first. Of this one it may not have brought the point.
        after = view.points[bisect_right(view.points, data.step, lo=at, key=_number) :]
        if data.step > job.step:
            return view  # taken back by a rollback
    else:
        skipped = job.skipped_in_row + 1 if data.outcome == "skipped" else 0
        total = job.steps_skipped + (skipped > 0)
        job = msgspec.structs.replace(
            job, step=data.step, loss=loss, epoch=data.epoch, steps_skipped=total, skipped_in_row=skipped,
            steps_spiked=job.steps_spiked + (data.cause in SPIKES),
        )  # fmt: skip
    point = StepPoint(data.step, at_s, loss, data.outcome == "skipped")
    points = (*before, point, *after)[-STEPS_KEPT:]
    return msgspec.structs.replace(view, job=job, points=points)


def _recovered(view: View, over: IncidentView) -> View:
    """A closed incident comes with its whole view."""
    others = tuple(incident for incident in view.incidents if incident.id != over.id)
    known = len(others) < len(view.incidents)
    incidents = tuple(over if i.id == over.id else i for i in view.incidents)
    return msgspec.structs.replace(view, incidents=incidents if known else (*others, over))


def _opened(view: View, at_s: float, began: IncidentBegan) -> View:
    if any(incident.id == began.incident for incident in view.incidents):
        return view
    job, step = (view.job.id, view.job.step + 1) if view.job is not None else ("", 0)
    incident = IncidentView(
        began.incident,
        job,
        began.cause,
        began.nodes,
        at_s,
        began.epoch,
        step,
        open=True,
        phases=(),
        total_s=0.0,
        reason="",
    )
    return msgspec.structs.replace(view, incidents=(*view.incidents, incident))
