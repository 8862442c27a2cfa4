"""Whether a step whose loss and gradients are finite goes wrong all the same, and makes no update: its loss
is far above those before it, or its gradient norm beyond a limit.

Pure functions of the job, of what the round itself came to, and of ``Counters.recent``: the losses before it.
These travel with the counters, so whoever joins, resumes from a checkpoint, rolls back or repeats a round has
the same ones and comes to the same bits. Daemon and devices both ask here.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import SPIKES, Counters, Outcome, SkipCause


def spike_of(job: Job, was: Counters, loss: float, grad_norm: float) -> SkipCause:
    """Why the round that ``was`` begin is to make no update, "" where it may: its mean ``loss``, and the norm
    of its mean gradient before it is clipped, both finite.
    """
    train = job.train
    if train.on_spike == "ignore":
        return ""
    if 0 < train.spike_grad_norm < grad_norm:
        return "grad-norm"
    # Not before there are as many losses as were asked for: the first ones fall fast, and the median of two
    # or three says little.
    known = train.spike_factor > 0 and len(was.recent) == train.spike_window
    return "loss-spike" if known and loss > train.spike_factor * statistics.median(was.recent) else ""


def counters_after(job: Job, was: Counters, outcome: Outcome, cause: SkipCause, loss: float) -> Counters:
    """The counters after the round that ``was`` begin, whose mean loss is ``loss``."""
    after = was.after(outcome, spiked=cause in SPIKES)
    if job.train.on_spike == "ignore" or outcome not in {"applied", "skipped"} or not math.isfinite(loss):
        return after
    # The loss of a step that was skipped for it counts from then on, too: where the level has changed for
    # good the median follows, and the job goes on after half a window. (D-training-004)
    recent = (*was.recent, loss)[-job.train.spike_window :]
    return msgspec.structs.replace(after, recent=recent)


def resumed(job: Job, saved: Counters) -> Counters:
    """The counters with which ``job`` begins from a checkpoint of ``saved``: rounds are numbered anew, and
    whatever was skipped in a row is forgiven.
    """
    recent = () if job.train.on_spike == "ignore" else saved.recent[-job.train.spike_window :]
    return Counters(0, saved.step, saved.applied, spiked=saved.spiked, recent=recent)
