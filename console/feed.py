"""What the console learns, and when it asks: the event stream and the answers of the API, turned into facts.

Two threads share one ``Feed``: ``follow`` reads the event stream, ``poll`` fetches. What an event may have
changed is fetched at once, the rest now and then; every fact goes to ``deliver`` in the thread that learnt
it. ``poll`` alone says whether the daemon is there. Owns no state of the picture (``model``) and no widget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from oobleckd.client import Client, Events
from oobleckd.console.asked import CURVE_BINS, ConsoleQueries, is_of_one_question
from oobleckd.console.facts import (
    AnyFact,
    Away,
    ChangesHeard,
    Fetched,
    PastHistory,
    QueryRefused,
    Wants,
    Watched,
)
from oobleckd.console.model import OF_A_JOB, STEPS_KEPT, identity, is_other_history, shown_job
from oobleckd.protocol.changes import Change
from oobleckd.protocol.jobviews import JobView
from oobleckd.unixhttp import ApiProblem, BadAnswer, ClientError, Unreachable

# How old an answer may get while no event touches it, in seconds; what grows with the cluster less often.
# Incidents are fetched all at once,
# and after a month they are many: each has its event when it begins and when it is over.
PERIODS_S = {
    "status": 2.0,
    "jobs": 2.0,
    "incidents": 30.0,
    "nodes": 4.0,
    "pipelines": 10.0,
    "templates": 30.0,
}
ALL = frozenset(PERIODS_S)
STEADY = frozenset({"status", "incidents"})  # no larger in a large cluster
# What a change of a kind may have changed. A step is in its event whole.
TOUCHES: dict[str, frozenset[str]] = {
    "step": frozenset(),
    "evaluation": frozenset({"jobs"}),
    "node": frozenset({"status", "nodes"}),
    "job": ALL - {"incidents"},
    "plan": ALL - {"status", "incidents"},
    "incident": frozenset({"jobs", "nodes", "incidents"}),
    "checkpoint": frozenset({"jobs"}),
    "audit": frozenset({"nodes", "jobs"}),
    "daemon": frozenset(),
    "gap": ALL,
}
# From so many nodes on all that is not steady is fetched less often, so that a large cluster costs no more
# bytes.
NODES_AT_FULL_RATE = 250
# Of a large cluster this is not fetched again within so many seconds of one at full rate, whatever happens in
# it: among two hundred changes
# a second there is always one that touches it.
LARGE = ALL - {"incidents"}
# In a shaken cluster some change always touches the lists of a thousand nodes. (D-console-011)
MIN_S = 0.5
SETTLE_S = 0.2  # Events come in bursts: one fetch for all of them.
OPEN_INCIDENT_S = 0.25  # The phases of an open incident grow while one looks.
# Changes that come one by one would wake a thread for each; so they are read for a moment, and then gather
# for a while that nobody sees.
READ_S, GATHER_S = 0.01, 0.1
RETRY_S = 0.5
STREAM_RETRY_S = 5.0  # It reconnects by itself; this is for answers that cannot be read.
CALL_TIMEOUT_S = 2.0


class Source(Protocol):
    """Where facts come from: ``threads`` are run, each in its own, and end soon after ``close``."""

    @property
    def threads(self) -> tuple[Callable[[], None], ...]:
        """What to run."""

    def want(self, wants: Wants) -> None:
        """What the screen in sight wants beyond the lists."""

    def close(self) -> None:
        """No more facts."""


class Feed:
    """Facts about the daemon behind ``client``, for ever, until ``close``."""

    def __init__(
        self,
        client: Client,
        deliver: Callable[[AnyFact], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._deliver = deliver
        self._clock = clock
        self._closed = threading.Event()
        self._kick = threading.Event()
        self._lock = threading.Lock()
        self._due = dict.fromkeys(ALL, 0.0)
        self._fetched_at = dict.fromkeys(ALL, 0.0)
        self._unread: set[str] = set()
        self._history_of: tuple[str, float] | None = None
        self._other_history = False
        self._stretch = 1.0
        self._rested_at = 0.0
        self._asked = ConsoleQueries(client)
        self._job: JobView | None = None
        self._chosen = ""
        self._plan: tuple[object, object] = (None, None)
        self._events: Events = client.events(0, on_link=self._on_link)

    @property
    def threads(self) -> tuple[Callable[[], None], ...]:
        """Reading the stream, and fetching."""
        return self.follow, self.poll

    def want(self, wants: Wants) -> None:
        """What the screen in sight wants beyond the lists; it is fetched at once, and of another job
        everything.
        """
        if wants.job != self._chosen:
            self._chosen = wants.job
            self._hasten(ALL, at_once=True)
        if self._asked.want(wants):
            self._kick.set()

    def close(self) -> None:
        """Both threads end soon."""
        self._closed.set()
        self._events.close()
        self._kick.set()

    # ------------------------------------------------------------------ the stream's thread

    def follow(self) -> None:
        """Read the event stream until ``close``. A stream that cannot be read is reopened after a delay."""
        while not self._closed.is_set():
            try:
                for change in self._events:
                    self._deliver(ChangesHeard(self._clock(), change))
                    self._touch(change)
                    self._gather()
            except ClientError as error:
                now = self._clock()
                change = Change(self._events.last or 0, now, "console", "warn", error.problem, ())
                self._deliver(ChangesHeard(now, change))
                self._closed.wait(STREAM_RETRY_S)
                self._events = self._client.events(self._events.last, on_link=self._on_link)
            if self._other_history:
                self._begin_anew()

    def _begin_anew(self) -> None:
        """The stream of another cluster, from its first change on: numbers that were heard of the one before
        say nothing of this one.
        """
        self._other_history = False
        now = self._clock()
        said = "another cluster: its changes from the beginning"
        self._deliver(ChangesHeard(now, Change(0, now, "gap", "info", said, ())))
        self._events = self._client.events(0, on_link=self._on_link)

    def _gather(self) -> None:
        """A short rest now and then, while more changes arrive."""
        if time.monotonic() - self._rested_at >= READ_S:
            self._closed.wait(GATHER_S)
            self._rested_at = time.monotonic()

    def _touch(self, change: Change) -> None:
        if change.kind == "gap":
            self._forget_history()
        self._asked.touch(change.kind)
        if touched := TOUCHES.get(change.kind, ALL):
            self._hasten(touched)

    def _on_link(self, up: bool) -> None:
        """The stream noticed something; ``poll`` looks at once what it is."""
        if up:
            self._forget_history()
        self._hasten(ALL, at_once=True)

    def _hasten(self, names: Iterable[str], *, at_once: bool = False) -> None:
        with self._lock:
            for name in names:
                wait_s = MIN_S * self._stretch if name in LARGE and self._stretch > 1 and not at_once else 0.0
                self._due[name] = min(self._due[name], self._fetched_at[name] + wait_s)
        self._kick.set()

    def _forget_history(self) -> None:
        self._history_of = None

    # ------------------------------------------------------------------ the polling thread

    def poll(self) -> None:
        """Fetch what is due until ``close``."""
        while not self._closed.is_set():
            self._kick.clear()
            try:
                self._fetch()
                self._fetch_asked()
            except ClientError as error:
                answers = not isinstance(error, Unreachable)
                self._deliver(Away(self._clock(), error.problem, error.hint, answers))
                self._hasten(ALL, at_once=True)
                self._closed.wait(RETRY_S)
            else:
                self._rest()

    def _rest(self) -> None:
        with self._lock:
            first = min(self._due.values())
        first = min(first, self._asked.due_at())
        self._kick.wait(max(0.0, first - self._clock()))
        self._closed.wait(SETTLE_S)

    def _fetch(self) -> None:
        now, chosen = self._clock(), self._chosen
        with self._lock:
            due = [name for name in PERIODS_S if self._due[name] <= now]
            self._due |= {name: now + self._period_s(name) for name in due}
            self._fetched_at |= dict.fromkeys(due, now)
        answers, refused = self._answers(due, chosen)
        if answers:
            self._deliver(Fetched(self._clock(), chosen=chosen, **answers))
        for name, error in refused.items():
            self._deliver(QueryRefused(self._clock(), name, error.problem))
        if "nodes" in answers:
            self._stretch = max(1.0, len(answers["nodes"]) / NODES_AT_FULL_RATE)
            self._asked.stretch = self._stretch
        self._notice_plan(answers, chosen)
        if "jobs" in answers:
            self._notice_job(answers["jobs"], chosen)
        if any(incident.open for incident in answers.get("incidents", ())):
            with self._lock:
                self._due["incidents"] = min(self._due["incidents"], now + OPEN_INCIDENT_S)

    def _answers(self, due: Iterable[str], chosen: str) -> tuple[dict[str, Any], dict[str, ClientError]]:
        """By name what was answered, and what could not be. Raises where this version can read nothing at all
        of what it asked last.
        """
        answers: dict[str, Any] = {}
        refused: dict[str, ClientError] = {}
        for name in due:
            try:
                of = (chosen,) if chosen and name in OF_A_JOB else ()
                answers[name] = getattr(self._client, name)(*of)
            except (ApiProblem, BadAnswer) as error:
                refused[name] = error
        self._unread = (self._unread - answers.keys()) | refused.keys()
        if refused and self._unread >= ALL:
            raise next(iter(refused.values()))
        return answers, refused

    def _notice_job(self, jobs: tuple[JobView, ...], chosen: str) -> None:
        """What is shown of a job, and whether it is one of another cluster."""
        if is_other_history(self._job, jobs):
            self._other_history = True
            self._events.close()
        self._job = shown_job(jobs, chosen)
        self._fetch_history(self._job)

    def _notice_plan(self, answers: dict[str, Any], chosen: str = "") -> None:
        """With another plan the model forgets what was asked of the one before, so that is asked again."""
        job = shown_job(answers["jobs"], chosen) if "jobs" in answers else None
        epoch = (identity(job), job.epoch) if job is not None else self._plan[0]
        plan = (epoch, answers.get("pipelines", self._plan[1]))
        if plan != self._plan:
            self._plan = plan
            self._asked.touch("plan")

    def _fetch_asked(self) -> None:
        for fact in self._asked.answers(self._job, self._clock()):
            self._deliver(fact)

    def _period_s(self, name: str) -> float:
        return PERIODS_S[name] * (1.0 if name in STEADY else self._stretch)

    def _fetch_history(self, job: JobView | None) -> None:
        """The curves of a job that is new here, or after changes were missed. Raises Unreachable."""
        if job is None or identity(job) == self._history_of:
            return
        self._history_of = identity(job)
        try:
            steps = self._client.steps(job.id, max(0, job.step - STEPS_KEPT))
        except ClientError as error:
            self._forget_history()
            if not is_of_one_question(error):
                raise
            self._deliver(QueryRefused(self._clock(), "steps", error.problem))
        else:
            self._deliver(PastHistory(self._clock(), job.id, steps))


def fetch_once(client: Client, now: float) -> tuple[AnyFact, ...]:
    """The facts of one moment, without threads. Raises what ``Client`` raises."""
    jobs = client.jobs()
    facts: list[AnyFact] = [
        Fetched(now, client.status(), jobs, client.nodes(), client.pipelines(), client.templates(),
                client.incidents()),
    ]  # fmt: skip
    job = shown_job(jobs)
    if job is not None:
        facts.append(PastHistory(now, job.id, client.steps(job.id, max(0, job.step - STEPS_KEPT))))
        if job.step:
            with suppress(ApiProblem):  # an older daemon has none
                facts.append(Watched(now, curve=client.curve(job.id, CURVE_BINS, scale="log")))
        if job.spec.eval.wanted:
            facts.append(Watched(now, evaluations=client.evaluations(job.id, last=CURVE_BINS)))
    facts += [ChangesHeard(now, change) for change in client.events(0, follow=False)]
    return tuple(facts)
