"""A live run and a simulated one of the same events, stretch by stretch: steps, how long they took, and how late the first of them came.

Owns what is read off journals, and what a step takes besides its timeline as a live run shows it. Runs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from oobleckd.core.entries import AnyEntry, LayoutDeployed, RolledBack, StepEntry
from oobleckd.protocol.job import Job
from oobleckd.simulator.steps import Besides
from planner.profile import Profile

_WARM_UP = 2  # steps after a deployment in which memory is taken and links are made


@dataclass(frozen=True, slots=True)
class Stretch:
    """Between two events: steps that count at its end beyond those at its beginning (after a way back fewer than were made, or less than none),
    seconds of one (the median; 0.0: none was committed), and seconds from its beginning to the first commit.
    """

    steps: int
    step_s: float
    first_s: float


@dataclass(frozen=True, slots=True)
class Two:
    """The stretch that ``began`` with something at ``at_s``, as both had it."""

    began: str
    at_s: float
    live: Stretch
    simulated: Stretch


def steps_by(entries: Iterable[AnyEntry], when: float) -> int:
    """Committed by then, without those that were taken back."""
    steps = 0
    for entry in entries:
        if isinstance(entry, StepEntry) and entry.at <= when:
            steps = entry.counters.step + (entry.outcome != "repeated")
        elif isinstance(entry, RolledBack) and entry.at <= when:
            steps = entry.counters.step
    return steps


def stretch(entries: Sequence[AnyEntry], start: float, end: float) -> Stretch:
    """From ``start`` to ``end``, in the seconds of the entries. A round of a simulation may stand for many steps."""
    within = [
        at for at, entry in enumerate(entries) if isinstance(entry, StepEntry) and start < entry.at <= end
    ]
    rounds = [entry for at in within if isinstance(entry := entries[at], StepEntry)]
    # The first step is one that the event disturbed, where there are others.
    taken = [entry.step_s for entry in rounds[1:] or rounds]
    first_s = end - start
    if rounds:
        before = steps_by(entries[: within[0]], inf)
        more = max(0, rounds[0].counters.step - before)
        first_s = rounds[0].at - more * rounds[0].step_s - start
    return Stretch(
        steps_by(entries, end) - steps_by(entries, start), statistics.median(taken) if taken else 0.0, first_s
    )


@dataclass(frozen=True, slots=True)
class Overhead:
    """What steps of a live run take besides their timeline, as a simulation is given it (``oobleckd.simulator.costs``)."""

    commit_s: float
    sums_bytes_per_s: float


def interval_s(entries: Iterable[AnyEntry], until: float = inf) -> float:
    """Seconds from commit to commit before anything happens (the median). Raises StatisticsError where there are too few steps."""
    ends = [entry.at for entry in entries if isinstance(entry, StepEntry) and entry.at < until]
    return statistics.median(after - before for before, after in pairwise(ends[_WARM_UP:]))


def overhead(
    job: Job, profile: Profile, alone: Sequence[AnyEntry], entries: Sequence[AnyEntry], until: float
) -> Overhead:
    """Of a run whose first event is at ``until``, and of one pipeline by itself before it.

    A pipeline by itself has nobody to exchange sums with, so what its step takes besides the timeline is no matter of bytes. With
    that known the steps until the first event say how fast sums travel.
    """
    commit_s = max(0.0, interval_s(alone) - _deployed(alone).plan.step_s)
    deployed = _deployed(entries)
    exchange_s = interval_s(entries, until) - deployed.plan.step_s - commit_s
    num_bytes = Besides.of(job, profile, 0.0, 1.0).seconds(deployed.layout, frozenset())
    return Overhead(commit_s, num_bytes / exchange_s if exchange_s > 0.0 else inf)


def _deployed(entries: Iterable[AnyEntry]) -> LayoutDeployed:
    return next(entry for entry in entries if isinstance(entry, LayoutDeployed))
