"""Builds the message with which a device reports a committed round. Owns the message; when it is said is
``executor``'s.
"""

from __future__ import annotations

import time

from oobleckd.protocol.corruption import Fingerprints
from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.parts import Counters, Outcome, Vote
from oobleckd.worker.checkpointing.snapshot import Due, ledger_digest
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.round.round import RoundClock
from oobleckd.worker.round.weights import Weights
from oobleckd.worker.runtime.timing import DeviceTimer


def step_done(
    device: str,
    job_id: str,
    epoch: int,
    counters: Counters,
    vote: Vote,
    outcome: Outcome,
    rates: tuple[float, float],
    corpus: Corpus,
    weights: Weights,
    clock: RoundClock,
    timer: DeviceTimer,
    due: Due,
    *,
    taken_back: bool,
    fingerprints: Fingerprints | None = None,
) -> StepDone:
    """Of the round that ``counters`` begin, committed with ``vote``. ``rates``: gradient norm and learning
    rate; ``weights``: of the step's micro-batches; ``due``: what follows of checkpoints; ``taken_back``: an
    early update was in vain; ``fingerprints``: where they were asked for.
    """
    samples, ledger = ledger_digest(corpus, counters.step, vote.losses)
    return StepDone(
        device,
        job_id,
        epoch,
        counters,
        outcome,
        weights.mean(vote.losses),
        *rates,
        samples,
        ledger,
        time.perf_counter() - clock.began,
        sum((timer.seconds(stop) - timer.seconds(start) for start, stop in clock.busy), 0.0),
        clock.gradients,
        clock.forwards,
        early=clock.early,
        taken_back=taken_back,
        checkpoint=due.begins,
        skipped=due.skipped,
        fingerprints=fingerprints,
    )
