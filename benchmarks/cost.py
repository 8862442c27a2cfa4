"""What the loss of a process cost, and sums over several: pure, the same for every system."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Cost:
    """One kill. All times in seconds, from the kill; definitions in benchmarks/README.md.

    ``step_s`` is the normal step before it. ``samples_short``: samples missing from the batches of committed
    steps until the job was whole again after ``whole_s``. ``redone_share``: of the interrupted step's work,
    what gradients were computed again; 1 where whole attempts are thrown away; ``forwards_share`` of its
    forward passes. ``phases``: seconds of each phase of the recovery. ``missing``: largest share of the
    devices that had no part in a committed step, and ``missing_s`` that share summed up over the time until
    the job was whole. ``copied_bytes``: state that devices sent each other.
    """

    step_s: float
    next_step_s: float
    steps_redone: int
    attempts_discarded: int
    samples_lost: int
    samples_short: int
    whole_s: float
    missing: float = 0.0
    missing_s: float = 0.0
    copied_bytes: int = 0
    redone_share: float | None = None
    forwards_share: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def again_share(self) -> float | None:
        """Of the interrupted step's work, what was done again: of a layer's, gradients are two thirds."""
        if self.redone_share is None or self.forwards_share is None:
            return None
        return (2 * self.redone_share + self.forwards_share) / 3

    @property
    def in_steps(self) -> float:
        """Time to the next committed step, in normal steps."""
        return self.next_step_s / self.step_s

    @property
    def stall_s(self) -> float:
        """Time lost: beyond the step that would have been committed anyhow."""
        return max(0.0, self.next_step_s - self.step_s)

    @property
    def cost_s(self) -> float:
        """Stall, and the capacity that was missing until the job was whole, in seconds of the whole job."""
        return self.stall_s + self.missing_s


def missing_of(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Largest missing share, and its sum over time, of (end, share of the devices that had no part in it) by
    step.
    """
    spans = [(later - earlier) * share for (earlier, _), (later, share) in pairwise(steps)]
    return max((share for _, share in steps), default=0.0), sum(spans)


@dataclass(frozen=True, slots=True)
class Summary:
    """Several kills of one system; counts are sums, ``median_*`` medians, ``worst_*`` the largest."""

    kills: int
    median_step_s: float
    median_next_step_s: float
    median_in_steps: float
    worst_in_steps: float
    median_stall_s: float
    worst_stall_s: float
    median_whole_s: float
    median_cost_s: float
    max_missing: float
    max_copied_bytes: int
    steps_redone: int
    attempts_discarded: int
    samples_lost: int
    samples_short: int
    median_redone: float | None = None
    median_forwards: float | None = None
    median_again: float | None = None
    median_phases: Mapping[str, float] = field(default_factory=dict)


def summarise(costs: Sequence[Cost]) -> Summary:
    """Over at least one kill."""
    return Summary(
        kills=len(costs),
        median_step_s=statistics.median(cost.step_s for cost in costs),
        median_next_step_s=statistics.median(cost.next_step_s for cost in costs),
        median_in_steps=statistics.median(cost.in_steps for cost in costs),
        worst_in_steps=max(cost.in_steps for cost in costs),
        median_stall_s=statistics.median(cost.stall_s for cost in costs),
        worst_stall_s=max(cost.stall_s for cost in costs),
        median_whole_s=statistics.median(cost.whole_s for cost in costs),
        median_cost_s=statistics.median(cost.cost_s for cost in costs),
        max_missing=max(cost.missing for cost in costs),
        max_copied_bytes=max(cost.copied_bytes for cost in costs),
        steps_redone=sum(cost.steps_redone for cost in costs),
        attempts_discarded=sum(cost.attempts_discarded for cost in costs),
        samples_lost=sum(cost.samples_lost for cost in costs),
        samples_short=sum(cost.samples_short for cost in costs),
        median_redone=_median(cost.redone_share for cost in costs),
        median_forwards=_median(cost.forwards_share for cost in costs),
        median_again=_median(cost.again_share for cost in costs),
        median_phases={
            phase: statistics.median(cost.phases.get(phase, 0.0) for cost in costs)
            for phase in dict.fromkeys(phase for cost in costs for phase in cost.phases)
        },
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
