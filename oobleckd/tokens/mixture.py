"""Which source sample n of a job is of, and the how-manieth of that source it is: a function of n, so that
nothing is kept from step to step.

Within a stage the order of sources repeats after as many samples as their weights, whole numbers, add up to.
One such period is Tijdeman's chairman assignment (1980, The chairman assignment problem): after every sample
each source has had its share to within less than one. Owns that, the stages, and what follows where a source
has reached its limit. Raises DataError.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oobleckd.protocol.job import Job
from oobleckd.protocol.mixtures import DataSource, millionths, smallest, weights_of
from oobleckd.tokens.errors import DataError
from oobleckd.words import count, noun, short

_MILLION = 1_000_000
_KEPT_PERIODS = 16


class MixPeriod:
    """The order of sources with ``weights``, whole numbers without a common divisor, one for each."""

    def __init__(self, weights: tuple[int, ...]) -> None:
        self.weights, self.length = weights, sum(weights)
        self.source = _chairmen(weights)
        self.rank = np.zeros(self.length, np.int64)
        for source, weight in enumerate(weights):
            self.rank[self.source == source] = np.arange(weight)

    def __call__(self, number: int) -> tuple[int, int]:
        """Source of sample ``number``, and how many of that one came before."""
        turn, at = divmod(number, self.length)
        source = int(self.source[at])
        return source, turn * self.weights[source] + int(self.rank[at])

    def counts(self, number: int) -> list[int]:
        """How many of the first ``number`` samples are of each source."""
        turn, rest = divmod(number, self.length)
        more = np.bincount(self.source[:rest], minlength=len(self.weights)).tolist()
        return [turn * weight + each for weight, each in zip(self.weights, more, strict=True)]

    def after(self, source: int, many: int) -> int:
        """The number of samples after which ``source`` has had ``many``, one or more."""
        turn, rank = divmod(many - 1, self.weights[source])
        at = int(np.flatnonzero(self.source == source)[rank])
        return turn * self.length + at + 1


class _Part(NamedTuple):
    """From sample ``first`` on ``period`` holds; ``had``: samples of each source before."""

    first: int
    period: MixPeriod
    had: tuple[int, ...]


class SourceLimit(NamedTuple):
    """Of a source: ``rows`` that are read at most (None: any number); ``reached``: the first sample at which
    it would be read from once more, where the job comes so far; ``drops``: the others have its share then.
    """

    rows: int | None
    drops: bool
    reached: int | None = None


class Mixture:
    """Sources of a job: ``stages`` has the first sample of each and its weights, ``limits`` one for each
    source; ``end``: samples of the job.
    """

    def __init__(
        self, stages: Sequence[tuple[int, tuple[int, ...]]], limits: Sequence[SourceLimit], end: int
    ) -> None:
        self.end, self.limits = end, list(limits)
        self.over: int | None = None
        """The first sample that no source is left for."""
        self._parts: list[_Part] = []
        first, had = 0, [0] * len(limits)
        borders = [*(begin for begin, _ in stages[1:]), end]
        for (_, weights), border in zip(stages, borders, strict=True):
            while first < min(border, end) and self.over is None:
                first = self._add(first, min(border, end), weights, had)
        self._firsts = [part.first for part in self._parts]

    def _add(self, first: int, border: int, weights: tuple[int, ...], had: list[int]) -> int:
        """A part from ``first`` on, up to ``border`` or to where a source has reached its limit. Returns
        where it ends.
        """
        left = {
            source: limit.rows - had[source]
            for source, limit in enumerate(self.limits)
            if limit.rows is not None and weights[source]
        }
        for source in (source for source, rows in left.items() if not rows):
            if self.limits[source].reached is None:
                self.limits[source] = self.limits[source]._replace(reached=first)
        now = tuple(0 if left.get(source) == 0 else weight for source, weight in enumerate(weights))
        if not any(now):
            self.over = first
            return border
        period = period_of(smallest(now))
        self._parts.append(_Part(first, period, tuple(had)))
        stop = min([border, *(first + period.after(source, rows) for source, rows in left.items() if rows)])
        had[:] = [one + more for one, more in zip(had, period.counts(stop - first), strict=True)]
        return stop

    def __call__(self, sample: int) -> tuple[int, int]:
        """Source of ``sample``, and how many of that one came before."""
        part = self._parts[bisect_right(self._firsts, sample) - 1]
        source, more = part.period(sample - part.first)
        return source, part.had[source] + more

    def counts(self, samples: int) -> list[int]:
        """How many of the first ``samples`` are of each source."""
        if not samples:
            return [0] * len(self.limits)
        part = self._parts[bisect_right(self._firsts, samples - 1) - 1]
        return [
            one + more for one, more in zip(part.had, part.period.counts(samples - part.first), strict=True)
        ]


def mixture_of(job: Job, rows: Sequence[int]) -> Mixture:
    """Of a ``job`` whose sources have so many ``rows``; their limits hold. Raises DataError."""
    sources, train, sizes = job.data.sources, job.train, job.batch_sizes
    made = planned(job, rows)
    for source, limit in zip(sources, made.limits, strict=True):
        if limit.reached is not None and not limit.drops:
            raise DataError(
                f"data.source {source.name!r}: reaches its limit of {_limit_words(source)} in step "
                f"{sizes.step_of(limit.reached) + 1:,} of {train.steps:,}",
                'raise the limit, make its weight smaller, or set at_limit = "drop": the others then have '
                "its share",
            )
    if made.over is not None:
        raise DataError(
            f"data.source: every source has reached its limit in step "
            f"{sizes.step_of(made.over) + 1:,} of {train.steps:,}",
            "raise a limit, or make train.steps smaller",
        )
    return made


def planned(job: Job, rows: Sequence[int]) -> Mixture:
    """The same, whether or not limits hold. Raises DataError where a source has no row."""
    data, train, sizes = job.data, job.train, job.batch_sizes
    for source, have in zip(data.sources, rows, strict=True):
        if not have:
            raise DataError(
                f"data.source {source.name!r}: has no whole sequence of {count(train.sequence, 'token')}",
                "name more text, or leave the source out",
            )
    stages = [(sizes.before(step - 1), weights) for step, weights in weights_of(data.sources, data.stage)]
    limits = [
        _limit_of(source, have, train.sequence) for source, have in zip(data.sources, rows, strict=True)
    ]
    return Mixture(stages, limits, sizes.before(train.steps))


def _limit_of(source: DataSource, rows: int, sequence: int) -> SourceLimit:
    most = [
        *([rows * (millionths(source.epochs) or 0) // _MILLION] if source.epochs else []),
        *([source.tokens // sequence] if source.tokens else []),
    ]
    return SourceLimit(min(most) if most else None, source.at_limit == "drop")


def _limit_words(source: DataSource) -> str:
    epochs = f"{short(source.epochs)} {noun(source.epochs, 'epoch')}" if source.epochs else ""
    tokens = count(source.tokens, "token") if source.tokens else ""
    return " or ".join(filter(None, (epochs, tokens)))


@lru_cache(_KEPT_PERIODS)
def period_of(weights: tuple[int, ...]) -> MixPeriod:
    """Remembered: a device opens the same job again and again."""
    return MixPeriod(weights)


def _chairmen(weights: tuple[int, ...]) -> npt.NDArray[Any]:
    """The source of each sample of a period.

    Of k sources with weights w, which add up to W, the j-th sample of one (from 0) may not come before n w -
    j W >= W / d, where d = 2 k - 2, and has to come while (n - 1) w - j W <= W (1 - 1 / d). Tijdeman: to take
    of those that may come the one that has to come first always works out, and the distances bound the error.
    """
    there = [(source, weight) for source, weight in enumerate(weights) if weight]
    total, twice = sum(weights), 2 * len(there) - 2
    if not twice:
        return np.full(total, there[0][0], np.uint8)
    made = np.empty(total, np.uint8)
    had = [0] * len(weights)
    waiting = [(-(-total // (twice * weight)), source) for source, weight in there]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    for number in range(1, total + 1):
        while waiting and waiting[0][0] <= number:
            _, source = heapq.heappop(waiting)
            last = ((twice - 1) * total + twice * total * had[source]) // (twice * weights[source]) + 1
            heapq.heappush(ready, (last, source))
        _, source = heapq.heappop(ready)
        made[number - 1] = source
        had[source] += 1
        may = -(-(total + twice * total * had[source]) // (twice * weights[source]))
        heapq.heappush(waiting, (may, source))
    return made
