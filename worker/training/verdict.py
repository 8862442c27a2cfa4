"""What a try at a step comes to beyond what the votes say: whether it is a spike.

Owns the one place where devices ask ``protocol.spikes``, with the figures of a whole round. Every device has
all votes of the round and the same counters, so all come to the same.
"""

from __future__ import annotations

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters, Outcome, SkipCause, Vote
from oobleckd.protocol.spikes import counters_after, spike_of
from oobleckd.worker.round.update import global_norm
from oobleckd.worker.round.weights import WeightsOf
from oobleckd.worker.round_machine.machine import judged_by_votes


def judge(
    job: Job, weights: WeightsOf, was: Counters, vote: Vote, outcome: Outcome
) -> tuple[SkipCause, Counters]:
    """A ``Judge`` of the round machine. ``weights``: of the micro-batches of a step."""
    cause, after = judged_by_votes(was, vote, outcome)
    if job.train.on_spike == "ignore" or outcome not in {"applied", "skipped"}:
        return cause, after
    loss = weights(was.step).mean(vote.losses)
    if outcome == "applied":
        cause = spike_of(job, was, loss, global_norm(vote))
    return cause, counters_after(job, was, "skipped" if cause else outcome, cause, loss)
