"""A live run and a simulated one of the same events, stretch by stretch: steps, how long they took, and how
late the first of them came.

Owns what is read off journals, and what a step takes besides its timeline as a live run shows it. Runs
nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from oobleckd.core.entries import AnyEntry, CheckpointWritten, LayoutDeployed, RolledBack, StepEntry
from oobleckd.planner.profile import Profile
from oobleckd.protocol.job import Job
from oobleckd.simulator.steps import Besides

_WARM_UP = 2  # steps after a deployment in which memory is taken and links are made


@dataclass(frozen=True, slots=True)
class Stretch:
    """Between two events: steps that count at its end beyond those at its beginning (after a rollback fewer
    than were made, or less than none), seconds of one (the median; 0.0: none was committed), seconds from its
    beginning to the first commit, and how old the newest checkpoint was when it began (None: there was none).
    """

    steps: int
    step_s: float
    first_s: float
    checkpoint_s: float | None


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
        if isinstance(entry, StepEntry | RolledBack) and entry.at <= when:
            steps = _after(entry, steps)
    return steps


def _after(entry: AnyEntry, steps: int) -> int:
    """Steps committed after ``entry``, where it was so many before."""
    if isinstance(entry, StepEntry):
        return entry.counters.step + (entry.outcome != "repeated")
    return entry.counters.step if isinstance(entry, RolledBack) else steps


def stretch(entries: Sequence[AnyEntry], start: float, end: float) -> Stretch:
    """From ``start`` to ``end``, in the seconds of the entries. A round of a simulation may stand for many
    steps.
    """
    taken: list[float] = []
    first_s, steps = end - start, 0
    for entry in entries:
        before, steps = steps, _after(entry, steps)
        if not (isinstance(entry, StepEntry) and start < entry.at <= end):
            continue
        num_steps = max(1, steps - before)
        if not taken:
            first_s = entry.at - (num_steps - 1) * entry.step_s - start
        taken += [entry.step_s] * num_steps
    # The first step is one that the event disturbed, where there are others.
    step_s = statistics.median(taken[1:] or taken) if taken else 0.0
    written = [entry.at for entry in entries if isinstance(entry, CheckpointWritten) and entry.at <= start]
    return Stretch(
        steps_by(entries, end) - steps_by(entries, start),
        step_s,
        first_s,
        start - max(written) if written else None,
    )


@dataclass(frozen=True, slots=True)
class Overhead:
    """What steps of a live run take besides their timeline, as a simulation is given it
    (``oobleckd.simulator.costs``).
    """

    commit_s: float
    sums_bytes_per_s: float


def interval_s(entries: Iterable[AnyEntry], until: float = inf) -> float:
    """Seconds from commit to commit before anything happens (the median). Raises StatisticsError where there
    are too few steps.
    """
    ends = [entry.at for entry in entries if isinstance(entry, StepEntry) and entry.at < until]
    return statistics.median(after - before for before, after in pairwise(ends[_WARM_UP:]))


def overhead(
    job: Job, profile: Profile, alone: Sequence[AnyEntry], entries: Sequence[AnyEntry], until: float
) -> Overhead:
    """Of a run whose first event is at ``until``, and of one pipeline by itself before it.

    A pipeline by itself has nobody to exchange sums with, so what its step takes besides the timeline is no
    matter of bytes. With that known the steps until the first event say how fast sums travel.
    """
    commit_s = max(0.0, interval_s(alone) - _deployed(alone).plan.step_s)
    deployed = _deployed(entries)
    exchange_s = interval_s(entries, until) - deployed.plan.step_s - commit_s
    num_bytes = Besides.of(job, profile, 0.0, 1.0).seconds(deployed.layout, frozenset())
    return Overhead(commit_s, num_bytes / exchange_s if exchange_s > 0.0 else inf)


def _deployed(entries: Iterable[AnyEntry]) -> LayoutDeployed:
    return next(entry for entry in entries if isinstance(entry, LayoutDeployed))
