"""Evaluations of a job: what its rounds came to, put together, as the journal tells it.

Owns the sum over rounds, which is exact, and what of it is kept in memory. All results are in the journal,
with the entry of their last round, and read by range from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleckd.core.entries import Evaluated
from oobleckd.planner.costs.forward import forward_s
from oobleckd.planner.plan import Plan
from oobleckd.planner.profile import Profile
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.parts import Counters, EvalSum

KEPT_RESULTS = 512
"""Evaluations in memory, and as many least losses of each source: further back than that no rollback is
expected to go.
"""
_KEPT_ROUNDS = 256
"""Rounds whose sums a late report is compared with."""


class EvalResult(msgspec.Struct, frozen=True, gc=False):
    """An evaluation that is over: after ``step`` steps, a sum for each source. ``seconds``: of its rounds."""

    step: int
    sums: tuple[EvalSum, ...]
    epoch: int
    at: float
    seconds: float


class PartialSum(msgspec.Struct, frozen=True, gc=False):
    """What the rounds of an evaluation so far have found on a source: ``parts`` add up exactly to it."""

    parts: tuple[float, ...] = ()
    targets: int = 0

    def plus(self, more: EvalSum) -> PartialSum:
        """With those of one more round."""
        return PartialSum(_added(self.parts, more.loss_sum), self.targets + more.targets)


class Least(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A loss of a source after ``step`` steps that was less than all before it."""

    step: int
    loss: float


@dataclass(slots=True)
class Evaluations:
    """Of a job. ``partial``: source -> what the evaluation that is under way has found, in ``partial_s``
    seconds. ``results``: the newest, in order. ``least``: source -> losses that were the least so far, in
    order. ``told``: round -> its sums, of the newest. ``given_up``: step -> the result that a rollback took.
    """

    partial: dict[str, PartialSum] = field(default_factory=dict)
    partial_s: float = 0.0
    results: list[EvalResult] = field(default_factory=list)
    least: dict[str, list[Least]] = field(default_factory=dict)
    told: dict[int, tuple[EvalSum, ...]] = field(default_factory=dict)
    given_up: dict[int, tuple[EvalSum, ...]] = field(default_factory=dict)

    def totals(self, sums: Iterable[EvalSum], step_s: float) -> tuple[tuple[EvalSum, ...], float]:
        """The evaluation under way with a round of ``step_s`` seconds that found ``sums``: of each source,
        and its seconds.
        """
        found = self._with(sums)
        return tuple(
            EvalSum(source, math.fsum(each.parts), each.targets) for source, each in found.items()
        ), self.partial_s + step_s

    def add(self, entry: Evaluated) -> None:
        """One more round."""
        self.told[entry.counters.round] = entry.sums
        while len(self.told) > _KEPT_ROUNDS:
            del self.told[next(iter(self.told))]
        if not entry.totals:
            self.partial, self.partial_s = self._with(entry.sums), self.partial_s + entry.step_s
            return
        self._forget_partial()
        self.results.append(result_of(entry))
        del self.results[:-KEPT_RESULTS]
        for total in entry.totals:
            least = self.least.setdefault(total.source, [])
            if not least or total.loss < least[-1].loss:
                least.append(Least(entry.counters.step, total.loss))
                del least[:-KEPT_RESULTS]

    def rolled_back(self, counters: Counters) -> None:
        """Training goes on at ``counters``: what was found behind that is found again."""
        self._forget_partial()
        upto = counters.step if counters.evaluated else counters.step - 1
        gone = [each for each in self.results if each.step > upto]
        self.results = self.results[: len(self.results) - len(gone)]
        self.given_up |= {each.step: each.sums for each in gone}
        self.given_up = dict(sorted(self.given_up.items())[:KEPT_RESULTS])
        for least in self.least.values():
            while least and least[-1].step > upto:
                least.pop()

    def shelve(self) -> None:
        """Of a job that is over the last result is shown, and the least losses."""
        self.results, self.told, self.given_up = self.results[-1:], {}, {}
        self.least = {source: least[-1:] for source, least in self.least.items()}

    def _with(self, sums: Iterable[EvalSum]) -> dict[str, PartialSum]:
        found = dict(self.partial)
        for more in sums:
            found[more.source] = found.get(more.source, PartialSum()).plus(more)
        return found

    def _forget_partial(self) -> None:
        self.partial, self.partial_s = {}, 0.0


def mean_loss(sums: Sequence[EvalSum]) -> float:
    """Over the targets of all sources; 0 where they have none."""
    return math.fsum(each.loss_sum for each in sums) / (sum(each.targets for each in sums) or 1)


def result_of(entry: Evaluated) -> EvalResult:
    """The evaluation that ends with the round of ``entry``."""
    return EvalResult(entry.counters.step, entry.totals, entry.epoch, entry.at, entry.seconds)


def planned_s(rounds: EvalRounds, plan: Plan, profile: Profile) -> float:
    """Seconds of an evaluation under ``plan``, as modelled."""
    full = rounds.num_rounds - 1
    rest = rounds.total - full * rounds.per_step
    full_s = forward_s(plan, profile, rounds.per_step) if full else 0.0
    return full * full_s + forward_s(plan, profile, rest)


def planned_share(rounds: EvalRounds, each_s: float, step_s: float) -> float:
    """Of the time of a job without failures, where an evaluation takes ``each_s`` and a step of the whole
    global batch ``step_s``.
    """
    evaluations_s = rounds.num_evaluations * each_s
    total_s = evaluations_s + rounds.whole_steps * step_s
    return evaluations_s / total_s if total_s else 0.0


def begun_anew(rounds: EvalRounds, counters: Counters) -> Counters:
    """Where a state of ``counters`` goes on that is loaded: an evaluation that it was in the middle of begins
    anew.
    """
    # What its rounds had found was of memory that may be gone, and the loaded weights find it again, bit for
    # bit. To keep it with every checkpoint would save less than one evaluation. (D-daemon-030)
    return msgspec.structs.replace(counters, evaluated=0) if rounds.evaluates(counters) else counters


def same(one: Sequence[EvalSum], other: Sequence[EvalSum]) -> bool:
    """Whether they agree to the bit; two losses that are no numbers do."""
    return [_bits(each) for each in one] == [_bits(each) for each in other]


def _bits(each: EvalSum) -> tuple[str, str, int]:
    return each.source, each.loss_sum.hex(), each.targets


def _added(parts: tuple[float, ...], more: float) -> tuple[float, ...]:
    """``parts`` with ``more``: no two overlap, so they are few, and their sum is exact (Shewchuk 1997)."""
    if not math.isfinite(more + math.fsum(parts)):
        return (more + sum(parts),)
    found: list[float] = []
    for part in parts:
        large, small = (more, part) if abs(more) >= abs(part) else (part, more)
        total = large + small
        rest = small - (total - large)
        if rest:
            found.append(rest)
        more = total
    return (*found, more)
