"""Verbs that change a job: ``submit``, ``pause``, ``resume``, ``cancel``, ``checkpoint``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import click
from msgspec import UNSET

from oobleckd.client import Client
from oobleckd.ctl.branch import LATEST, Origin, check, origin_of
from oobleckd.ctl.connect import connected
from oobleckd.ctl.evaluations import when_evaluated
from oobleckd.ctl.jobfiles import as_found, changed, existing, read_job, set_option
from oobleckd.ctl.liveline import followed, live_line, on_terminal
from oobleckd.ctl.look import look
from oobleckd.ctl.names import job_argument
from oobleckd.ctl.nodes import told
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import (
    CAUSES,
    FAILED,
    TIMED_OUT,
    USAGE,
    Failure,
    OutputLost,
    emit_fields,
    emit_item,
    emit_json,
    emit_line,
    fail,
    note,
)
from oobleckd.ctl.waiting import FINAL, TimedOut, until_final, until_planned, views
from oobleckd.host.hold import held
from oobleckd.host.program import Seconds
from oobleckd.protocol.batchramp import BatchRamp
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobparts import is_prepared, lacks_folder, parts_of, without_folders
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.requests import Accepted
from oobleckd.protocol.traits import COMPILER_HINT, lacking, no_compiler
from oobleckd.unixhttp import ClientError
from oobleckd.words import being, count, seconds, size, skipped

View = TypeVar("View")
_SAY_EVERY_S = 10.0  # how far its data is


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--resume", is_flag=False, flag_value=LATEST, default="", metavar="[DIR|JOB[@STEP]]",
    help="Start from a checkpoint folder, or from JOB's newest checkpoint, or the one after STEP steps. "
    "Without a value: the newest of the job of the same name.",
)  # fmt: skip
@click.option(
    "--if-new",
    is_flag=True,
    help="Hand in nothing where the same job, of this name, is here: done, or on its way. Prints its id.",
)
@click.option("--dry-run", is_flag=True, help="Look at the file, the model and the data, and stop.")
@set_option
@click.option(
    "--wait/--no-wait", "wait_", default=None,
    help="Stay until the job is over; exit 1, 6, 7 or 8 unless it is done. Or go at once, before it is "
    "planned.",
)  # fmt: skip
@connected
def submit(
    client: Client,
    file: Path | None,
    resume: str,
    if_new: bool,
    dry_run: bool,
    changes: tuple[str, ...],
    wait_: bool | None,
) -> None:
    """Hand in the job of FILE, a job.toml (-: stdin), or of --resume JOB. Prints the job's id.

    A process of its own looks at model and data first, as a node would. Then the job is submitted, and this
    waits until it is planned or queued: exit 2, with the reason, if it cannot be planned. Data that is not
    prepared yet is prepared by a node first; where that takes longer, this does not wait.
    """
    origin = origin_of(client, resume)
    job, file = _asked_for(file, origin, changes)
    here = _the_same(client, job) if if_new else None
    if here is not None:
        _go_by(client, here, wait_=wait_)
        return
    look(job, file, folder=not resume)  # else the checkpoint has the weights
    if origin is not None:
        check(origin, job, changes)
    if dry_run:
        _check_compilers(client, job, file)
        _show_plan(job, file)
        return
    answer = _submitted(client, job, origin, resume, file)
    if wait_:
        note(f"{job.name}: {answer.message or answer.id}")
        _end_with(followed(answer.id, lambda: until_over(client, answer.id)))
        return
    _say_submitted(answer.id, answer.message)
    if wait_ is None:
        _say_planned(answer.id, followed(answer.id, lambda: until_planned(client, answer.id)))


def _asked_for(file: Path | None, origin: Origin | None, changes: Sequence[str]) -> tuple[Job, Path]:
    """The job of ``file``, or without one that which it goes on from, and what errors call it."""
    if file is None and origin is None:
        fail("Missing argument 'FILE'.", "name a job.toml, or --resume JOB to go on with a job's own", USAGE)
    if file is None:
        assert origin is not None
        file = Path(origin.id)
        job = changed(origin.job, changes, file)
    else:
        job = read_job(file, changes)
    return as_found(job, file), file


def _submitted(client: Client, job: Job, origin: Origin | None, resume: str, file: Path) -> Accepted:
    if origin is not None:
        with held(Path(origin.place)):  # till a job is there that begins from it, which keeps it, too
            return client.submit(job, resume=origin.place)
    if resume and resume != LATEST:
        resume = existing("--resume", resume, file)
    return client.submit(job, resume=resume)


def _the_same(client: Client, job: Job) -> JobView | None:
    """The newest job with the name and all that is in ``job``, unless it has failed or was cancelled."""
    same = [view for view in client.jobs() if _alike(view.spec, job)]
    left = [view for view in same if view.state not in {"failed", "cancelled"}]
    return left[-1] if left else None


def _alike(one: Job, other: Job) -> bool:
    """Whether they are the same, but for prepared folders that one of them has yet to get."""
    if lacks_folder(one) or lacks_folder(other):
        one, other = without_folders(one), without_folders(other)
    return one == other


def _go_by(client: Client, here: JobView, *, wait_: bool | None) -> None:
    """As if ``here`` had just been submitted."""
    message = f"{here.id} is the same job, and {being(here.state)}"
    if wait_:
        note(message)
        _end_with(followed(here.id, lambda: until_over(client, here.id)))
        return
    _say_submitted(here.id, message)


def until_over(client: Client, job: str) -> JobView:
    """The same, with how far it is on a terminal; elsewhere, how far its data is until that is prepared."""
    said_s = time.monotonic()

    def told(view: JobView) -> None:
        nonlocal said_s
        show(view)
        if on_terminal() or view.state != "preparing" or time.monotonic() - said_s < _SAY_EVERY_S:
            return
        said_s = time.monotonic()
        note(f"{view.id} {being(view.state)}: {view.reason}")

    with live_line() as show:
        return until_final(client, job, told)


def _say_planned(job: str, view: JobView | None) -> None:
    """How far a job has come that was submitted; None: nobody says."""
    if view is None:
        note(f"nobody says yet how {job} is planned: `oobleckctl describe job {job}`")
    elif view.state == "failed":
        # As if it had been refused at once: what was submitted cannot run. (D-service-018)
        fail(f"{view.id} cannot be trained: {view.reason}", "mend that, and submit it again", USAGE)
    elif view.state == "cancelled":
        fail(f"{view.id} is cancelled", view.reason, FAILED)
    elif view.state == "waiting":
        note(f"{view.id} waits: {view.reason}")
    elif view.state == "preparing":
        note(f"{view.id} goes on by itself: {view.reason}")
        note("`oobleckctl get jobs` shows how far that is")


def _say_submitted(job: str, message: str) -> None:
    if wants_json():
        emit_json("Submitted", {"id": job, "message": message})
        return
    emit_line(job)
    if message:
        note(message)


def _end_with(view: JobView) -> None:
    failed = view.state != "done"
    with suppress(*((OSError, OutputLost) if failed else ())):  # the exit code says how it ended
        if wants_json():
            emit_item("Job", view)
        else:
            emit_line(view.id)
    if failed:
        fail(
            f"{view.name} {being(view.state)} at step {view.step}",
            view.reason,
            CAUSES.get(view.cause, FAILED),
        )
    note(done(view))


def done(view: JobView) -> str:
    """How a job ended that is done."""
    without = f"{skipped(view.steps_skipped, view.steps_spiked)}, " if view.steps_skipped else ""
    return (
        f"{view.name} is done: {count(view.step, 'step')}, {without}{count(view.incidents, 'incident')}, "
        f"{count(view.steps_lost, 'step')} lost"
    )


def _check_compilers(client: Client, job: Job, file: Path) -> None:
    """Whether the nodes can compile, where the job does and there is a daemon that knows them."""
    if not job.train.compile:
        return
    try:
        nodes = client.nodes()
    except ClientError:
        note("nobody says whether the nodes have a compiler: no daemon answers")
        return
    here = [node for node in nodes if node.state not in {"lost", "left", "draining", "drained"}]
    whys = {node.name: next(filter(None, map(no_compiler, node.traits)), "") for node in here}
    if problem := lacking(whys, ()):
        fail(f"{file}: {problem}", COMPILER_HINT, USAGE)


def _show_plan(job: Job, file: Path) -> None:
    if wants_json():
        emit_item("JobSpec", job)
        return
    train, memory, tolerance = job.train, job.resources.device_memory_bytes, job.fault_tolerance
    whole = "whole " if job.batch_sizes.ramp_steps else ""
    sequences = f"{count(train.global_batch, 'sequence')} of {count(train.sequence, 'token')}"
    emit_fields({
        "job": job.name,
        "file": str(file),
        "model": f"{job.model.family}{' from ' if job.model.checkpoint else ''}{job.model.checkpoint}",
        "data": job.data.words(),
        "prepared": _prepared(job),
        "steps": f"{train.steps:,} of {'up to ' if whole else ''}{sequences}",
        **({"evaluation": _evaluates(job)} if job.eval.wanted else {}),
        **({"batch ramp": _ramps_up(train.batch_ramp, job)} if train.batch_ramp is not UNSET else {}),
        "micro-batches": f"{job.num_micro_batches} of {train.micro_batch} a {whole}step",
        "survives": f"{count(tolerance.f, 'node')} lost at once (policy {tolerance.policy})",
        "memory": f"{size(memory)} a device" if memory else "all of each device",
        "exact": "yes" if train.exact else "no: verify cannot compare runs bit by bit",
        **({"compiled": "yes: with other bits than without"} if train.compile else {}),
    })  # fmt: skip
    note("valid; nothing was submitted")


def _ramps_up(ramp: BatchRamp, job: Job) -> str:
    """In words: from where, by how much, and until when."""
    sizes = job.batch_sizes
    end = f"all {job.train.global_batch:,} from step {sizes.ramp_steps + 1:,} on"
    if sizes.ramp_steps >= job.train.steps:
        end = f"and {sizes.size(job.train.steps - 1):,} in the last step, before the ramp is over"
    return f"{count(ramp.start, 'sequence')} at first, {ramp.increment:,} more at a time, {end}"


def _evaluates(job: Job) -> str:
    """On what, when, and what it costs, where a forward pass is taken for a third of a step's work."""
    rounds = job.eval_rounds
    forward = rounds.num_evaluations * rounds.total / 3
    share = forward / (forward + rounds.whole_steps * rounds.per_step)
    sequences = count(job.eval_micro_batches * job.train.micro_batch, "sequence")
    return (
        f"{sequences} of each of {', '.join(job.eval_sources)}, {when_evaluated(job.eval)}: "
        f"about {share:.1%} of the job's time"
    )


