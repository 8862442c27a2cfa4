"""What the console learns, and when it asks: the event stream and the answers of the API, turned into facts.

Two threads share one ``Feed``: ``follow`` reads the event stream, ``poll`` fetches. What an event may have
changed is fetched at once, the rest now and then; every fact goes to ``deliver`` in the thread that learnt it.
``poll`` alone says whether the daemon is there. Owns no state of the picture (``model``) and no widget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from console.model import STEPS_KEPT, AnyFact, Away, Fetched, Heard, History, shown_job
from oobleckd.client import Client, Events
from oobleckd.protocol.api import Change, JobView
from oobleckd.unixhttp import ClientError

# How old an answer may get while no event touches it, in seconds; what grows with the cluster less often.
PERIODS_S = {"status": 2.0, "jobs": 2.0, "incidents": 2.0, "nodes": 4.0, "pipelines": 10.0, "templates": 30.0}
ALL = frozenset(PERIODS_S)
# What a change of a kind may have changed. A step is in its event whole.
TOUCHES: dict[str, frozenset[str]] = {
    "step": frozenset(),
    "node": frozenset({"status", "nodes", "incidents"}),
    "job": ALL,
    "plan": ALL - {"status"},
    "incident": frozenset({"jobs", "nodes", "incidents"}),
    "checkpoint": frozenset({"jobs"}),
    "audit": frozenset({"nodes", "jobs"}),
    "daemon": frozenset(),
    "gap": ALL,
}
# From so many nodes on all but the status is fetched less often, so that a large cluster costs no more bytes.
NODES_AT_FULL_RATE = 250
SETTLE_S = 0.2  # Events come in bursts: one fetch for all of them.
OPEN_INCIDENT_S = 0.25  # The phases of an open incident grow while one looks.
RETRY_S = 0.5
STREAM_RETRY_S = 5.0  # It reconnects by itself; this is for answers that cannot be read.
CALL_TIMEOUT_S = 2.0


class Source(Protocol):
    """Where facts come from: ``threads`` are run, each in its own, and end soon after ``close``."""

    @property
    def threads(self) -> tuple[Callable[[], None], ...]:
        """What to run."""

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
        self._history_of = ""
        self._stretch = 1.0
        self._events: Events = client.events(0, on_link=self._on_link)

    @property
    def threads(self) -> tuple[Callable[[], None], ...]:
        """Reading the stream, and fetching."""
        return self.follow, self.poll

    def close(self) -> None:
        """Both threads end soon."""
        self._closed.set()
        self._events.close()
        self._kick.set()

    # ------------------------------------------------------------------ the stream's thread

    def follow(self) -> None:
        """Read the event stream until ``close``. A stream that cannot be read is opened anew, in peace."""
        while not self._closed.is_set():
            try:
                for change in self._events:
                    self._deliver(Heard(self._clock(), change))
                    self._touch(change)
            except ClientError as error:
                now = self._clock()
                change = Change(self._events.last or 0, now, "console", "warn", error.problem, ())
                self._deliver(Heard(now, change))
                self._closed.wait(STREAM_RETRY_S)
                self._events = self._client.events(self._events.last, on_link=self._on_link)

    def _touch(self, change: Change) -> None:
        if change.kind == "gap":
            self._forget_history()
        if touched := TOUCHES.get(change.kind, ALL):
            self._hasten(touched)

    def _on_link(self, up: bool) -> None:
        """The stream noticed something; ``poll`` looks at once what it is."""
        if up:
            self._forget_history()
        self._hasten(ALL)

    def _hasten(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._due[name] = 0.0
        self._kick.set()

    def _forget_history(self) -> None:
        self._history_of = ""

    # ------------------------------------------------------------------ the polling thread

    def poll(self) -> None:
        """Fetch what is due until ``close``."""
        while not self._closed.is_set():
            self._kick.clear()
            try:
                self._fetch()
            except ClientError as error:
                self._deliver(Away(self._clock(), error.problem, error.hint))
                self._hasten(ALL)
                self._closed.wait(RETRY_S)
            else:
                self._rest()

    def _rest(self) -> None:
        with self._lock:
            first = min(self._due.values())
        self._kick.wait(max(0.0, first - self._clock()))
        self._closed.wait(SETTLE_S)

    def _fetch(self) -> None:
        now = self._clock()
        with self._lock:
            due = [name for name in PERIODS_S if self._due[name] <= now]
            self._due |= {name: now + self._period_s(name) for name in due}
        answers: dict[str, Any] = {name: getattr(self._client, name)() for name in due}
        if not due:
            return
        self._deliver(Fetched(self._clock(), **answers))
        if "nodes" in answers:
            self._stretch = max(1.0, len(answers["nodes"]) / NODES_AT_FULL_RATE)
        if "jobs" in answers:
            self._fetch_history(shown_job(answers["jobs"]))
        if any(incident.open for incident in answers.get("incidents", ())):
            with self._lock:
                self._due["incidents"] = min(self._due["incidents"], now + OPEN_INCIDENT_S)

    def _period_s(self, name: str) -> float:
        return PERIODS_S[name] * (1.0 if name == "status" else self._stretch)

    def _fetch_history(self, job: JobView | None) -> None:
        """The curves of a job that is new here, or after changes were missed."""
        if job is None or job.id == self._history_of:
            return
        self._history_of = job.id
        steps = self._client.steps(job.id, max(0, job.step - STEPS_KEPT))
        self._deliver(History(self._clock(), job.id, steps))


def fetch_once(client: Client, now: float) -> tuple[AnyFact, ...]:
    """The facts of one moment, without threads. Raises what ``Client`` raises."""
    jobs = client.jobs()
    facts: list[AnyFact] = [
        Fetched(now, client.status(), jobs, client.nodes(), client.pipelines(), client.templates(),
                client.incidents()),
    ]  # fmt: skip
    job = shown_job(jobs)
    if job is not None:
        facts.append(History(now, job.id, client.steps(job.id, max(0, job.step - STEPS_KEPT))))
    facts += [Heard(now, change) for change in client.events(0, follow=False)]
    return tuple(facts)
