"""Estimates how often a job is hit, from what happened to it so far: for how long its next plan is likely to
stand.

Pure, and from the journal alone, so that a restarted daemon judges as the one before it. Simultaneous losses
are one. The same estimate serves ``cadence``, of losses that lead back to a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oobleckd.core.state import JobRecord, State
from oobleckd.planner.policy import HORIZON_STEPS

RECENT = 20
"""So many losses are looked back on: the weather changes."""
PRIOR_S = 6 * 3600.0
"""Between losses, where nothing is known yet: clusters of a few dozen nodes were reported between minutes
(spot) and weeks (owned).
"""
PRIOR_WEIGHT = 0.5
"""In losses. Less than one: the first loss says more than a guess."""


def mean_between_s(losses_at: Sequence[float], began_at: float, now: float) -> float:
    """Seconds between losses: of what was seen and of the guess the geometric mean, since it is the order of
    magnitude that nobody knows. But as long as it has been quiet it may stay quiet: losses come in bursts,
    and a mean over the last ones hardly tells that one is over.

    ``losses_at``: their times, ascending; ``began_at``: since when the job has trained.
    """
    recent = losses_at[-RECENT:]
    since = losses_at[-RECENT - 1] if len(losses_at) > RECENT else began_at
    elapsed_s = max(1.0, now - since)
    if not recent:
        return max(PRIOR_S, elapsed_s)
    # Orders of magnitude are averaged, since nobody knows even that. One estimate for plans and for
    # checkpoints: two would tell a user two numbers. (D-policies-018)
    share = PRIOR_WEIGHT / (len(recent) + PRIOR_WEIGHT)
    seen_s = elapsed_s / len(recent)
    # A way that was taken in a burst was kept long after it: on one trace adaptive stayed for 53 min in
    # steps of 24.6 s where new pipelines had 18.2 s. (D-policies-025)
    return max(float(PRIOR_S**share * seen_s ** (1 - share)), now - recent[-1])


def began_at(job: JobRecord) -> float:
    """Since when losses of ``job`` count: since it was first deployed."""
    return job.submitted_at if job.deployed_at is None else job.deployed_at


def horizon_steps(state: State, job: JobRecord, now: float) -> float:
    """Steps that are expected until the next loss, roughly: what is compared with it must not change with
    every step.
    """
    length_s = step_s(job)
    if not length_s:
        return HORIZON_STEPS
    losses_at = sorted(view.at for view in state.incidents.values() if view.job == job.id)
    return max(1.0, rough(mean_between_s(losses_at, began_at(job), now) / length_s))


def redo_s(job: JobRecord) -> float:
    """Seconds of training since the last checkpoint, or since the start, roughly."""
    since = job.checkpoint_counters.step if job.checkpoint else job.start.step
    return rough((job.counters.step - since) * step_s(job))


def rough(value: float) -> float:
    """The nearest of 1, 2, 5, 10, 20, 50, …; 0 of nothing."""
    if value <= 0.0:
        return 0.0
    # Rough, so that the choice is not asked again at every step. (D-policies-016)
    power = 10.0 ** math.floor(math.log10(value))
    return min((power * digit for digit in (1, 2, 5, 10)), key=lambda near: abs(math.log(near / value)))


def step_s(job: JobRecord) -> float:
    """Seconds of a normal step: as measured lately, else as modelled."""
    if job.step_s:
        ordered = sorted(job.step_s)
        return ordered[len(ordered) // 2]
    return job.plan.step_s if job.plan is not None else 0.0