def _prepared(job: Job) -> str:
    if not is_prepared(job):
        return ""
    if lacks_folder(job):
        return "no: a node does that first"
    folders = [part.job.data.prepared for part in parts_of(job)]
    return ", ".join(filter(None, folders))


@click.command()
@job_argument
@connected
def pause(client: Client, job: str) -> None:
    """Stop JOB at the next step's boundary; its layers stay where they are."""
    told(client.control(job, "pause"))


@click.command()
@job_argument
@connected
def resume(client: Client, job: str) -> None:
    """Let the paused JOB go on."""
    told(client.control(job, "resume"))


@click.command()
@job_argument
@click.option("--discard", is_flag=True, help="End it at once, without a checkpoint of its last steps.")
@click.option("--wait", "wait_", is_flag=True, help="Stay until it is over.")
@connected
def cancel(client: Client, job: str, discard: bool, wait_: bool) -> None:
    """End JOB for good, with a checkpoint of its last step. Its checkpoints stay."""
    answer = client.control(job, "cancel", discard=discard)
    if not wait_:
        told(answer)
        return
    with live_line() as show:
        view = until_final(client, answer.id, show)
    if wants_json():
        emit_item("Job", view)
    kept = f"; its checkpoint: {view.checkpoint}" if view.checkpoint else "; it has no checkpoint"
    note(f"{view.id} {being(view.state)} at step {view.step}{kept}")


