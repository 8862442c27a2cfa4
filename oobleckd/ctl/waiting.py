"""Waiting for a job: the verb ``wait`` and the loop that ``submit --wait`` and ``verify`` share.

The job's view is asked for a few times a second: it alone says what is so, it costs a millisecond, and a
change between two looks cannot be missed as one between a look and a subscription can. A daemon that goes
away meanwhile is waited for, because training goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import get_args

import click

from oobleckd.client import Client
from oobleckd.ctl.connect import connected
from oobleckd.ctl.liveline import followed, live_line
from oobleckd.ctl.names import job_argument
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import CAUSES, NOT_FOUND, TIMED_OUT, Failure, emit_item, fail, note
from oobleckd.host.program import Seconds
from oobleckd.protocol.jobviews import JobState, JobView
from oobleckd.unixhttp import ClientError, Unreachable
from oobleckd.words import being, seconds, skipped

FINAL: tuple[JobState, ...] = ("done", "failed", "cancelled")
_BEFORE_A_PLAN: tuple[JobState, ...] = ("profiling", "planning")
_LOOK_EVERY_S = 0.2
_PLANNED_S = 300.0  # a model is measured first, layer by layer
_SHORT_S, _SURE_S = 30.0, 5.0
"""So long it is waited for data that is being prepared; and until what is left is no guess any more."""


class TimedOut(Exception):
    """The condition did not come true in time; ``job`` is how it was last seen."""

    def __init__(self, job: JobView | None) -> None:
        super().__init__("timed out")
        self.job = job


def views(client: Client, job: str, timeout_s: float | None, *, patient: bool = True) -> Iterator[JobView]:
    """The job again and again, until the caller has seen enough. ``patient``: also while the daemon is away.
    Raises TimedOut.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    view: JobView | None = None
    while True:
        try:
            view = client.job(job)
        except Unreachable:
            if view is None or not patient:
                raise
        else:
            yield view
        if deadline is not None and time.monotonic() >= deadline:
            raise TimedOut(view)
        time.sleep(_LOOK_EVERY_S)


def until_final(client: Client, job: str, told: Callable[[JobView], None] = lambda _view: None) -> JobView:
    """Wait until the job is done, failed or cancelled. ``told`` hears every look."""
    for view in views(client, job, None):
        told(view)
        if view.state in FINAL:
            return view
    raise AssertionError("views never ends by itself")


def until_planned(client: Client, job: str) -> JobView | None:
    """The job once it is planned, or known to wait, to have failed or to have its data prepared for a while;
    None where that takes too long, or the daemon is away: the job goes on without us.
    """
    began_s = time.monotonic()
    try:
        for view in views(client, job, _PLANNED_S, patient=False):
            if view.state == "preparing" and not _takes_long(view, time.monotonic() - began_s):
                continue
            if view.state not in _BEFORE_A_PLAN:
                return view
    except (TimedOut, ClientError):
        pass
    return None


def _takes_long(view: JobView, waited_s: float) -> bool:
    """Whether its data is prepared for long enough that somebody goes and does something else."""
    if view.preparing is None:
        return True
    return waited_s > (_SURE_S if view.preparing.left_s > _SHORT_S else _SHORT_S)


Condition = Callable[[JobView], bool]


def condition_of(text: str) -> Condition:
    """``step=N``, ``state=S``, ``recovered`` or ``incidents=N``. Raises click.UsageError."""
    name, _, value = text.partition("=")
    match name:
        case "step" if value.isdigit():
            return lambda job: job.step >= int(value)
        case "state" if value in get_args(JobState):
            return lambda job: job.state == value
        case "state":
            raise click.UsageError(f"no state {value!r}; states: {', '.join(get_args(JobState))}")
        case "recovered" if not value:
            return lambda job: job.state in {"running", "done"}
        case "incidents" if value.isdigit():
            return lambda job: job.incidents >= int(value) and job.state in {"running", "done"}
        case _:
            raise click.UsageError(
                f"cannot wait for {text!r}; say step=N, state=STATE, recovered or incidents=N"
            )


def _has_open_incident(client: Client, job: JobView) -> bool:
    return any(incident.open and incident.job == job.id for incident in client.incidents())


@click.command()
@job_argument
@click.option(
    "--for", "what", required=True, metavar="WHAT", help="step=N, state=STATE, recovered or incidents=N."
)
@click.option("--timeout", "timeout_s", type=Seconds(), metavar="S", help="Give up after so many seconds.")
@connected
def wait(client: Client, job: str, what: str, timeout_s: float | None) -> None:
    """Wait until JOB has committed a step, is in a state, has no recovery open (recovered), or has
    come through at least N recoveries (incidents=N).

    Ends with 3 when it can no longer come true (with 6, 7 or 8 where the job failed by what these say), with
    124 when the time is up.
    """
    condition_of(what)  # what is typed wrong is told before anything else
    view = followed(job, lambda: _until(client, job, what, timeout_s))
    if wants_json():
        emit_item("Job", view)
    if view.steps_skipped:
        said = skipped(view.steps_skipped, view.steps_spiked)
        note(f"{view.name} {being(view.state)} at step {view.step}: {said}")


def _until(client: Client, job: str, what: str, timeout_s: float | None) -> JobView:
    """The job once ``what`` is so; a terminal has a line of how far it is until then. Raises Failure."""
    holds = condition_of(what)
    closed = what.startswith(("recovered", "incidents"))
    try:
        with live_line() as show:
            for view in views(client, job, timeout_s):
                show(view)
                if holds(view) and not (closed and _has_open_incident(client, view)):
                    return view
                if view.state in FINAL:
                    fail(f"{view.name} {being(view.state)} at step {view.step}; {what} will not come true",
                         view.reason or f"`oobleckctl describe job {view.id}` says more",
                         CAUSES.get(view.cause, NOT_FOUND))  # fmt: skip
    except TimedOut as error:
        seen = f"; it {being(error.job.state)} at step {error.job.step}" if error.job else ""
        hint = f"`oobleckctl describe job {job}` says what it does; wait again, for as long as it takes"
        raise Failure(
            f"{job}: no {what} within {seconds(timeout_s or 0.0)}{seen}", hint, TIMED_OUT
        ) from error
    raise AssertionError("views never ends by itself")
