"""What screens ask for beyond the lists: op times, layers, goodput, whole runs, what would follow. When to
ask, and what came back.

Only what the screen in sight wants is fetched: a schedule of a thousand devices is half a megabyte. A daemon
that does not know such a question is there all the same, so a refusal is a fact of its own and no absence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from oobleckd.client import Client
from oobleckd.console.facts import AnyFact, QueryRefused, Wants, Watched
from oobleckd.console.model import identity
from oobleckd.protocol.jobviews import JobView
from oobleckd.unixhttp import ClientError, Unreachable

# How old an answer may get while no event touches it, in seconds.
# Fetched only while a screen in sight shows them: a schedule of a thousand devices is half a megabyte. A
# refusal is a fact of its own, as the daemon is there. (D-console-005)
PERIODS_S = {
    "schedules": 2.0,
    "schedule": 2.0,
    "modelled": 60.0,
    "layers": 10.0,
    "goodput": 5.0,
    "curve": 15.0,
    "impact": 60.0,
    "log": 1.0,
}
TOUCHES: dict[str, frozenset[str]] = {
    "plan": frozenset({"schedules", "schedule", "modelled", "layers", "goodput", "impact"}),
    "node": frozenset({"layers", "impact"}),
    "incident": frozenset({"layers", "goodput", "curve"}),
    "evaluation": frozenset({"curve"}),
    "gap": frozenset(PERIODS_S),
}
# Nodes come and go in bursts, and for an answer about what would follow the daemon has to plan: not again
# within so many seconds. What is
# about another plan is asked at once.
# In a shaken cluster some change always touches these: the console would be the load. Who died is in the
# change itself and is shown at once. (D-console-011)
MIN_S = {"layers": 1.0, "goodput": 1.0, "curve": 5.0, "impact": 3.0}
AT_ONCE = frozenset({"plan", "gap"})
# A daemon that refused one of these, or took too long over it, is asked again, but not at the usual pace.
REFUSED_S = 15.0
LOG_LINES = 200
CURVE_BINS = 240  # as many as a wide panel has columns of dots


def is_of_one_question(error: ClientError) -> bool:
    """Whether the daemon is there all the same: it said no, or what nobody can read, or takes its time over
    this one question.
    """
    return not isinstance(error, Unreachable) or isinstance(error.__cause__, TimeoutError)


class ConsoleQueries:
    """The wishes of one console. ``want`` and ``touch`` may be called from any thread, ``answers`` from one.

    ``stretch``: how many times less often than usual, for large clusters.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._wants = Wants()
        self._due = dict.fromkeys(PERIODS_S, 0.0)
        self._asked_at = dict.fromkeys(PERIODS_S, 0.0)
        self.stretch = 1.0
        self._job, self._step, self._evaluates = "", 0, False
        self._of: tuple[str, float] | None = None
        self._newest = 0
        self._shown: tuple[str, int] = ("", 0)
        self._impacts: set[tuple[str, ...]] = set()

    def want(self, wants: Wants) -> bool:
        """Fetch ``wants`` from now on; whether anything in it is new."""
        with self._lock:
            if wants == self._wants:
                return False
            before, self._wants = self._wants, wants
            fresh = [name for name in ("modelled", "layers", "goodput", "curve") if _wanted(wants, name)]
            self._due |= {name: 0.0 for name in fresh if not _wanted(before, name)}
            self._due |= dict.fromkeys(("schedules", "schedule", "impact", "log"), 0.0)
            self._impacts &= set(wants.impacts)  # what is not kept in sight may have been dropped
            return True

    def touch(self, kind: str) -> None:
        """A change of ``kind`` was heard: what it touches is old."""
        touched = TOUCHES.get(kind, frozenset())
        with self._lock:
            for name in touched:
                wait_s = 0.0 if kind in AT_ONCE else MIN_S.get(name, 0.0) * self.stretch
                self._due[name] = min(self._due[name], self._asked_at[name] + wait_s)
            if "impact" in touched:
                self._impacts.clear()

    def due_at(self) -> float:
        """When there is something to fetch again, in POSIX seconds."""
        with self._lock:
            return min(
                (at for name, at in self._due.items() if _wanted(self._wants, name)), default=float("inf")
            )

    def answers(self, job: JobView | None, now: float) -> Iterator[AnyFact]:
        """What is due by ``now``, one fact each; after an answer that was too late the rest is left for the
        next time. Raises Unreachable.
        """
        self._notice(job, now)
        with self._lock:
            wants = self._wants
            due = [name for name in PERIODS_S if _wanted(wants, name) and self._due[name] <= now]
        for name in due:
            try:
                yield from self._answer(name, wants, now)
            except ClientError as error:
                if not is_of_one_question(error):
                    self._put_off(name, 0.0)
                    raise
                self._put_off(name, now + REFUSED_S)
                yield QueryRefused(now, name, error.problem)
                if isinstance(error, Unreachable):  # whether it is there at all, the lists say
                    return

    def _notice(self, job: JobView | None, now: float) -> None:
        """Of another job everything is asked at once; without one only what is of none."""
        if job is None:
            with self._lock:
                log_at = self._due["log"]
                self._due = {name: now + period_s for name, period_s in PERIODS_S.items()} | {"log": log_at}
            return
        if identity(job) != self._of:
            with self._lock:
                self._due = dict.fromkeys(PERIODS_S, 0.0)
                self._impacts.clear()
            self._of, self._job = identity(job), job.id
            self._newest, self._shown = 0, ("", 0)
        self._step, self._evaluates = job.step, job.spec.eval.wanted

    def _answer(self, name: str, wants: Wants, now: float) -> Iterator[AnyFact]:
        with self._lock:
            self._due[name] = now + PERIODS_S[name] * self.stretch
            self._asked_at[name] = now
        questions: dict[str, Callable[[Wants, float], Iterator[AnyFact]]] = {
            "schedules": self._schedules, "schedule": self._schedule, "modelled": self._modelled,
            "layers": self._layers, "goodput": self._goodput, "curve": self._curve, "impact": self._impact,
            "log": self._log,
        }  # fmt: skip
        yield from questions[name](wants, now)

    def _put_off(self, name: str, until: float) -> None:
        with self._lock:
            self._due[name] = until

    def _schedules(self, _wants: Wants, now: float) -> Iterator[AnyFact]:
        sampled = self._client.schedules(self._job)
        self._newest = sampled.steps[-1] if sampled.steps else 0
        yield Watched(now, schedules=sampled, job=self._job)

    def _schedule(self, wants: Wants, now: float) -> Iterator[AnyFact]:
        """The step that is looked at, once: what was measured does not change any more."""
        step = wants.step or self._newest
        if step and (self._job, step) != self._shown:
            found = self._client.schedule(self._job, step)
            self._shown = (self._job, step)
            yield Watched(now, schedule=found, job=self._job)

    def _modelled(self, _wants: Wants, now: float) -> Iterator[AnyFact]:
        yield Watched(now, modelled=self._client.schedule(self._job, modelled=True), job=self._job)

    def _layers(self, _wants: Wants, now: float) -> Iterator[AnyFact]:
        yield Watched(now, layers=self._client.layers(self._job), job=self._job)

    def _goodput(self, _wants: Wants, now: float) -> Iterator[AnyFact]:
        yield Watched(now, goodput=self._client.goodput(self._job), job=self._job)

    def _curve(self, _wants: Wants, now: float) -> Iterator[AnyFact]:
        """All of a job's steps, and what its evaluations found."""
        if self._step:
            yield Watched(now, curve=self._client.curve(self._job, CURVE_BINS, scale="log"), job=self._job)
        if self._evaluates:
            yield Watched(
                now, evaluations=self._client.evaluations(self._job, last=CURVE_BINS), job=self._job
            )

    def _impact(self, wants: Wants, now: float) -> Iterator[AnyFact]:
        """Each set of nodes once until the plan is another one: the daemon has to plan for it."""
        for nodes in wants.impacts:
            if nodes not in self._impacts:
                found = self._client.impact(self._job, nodes)
                self._impacts.add(nodes)
                yield Watched(now, impact=found, job=self._job)

    def _log(self, wants: Wants, now: float) -> Iterator[AnyFact]:
        yield Watched(now, log=self._client.node_log(wants.log, LOG_LINES))


def _wanted(wants: Wants, name: str) -> bool:
    match name:
        case "schedules" | "schedule":
            return wants.schedule
        case "impact":
            return bool(wants.impacts)
        case _:
            return bool(getattr(wants, name))
