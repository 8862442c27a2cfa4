"""Steps and evaluations of a job, wherever they are: the newest in memory, the others in the journal.

Reads the journal in a thread, since a page of it takes milliseconds. Owns how the two are put together; what
is in memory is the core's (``state``), the file is the journal's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

import msgspec

from oobleckd.core.apply import step_of
from oobleckd.core.entries import Evaluated, StepEntry
from oobleckd.core.evaluations import EvalResult, result_of
from oobleckd.core.state import JobRecord, Step
from oobleckd.protocol.api import CurveBin
from oobleckd.protocol.watch import CurveView

DEFAULT_BINS, MAX_BINS = 200, 2000
_decode = msgspec.msgpack.Decoder(StepEntry).decode
_decode_evaluated = msgspec.msgpack.Decoder(Evaluated).decode


class StepStore(Protocol):
    """What is needed of the journal."""

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        """The entries of steps ``first`` to ``last``, so many at most, in order: of each the newest."""

    def evaluations(self, job: str, steps: Sequence[int]) -> list[bytes]:
        """Of evaluations after so many ``steps`` the entries of their newest rounds, in order."""

    def curve(self, job: str, until: int, num_bins: int) -> Sequence[CurveBin]:
        """All steps before ``until``, in so many bins at most."""


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


async def curve(store: StepStore, job: JobRecord, num_bins: int) -> CurveView:
    """The whole run of the job."""
    step = job.counters.step
    bins = await asyncio.to_thread(store.curve, job.id, step, num_bins)
    return CurveView(job.id, step, tuple(bins))


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
