"""Ends a job when too many steps in a row were skipped, since their loss or a gradient was not finite or they
were spikes, and says why.

A pure function of the rounds that were committed, so a daemon that was away or restarted comes to the same
end, at the same step. The devices count as well, and hold there by themselves
(``oobleckd.worker.training.executor``).
"""

from __future__ import annotations

import math
import statistics

from oobleckd.core import jobs
from oobleckd.core.context import Core
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.protocol.job import stops
from oobleckd.words import count, loss, noun, plain, short, why_skipped

# No checkpoint is written of where a job stopped: the weights are most likely those that diverged, and
# --resume takes the newest. One that was begun before is waited for. (D-training-003)
_SPIKED_HINT = 'look at the data of these steps (data show), or set train.on_spike = "skip"'
PATIENCE_S = 600.0
"""For the last good checkpoint: a disk that is full may never have it."""


def ends(core: Core) -> bool:
    """End the active job where too many steps in a row were skipped; True while that waits for a checkpoint
    from before them, which is still being written.
    """
    run = core.run
    if run is None or not run.job.spec.stopped_by(run.job.counters):
        return False
    if _is_written(core, run):
        return True
    job = run.job
    if stops(job.counters, job.spec.max_skipped, 0):
        jobs.fail(core, job, _sentence(job), f"{_first_look_at(job)}; {_kept(job)}", "not-finite")
    else:
        jobs.fail(core, job, _spiked(job), f"{_SPIKED_HINT}; {_kept(job)}", "spikes")
    return False


def at_the_end(job: JobRecord) -> str:
    """What a job that is done has to say of its steps; "" where all of them made an update."""
    skipped = job.counters.skipped
    return (
        f"{skipped} of {count(job.counters.step, 'step')} {noun(skipped, 'was')} skipped: "
        f"{why_skipped(skipped, job.counters.spiked)}"
        if skipped
        else ""
    )


def _is_written(core: Core, run: Run) -> bool:
    since = run.job.steps[-1].at if run.job.steps else core.now
    return (run.begun is not None or bool(run.completing)) and core.now < since + PATIENCE_S


def _spiked(job: JobRecord) -> str:
    train, newest = job.spec.train, job.steps[-1]
    if newest.cause == "loss-spike":
        times, median = short(train.spike_factor), loss(statistics.median(job.counters.recent))
        limit = f"more than {times} times the median of the last {train.spike_window}, {median}"
    else:
        limit = f"and train.spike_grad_norm is {plain(train.spike_grad_norm)}"
    return f"{_row(job)}: loss {loss(newest.loss)}, gradient norm {short(newest.grad_norm)}, {limit}"


def _row(job: JobRecord) -> str:
    row, last = job.counters.skipped_in_row, job.counters.step
    return f"{count(row, 'step')} in a row {noun(row, 'was')} skipped, {last - row + 1} to {last}"


def _sentence(job: JobRecord) -> str:
    last_loss = job.steps[-1].loss if job.steps else math.nan
    what = "with gradients that are not finite" if math.isfinite(last_loss) else "which is not finite"
    return f"{_row(job)}: loss {loss(last_loss)}, {what}"


def _first_look_at(job: JobRecord) -> str:
    """The likeliest reasons, by what the job says."""
    spec = job.spec
    if job.counters.applied == job.start.applied and (spec.model.checkpoint or job.origin != "init"):
        where = job.origin if job.origin != "init" else spec.model.checkpoint
        return f"no update was made before: look for weights that are not finite in {where}"
    knobs = [f"a smaller optimizer.lr than {plain(spec.optimizer.lr)}"]
    if not spec.optimizer.clip_norm:
        knobs.append("optimizer.clip_norm = 1.0")
    if not spec.warmup_steps:
        knobs.append("optimizer.warmup_steps")
    if spec.train.precision != "fp32":
        knobs.append('train.precision = "fp32"')
    return f"try {', '.join(knobs[:-1])} or {knobs[-1]}" if len(knobs) > 1 else f"try {knobs[0]}"


def _kept(job: JobRecord) -> str:
    """Where to go on from."""
    good = [kept for kept in job.kept if not kept.counters.skipped_in_row]
    if not good:
        return (
            "there is no checkpoint from before them"
            if job.origin == "init"
            else f"it began from {job.origin}"
        )
    return f"the last checkpoint from before them is {_named(good[-1])}"


def _named(kept: KeptCheckpoint) -> str:
    return f"{kept.directory}, of step {kept.counters.step}"
