"""Builds the message with which a device reports a committed round. Owns the message; when it is said is
``executor``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from oobleckd.protocol.corruption import Fingerprints
from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.parts import Counters, EvalSum, Outcome, SkipCause, Vote
from oobleckd.worker import sums
from oobleckd.worker.checkpointing.snapshot import Due, ledger_digest
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.data.evaluation import EvalCorpus
from oobleckd.worker.messaging.messenger import NOTHING_SENT, SentCount
from oobleckd.worker.round.round import RoundClock
from oobleckd.worker.round.weights import Weights
from oobleckd.worker.runtime.timing import DeviceTimer
from oobleckd.worker.sharding.group import NOTHING_SHARED, GroupCount


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
    cause: SkipCause = "",
    fingerprints: Fingerprints | None = None,
    experts: Mapping[int, tuple[int, ...]] | None = None,
    sent: SentCount = NOTHING_SENT,
    group: GroupCount = NOTHING_SHARED,
) -> StepDone:
    """Of the round that ``counters`` begin, committed with ``vote``. ``rates``: gradient norm and learning
    rate; ``weights``: of the step's micro-batches; ``due``: what follows of checkpoints; ``taken_back``: an
    early update was in vain; ``fingerprints``: where they were asked for; ``experts``: tokens of each, of the
    layers that the device speaks for; ``sent``: of sums and means of gradients, and ``group``: within the
    shard group, since the round before.
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
        _busy_s(clock, timer),
        clock.gradients,
        clock.forwards,
        early=clock.early,
        taken_back=taken_back,
        checkpoint=due.begins,
        skipped=due.skipped,
        fingerprints=fingerprints,
        cause=cause,
        routers=vote.routers,
        experts=dict(experts or {}),
        gradient_messages=sent.messages,
        gradient_bytes=sent.num_bytes,
        gathered_bytes=group.gathered_bytes,
        shard_gradient_bytes=group.gradient_bytes,
        gather_wait_s=group.waited_s,
    )


def evaluation_done(
    device: str,
    job_id: str,
    epoch: int,
    counters: Counters,
    losses: Mapping[int, float],
    evaluation: EvalCorpus,
    numbers: Sequence[int],
    clock: RoundClock,
    timer: DeviceTimer,
    due: Due,
) -> StepDone:
    """Of the round that ``counters`` begin, which evaluates the micro-batches ``numbers`` of ``evaluation``:
    ``losses`` are by their places in it.
    """
    summed = {numbers[place]: loss * evaluation.targets[numbers[place]] for place, loss in losses.items()}
    targets = sum(evaluation.targets[number] for number in summed)
    return StepDone(
        device,
        job_id,
        epoch,
        counters,
        "evaluated",
        sums.added(summed.values()) / (targets or 1),
        0.0,
        0.0,
        0,
        "",
        time.perf_counter() - clock.began,
        _busy_s(clock, timer),
        clock.gradients,
        clock.forwards,
        checkpoint=due.begins,
        skipped=due.skipped,
        evaluated=eval_sums(evaluation, summed),
    )


def eval_sums(evaluation: EvalCorpus, summed: Mapping[int, float]) -> tuple[EvalSum, ...]:
    """By source, in the order in which the evaluation has them. ``summed``: micro-batch of ``evaluation`` ->
    its loss times its targets, a float64 without rounding.
    """
    of: dict[str, list[int]] = {}
    for number in sorted(summed):
        of.setdefault(evaluation.source_of(number), []).append(number)
    return tuple(
        EvalSum(
            source,
            sums.added(summed[number] for number in numbers),
            sum(evaluation.targets[number] for number in numbers),
        )
        for source, numbers in of.items()
    )


def _busy_s(clock: RoundClock, timer: DeviceTimer) -> float:
    return sum((timer.seconds(stop) - timer.seconds(start) for start, stop in clock.busy), 0.0)