@click.command()
@job_argument
@click.option("--wait", "wait_", is_flag=True, help="Stay until it is complete, then print its folder.")
@click.option("--timeout", "timeout_s", type=Seconds(), default=600.0, show_default=True, metavar="S")
@connected
def checkpoint(client: Client, job: str, wait_: bool, timeout_s: float) -> None:
    """Write a checkpoint of JOB at the next step's boundary."""
    if not wait_:
        told(client.control(job, "checkpoint"))
        return
    try:
        view = new_checkpoint(client, client.job(job, unique=True), timeout_s)
    except TimedOut as error:
        hint = f"it comes at a step's boundary: `oobleckctl describe job {job}` says what holds that up"
        raise Failure(f"{job}: no checkpoint within {seconds(timeout_s)}", hint, TIMED_OUT) from error
    if wants_json():
        emit_json("Checkpoint", {"job": view.id, "path": view.checkpoint})
    else:
        emit_line(view.checkpoint)


def new_checkpoint(client: Client, before: JobView, timeout_s: float) -> JobView:
    """Ask for a checkpoint of a job and wait until there is a newer one than ``before`` had.
    Raises TimedOut.
    """
    client.control(before.id, "checkpoint")
    tried = before.checkpoint_trouble.tries if before.checkpoint_trouble is not None else 0
    for view in views(client, before.id, timeout_s):
        if view.checkpoint != before.checkpoint:
            return view
        trouble = view.checkpoint_trouble
        if trouble is not None and trouble.tries > tried:
            fail(
                f"{view.name}: {trouble.text}",
                "the job goes on and tries again; make room there, or mend what it says",
            )
        if view.state in FINAL:
            fail(f"{view.name} {being(view.state)}, and no checkpoint was written", view.reason)
    raise AssertionError("views never ends by itself")
