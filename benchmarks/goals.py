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
    ]
    torchft = [summaries[name].median_stall_s for name in ("torchft", "torchft-2x2") if name in summaries]
    if torchft:
        goals.append(
            Goal("median stall in s, against a fifth of torchft's", ours.median_stall_s, min(torchft) / 5)
        )
    return goals
