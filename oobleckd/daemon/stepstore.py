"""Steps and evaluations of a job, wherever they are: the newest in memory, the others in the journal.

Reads the journal in a thread, since a page of it takes milliseconds. Owns how the two are put together; what
is in memory is the core's (``state``), the file is the journal's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from oobleckd.core.apply import step_of
from oobleckd.core.entries import Evaluated, StepEntry
from oobleckd.core.evaluations import EvalResult, result_of
from oobleckd.core.state import JobRecord, Step
from oobleckd.core.view import evaluation_view
from oobleckd.daemon.curves import CurveQuestion
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.jobviews import CurveBin
from oobleckd.protocol.watch import CurveMark, CurveView

DEFAULT_BINS, MAX_BINS = 200, 2000
_decode = msgspec.msgpack.Decoder(StepEntry).decode
_decode_evaluated = msgspec.msgpack.Decoder(Evaluated).decode


class StepStore(Protocol):
    """What is needed of the journal."""

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        """The entries of steps ``first`` to ``last``, so many at most, in order: of each the newest."""

    def evaluations(self, job: str, steps: Sequence[int]) -> list[bytes]:
        """Of evaluations after so many ``steps`` the entries of their newest rounds, in order."""

    def curve(self, question: CurveQuestion) -> Sequence[CurveBin]:
        """The curve that is asked for."""


async def read(store: StepStore, job: JobRecord, first: int, count: int) -> list[Step]:
    """``count`` steps of the job from ``first`` on, or as many as there are."""
    # A page of the journal takes milliseconds, in which the loop could not hear heartbeats. (D-daemon-026)
    first = max(first, job.start.step)
    while True:
        newest, last = in_memory(job, first, count), before_memory(job)
        if first > last:
            return newest
        history = job.rolled_back_at
        older = await asyncio.to_thread(in_journal, store, job.id, first, last, count)
        if job.rolled_back_at is history:  # else these may be steps that were given up meanwhile
            return [*older, *newest][:count]


async def read_evaluations(store: StepStore, job: JobRecord, first: int, count: int) -> list[EvalResult]:
    """``count`` evaluations of the job from that after ``first`` steps on, or as many as there are."""
    while True:
        known, history = job.evaluations.results, job.rolled_back_at
        newest = [each for each in known if each.step >= first]
        last = known[0].step - 1 if known else _evaluated_upto(job)
        # When there is one follows from the job, so each is found by its step, whatever lies between.
        due = job.spec.eval_rounds.due_steps(max(first, job.start.step), last)
        steps = list(itertools.islice(due, count))
        older = await asyncio.to_thread(store.evaluations, job.id, steps) if steps else []
        if job.rolled_back_at is history:  # else these may be of a history that was given up meanwhile
            entries = [_decode_evaluated(data) for data in older]
            return [*(result_of(entry) for entry in entries if entry.totals), *newest][:count]


def _evaluated_upto(job: JobRecord) -> int:
    """The last step behind which an evaluation can be over."""
    counters = job.counters
    return counters.step - 1 if job.spec.eval_rounds.evaluates(counters) else counters.step


async def curve(
    store: StepStore, job: JobRecord, num_bins: int, marks: Callable[[], Sequence[CurveMark]], *, log: bool
) -> CurveView:
    """The whole run of the job, and what happened to it: ``marks`` are asked for once the bins are known."""
    sequence = job.spec.train.sequence
    while True:
        step, history = job.counters.step, job.rolled_back_at
        question = CurveQuestion(job.id, job.start.step, step, num_bins, log, sequence)
        made = await asyncio.to_thread(store.curve, question)
        rounds, last = job.spec.eval_rounds, _evaluated_upto(job)
        steps = evaluated_steps(rounds, made, job.start.step, min(step, last))
        known = {each.step: each for each in job.evaluations.results}
        missing = [at for at in steps if at not in known]
        entries = await asyncio.to_thread(store.evaluations, job.id, missing) if missing else []
        if job.rolled_back_at is not history:  # these may be steps that were given up meanwhile
            continue
        found = known | {each.step: each for each in map(result_of, map(_decode_evaluated, entries))}
        shown = tuple(evaluation_view(found[at]) for at in steps if at in found)
        happened = tuple(mark for mark in marks() if job.start.step <= mark.step <= step)
        return CurveView(job.id, step, tuple(made), log, shown, happened)


def evaluated_steps(rounds: EvalRounds, made: Sequence[CurveBin], first: int, last: int) -> list[int]:
    """After how many steps the newest evaluation of each bin is. One that comes before a bin's first step is
    in it where it is in no bin before, and one behind the last bin is in that.
    """
    begins = [first, *(each.first for each in made[1:])]
    ends = [*(each.first - 1 for each in made[1:]), last]
    found = [rounds.newest_due(*pair) for pair in zip(begins, ends, strict=True)]
    return [step for step in found if step >= 0]


def before_memory(job: JobRecord) -> int:
    """The last step that is not in memory."""
    return (job.steps[0].step if job.steps else job.counters.step) - 1


def in_memory(job: JobRecord, first: int, count: int) -> list[Step]:
    """Those of ``read`` that are there."""
    begin = job.index_of(first)
    return job.steps[begin : begin + count]


def in_journal(store: StepStore, job: str, first: int, last: int, count: int) -> list[Step]:
    """Those of ``read`` that are not in memory. Takes a while."""
    return [step_of(_decode(data)) for data in store.steps(job, first, last, count)]
