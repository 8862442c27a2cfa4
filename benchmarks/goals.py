"""The goals of recovery, as numbers: what is promised, and whether a run has kept it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.cost import Summary


@dataclass(frozen=True, slots=True)
class Goal:
    """``value`` is to be ``most`` at most."""

    what: str
    value: float
    most: float

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value <= self.most


def goals_of(summaries: Mapping[str, Summary]) -> list[Goal]:
    """The goals that can be asked of what was measured; systems are called as in ``recovery.py``.

    The stall is held against the better of torchft's two shapes.
    """
    if "oobleckd" not in summaries:
        return []
    ours = summaries["oobleckd"]
    goals = [
        Goal("median time to the next step, in normal steps", ours.median_in_steps, 1.25),
        Goal("worst time to the next step, in normal steps", ours.worst_in_steps, 2.5),
        Goal("steps redone", ours.steps_redone, 0),
        Goal("attempts discarded", ours.attempts_discarded, 0),
        Goal("samples lost", ours.samples_lost, 0),
        Goal("share of the devices that is missing after a kill", ours.max_missing, 0.25),
        *_of_other_faults(summaries),
    ]
    torchft = [summaries[name].median_stall_s for name in ("torchft", "torchft-2x2") if name in summaries]
    if torchft:
        goals.append(
            Goal("median stall in s, against a fifth of torchft's", ours.median_stall_s, min(torchft) / 5)
        )
    goals += _against_the_cost_of_torchft(summaries)
    return goals


def _of_other_faults(summaries: Mapping[str, Summary]) -> list[Goal]:
    goals = []
    for name in ("oobleckd", "slipstream"):
        if name in summaries:
            phases = summaries[name].median_phases
            goals.append(Goal(f"{name}: SIGKILL detected in ms", 1000 * phases.get("detect", 0.0), 20.0))
            goals.append(Goal(f"{name}: planned in ms", 1000 * phases.get("plan", 0.0), 5.0))
            goals.append(Goal(f"{name}: next step, in normal steps", summaries[name].median_in_steps, 1.1))
    for name in (
        "backward-copied",
        "backward-copied-slipstream",
        "backward-deep",
        "backward-deep-slipstream",
    ):
        if name in summaries:
            again = summaries[name].median_again or 0.0
            goals.append(Goal(f"{name}: share of a step computed again", again, 0.1))
    if "sigstop" in summaries:
        goals.append(Goal("SIGSTOP: next step in s", summaries["sigstop"].median_next_step_s, 2.0))
    if "spare" in summaries:
        goals.append(Goal("spare: whole again in s", summaries["spare"].median_whole_s, 3.0))
    if "daemon" in summaries:
        away = summaries["daemon"]
        goals.append(Goal("daemon away: longest step, in normal steps", away.worst_in_steps, 2.0))
        goals.append(Goal("daemon away: incidents", away.attempts_discarded, 0))
    redone = sum(
        summaries[name].steps_redone for name in summaries.keys() & {"sigstop", "agent", "spare", "standby"}
    )
    return [*goals, Goal("other failures: steps redone", redone, 0)] if goals else []


def _against_the_cost_of_torchft(summaries: Mapping[str, Summary]) -> list[Goal]:
    """As oobleckd runs by default, with a spare: stall and missing capacity, against a third."""
    torchft = [summaries[name].median_cost_s for name in ("torchft", "torchft-2x2") if name in summaries]
    if not torchft or "spare" not in summaries:
        return []
    return [
        Goal(
            "spare: cost in s, against a third of torchft's",
            summaries["spare"].median_cost_s,
            min(torchft) / 3,
        )
    ]
