"""How long steps took since the daemon's start, as a histogram that only grows: what /metrics has of them.

Owns the counts, of each job that made a step meanwhile. Edges are the same for all jobs, so that Prometheus
may add them up; ``StepTimes`` has edges that fit a job.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from oobleckd.core.entries import StepEntry

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


@dataclass(slots=True)
class StepsTook:
    """Of a job. ``within[i]``: steps that took at most ``BUCKETS_S[i]`` and more than the bucket before it,
    the last one those of more than all; ``sum_s`` of all.
    """

    within: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0


@dataclass(slots=True)
class StepSeconds:
    """By job."""

    jobs: dict[str, StepsTook] = field(default_factory=dict)

    def note(self, entries: Iterable[msgspec.Struct]) -> None:
        """Of entries that go into the journal those of steps; a round that is repeated is none."""
        for entry in entries:
            if isinstance(entry, StepEntry) and entry.outcome != "repeated":
                took = self.jobs.setdefault(entry.job, StepsTook())
                took.within[bisect_left(BUCKETS_S, entry.step_s)] += 1
                took.sum_s += entry.step_s
