"""Which step of a job one looks at: the newest, or one that stays."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from oobleckd.console.model import View
from oobleckd.protocol.watch import SampledSteps

ASIDE_S = 30.0


@dataclass(slots=True)
class StepCursor:
    """``step`` is the number of the step that stays in sight; 0 follows the newest."""

    step: int = 0

    def move(self, sampled: SampledSteps | None, by: int) -> None:
        """So many known steps on, or back; past the newest one it follows again."""
        known = sampled.steps if sampled is not None else ()
        if not known:
            return
        here = bisect_left(known, self.step) if self.step else len(known) - 1
        there = max(0, here + by)
        self.step = known[there] if there < len(known) - 1 else 0


def moment_of(view: View, by: int) -> float | None:
    """In the past: when the step with known op times before the one in sight began, or the one after it; None
    in the present.

    What is on the tape is loaded in parts: where it has no such step, half a minute off there may be one.
    """
    if view.tape is None:
        return None
    shown = view.schedule.at if view.schedule is not None else view.heard_at
    if by > 0:
        return min((at for at in view.tape.sampled if at > shown), default=view.heard_at + ASIDE_S)
    return max((at for at in view.tape.sampled if at < shown), default=view.heard_at - ASIDE_S)
