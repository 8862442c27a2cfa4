"""Ends a job that was cancelled, once its state is in a checkpoint: no committed step is lost.

Owns when that is so. The wish is in the journal (``JobRecord.ending``), so a loss or a restart of the daemon
in between changes nothing: recovery takes its course, and the next boundary is asked again.
"""

from __future__ import annotations

from oobleckd.core import checkpoints, inputs, jobs, reading, room
from oobleckd.core.context import Core
from oobleckd.core.entries import PauseAsked
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord


def cancel(core: Core, job: JobRecord, *, discard: bool) -> str:
    """End ``job`` now where nothing would be lost, or all may be (``discard``); else once it has written a
    checkpoint. Returns what happens, for people.
    """
    run = core.run if core.run is not None and core.run.job is job else None
    if run is None:
        core.move(job, "cancel")
    elif discard or not _has_more(job):
        jobs.end(core, run, "cancel")
    else:
        # A step makes it, as the votes of one say that all stop and write: a checkpoint of where they stand
        # would be a second way. (D-checkpoints-019)
        if not job.ending:
            core.record(PauseAsked(job.id, paused=False, ending=True))
        if job.state == "paused":
            core.move(job, "unhold")
        run.trouble.retry_at = core.now
        return f"{job.id} ends with a checkpoint, {_when(run)}; {_now(job)}"
    kept = f"; the checkpoint of step {job.checkpoint_counters.step} stays" if job.checkpoint else ""
    return f"{job.id} is cancelled{kept}"


def flagged(core: Core, run: Run) -> tuple[bool, bool]:
    """Whether all are to hold after the present step, and to write a checkpoint of the state then: not while
    one is being written, and none while the disk refuses.
    """
    hold = run.job.ending and run.begun is None and not run.completing
    return hold, hold and not room.refuses(core, run)


def at_boundary(core: Core, run: Run) -> bool:
    """All hold: end the job, or wait for what is being written. False where it must go on before."""
    job = run.job
    if not job.ending or job.unsettled or checkpoints.saving(run):
        return job.ending and not job.unsettled
    if not checkpoints.saved(job):
        if room.refuses(core, run) and (trouble := room.view(run)) is not None:
            reason = f"was cancelled and waits to write its checkpoint: {trouble.text}"
            core.explain(job, f"{reason}; {_now(job)}", "checkpoint-unwritten")
            return True
        return False
    # As at the end of a job: --resume begins from what is known to come of the right text. Who was to say so
    # may have died since the others did.
    inputs.note_checks(core, run)
    if inputs.is_checked(job):
        jobs.end(core, run, "cancel")
    else:
        reading.leaves_unchecked(core, run, job.kept[-1])
    return True


def _has_more(job: JobRecord) -> bool:
    """Whether devices hold steps that no checkpoint has."""
    if job.layout is None or job.counters.step <= job.start.step:
        return False
    return not (checkpoints.saved(job) and inputs.is_checked(job))


def _when(run: Run) -> str:
    trouble = room.view(run)
    if trouble is not None:
        return f"as soon as there is room ({trouble.text})"
    if run.job.state == "waiting":
        return f"as soon as it makes a step ({run.job.reason})"
    return "after the present step" if run.begun is None else "after the one that is being written"


def _now(job: JobRecord) -> str:
    return f"`oobleckctl cancel {job.id} --discard` ends it at once, without one"
