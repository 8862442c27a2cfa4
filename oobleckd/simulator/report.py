"""What is said of runs: one line for each policy, over all of its seeds, for people and as a document.

Owns the averages and the columns. The document is versioned like those of all verbs (``ctl.output``).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from oobleckd.simulator.account import CAUSES, Cause
from oobleckd.simulator.outcome import Outcome, Unable
from oobleckd.simulator.prices import Price
from oobleckd.simulator.runs import paired

MILLION = 1_000_000


class Cost(msgspec.Struct, frozen=True):
    """Dollars for the run, and for a million samples (0: none was committed)."""

    dollars: float
    per_million_samples: float


class RunLine(msgspec.Struct, frozen=True):
    """One seed."""

    seed: int
    trace: str
    samples: int
    of_ideal: float
    of_oracle: float
    losses: int
    plans: int
    rollbacks: int
    steps_lost: int


class PolicyLine(msgspec.Struct, frozen=True):
    """A policy over all seeds: means, and ``worst_of_ideal`` of them.

    ``useful``, ``lost``: shares of the live devices' time, which sum up to 1. ``of_ideal``: of what the live
    devices would commit as a part of a whole cluster; ``of_oracle``: of what the best plan for them would.
    """

    policy: str
    costs: str
    samples: float
    samples_per_s: float
    of_ideal: float
    worst_of_ideal: float
    of_oracle: float
    useful: float
    lost: dict[Cause, float]
    losses: float
    plans: float
    rollbacks: float
    steps_lost: float
    checkpoints: float
    node_hours: float
    events: float
    on_demand: Cost | None
    spot: Cost | None
    runs: tuple[RunLine, ...]


class Simulation(msgspec.Struct, frozen=True):
    """``job`` on ``num_nodes`` nodes (as many as there are at once at most). ``measured``: the profile was,
    and is no estimate. ``unable``: policies that cannot run it there, with the reason.
    """

    job: str
    device: str
    measured: bool
    num_nodes: int
    devices_per_node: int
    failures: str
    duration_s: float
    seeds: int
    price: Price | None
    policies: tuple[PolicyLine, ...]
    unable: tuple[Unable, ...] = ()


def lines_of(outcomes: Sequence[Outcome], price: Price | None) -> tuple[PolicyLine, ...]:
    """One line a policy, in the order in which they were asked."""
    return tuple(_line(policy, costs, runs, price) for (policy, costs), runs in paired(outcomes).items())


def _line(policy: str, costs: str, runs: Sequence[Outcome], price: Price | None) -> PolicyLine:
    live_s = sum(run.live_device_s for run in runs)
    lost: dict[Cause, float] = {
        cause: sum(run.lost_device_s[cause] for run in runs) / live_s for cause in CAUSES
    }
    samples, hours = fmean(run.samples for run in runs), fmean(run.node_hours for run in runs)
    return PolicyLine(
        policy=policy,
        costs=costs,
        samples=samples,
        samples_per_s=fmean(run.samples_per_s for run in runs),
        of_ideal=fmean(run.of_ideal for run in runs),
        worst_of_ideal=min(run.of_ideal for run in runs),
        of_oracle=fmean(run.of_oracle for run in runs),
        useful=sum(run.useful_device_s for run in runs) / live_s,
        lost=lost,
        losses=fmean(run.losses for run in runs),
        plans=fmean(run.plans for run in runs),
        rollbacks=fmean(run.rollbacks for run in runs),
        steps_lost=fmean(run.steps_lost for run in runs),
        checkpoints=fmean(run.checkpoints for run in runs),
        node_hours=hours,
        events=fmean(run.events for run in runs),
        on_demand=_cost(hours, price.on_demand if price else None, samples),
        spot=_cost(hours, price.spot if price else None, samples),
        runs=tuple(
            RunLine(
                run.seed, run.trace, run.samples, run.of_ideal, run.of_oracle, run.losses, run.plans,
                run.rollbacks, run.steps_lost
            )
            for run in runs
        ),
    )  # fmt: skip


def _cost(node_hours: float, dollars_an_hour: float | None, samples: float) -> Cost | None:
    if dollars_an_hour is None:
        return None
    dollars = node_hours * dollars_an_hour
    return Cost(dollars, dollars * MILLION / samples if samples else 0.0)


# ---------------------------------------------------------------------- as words

COLUMNS = ("POLICY", "SAMPLES/S", "IDEAL", "WORST", "ORACLE", "LOSSES", "PLANS", "STEPS LOST")
LOST_COLUMNS = ("POLICY", "USEFUL", *(cause.upper() for cause in CAUSES))
COST_COLUMNS = ("POLICY", "NODE HOURS", "ON-DEMAND", "SPOT", "ON-DEMAND/1M SAMPLES", "SPOT/1M SAMPLES")


def name_of(line: PolicyLine | Unable) -> str:
    """The policy, and whose costs it has unless they are ours."""
    return line.policy if line.costs == "ours" else f"{line.policy} ({line.costs})"


def row(line: PolicyLine) -> tuple[str, ...]:
    """A line of the table of policies, for ``COLUMNS``."""
    return (
        name_of(line),
        f"{line.samples_per_s:.2f}",
        percent(line.of_ideal),
        percent(line.worst_of_ideal),
        percent(line.of_oracle),
        f"{line.losses:.1f}",
        f"{line.plans:.1f}",
        f"{line.steps_lost:.1f}",
    )


def unable_row(line: Unable) -> tuple[str, ...]:
    """For ``COLUMNS``: no number. The reason is a sentence, for below the table."""
    return (name_of(line), *["-"] * (len(COLUMNS) - 1))


def lost_row(line: PolicyLine) -> tuple[str, ...]:
    """A line of the table of what was lost, for ``LOST_COLUMNS``."""
    return (name_of(line), percent(line.useful), *(percent(line.lost[cause]) for cause in CAUSES))


def cost_row(line: PolicyLine) -> tuple[str, ...]:
    """A line of the table of costs, for ``COST_COLUMNS``."""
    both = (line.on_demand, line.spot)
    return (
        name_of(line),
        f"{line.node_hours:,.1f}",
        *(f"${cost.dollars:,.2f}" if cost else "-" for cost in both),
        *(f"${cost.per_million_samples:,.2f}" if cost and cost.per_million_samples else "-" for cost in both),
    )


def percent(share: float) -> str:
    """``share`` in percent, rounded to a hundredth of one."""
    return f"{100 * share:.2f} %"
