"""Which checkpoints are due where nobody looks for spikes."""

from __future__ import annotations

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters, Vote, outcome_of
from oobleckd.worker.checkpointing.snapshot import Due, due_after


def due_of(job: Job, vote: Vote, was: Counters, *, at_end: bool = True) -> Due:
    """Of the boundary behind the round that ``was`` begin, committed with ``vote``."""
    following = was.after(outcome_of(vote, evaluates=job.eval_rounds.evaluates(was)))
    return due_after(job, vote, was, following, at_end=at_end)
