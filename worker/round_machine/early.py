"""Whether an update before all votes are in is worth trying: from the rounds before (Qi et al., Zero Bubble
Pipeline Parallelism, 2023, section 4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_LOOKS_BACK = 16  # rounds
_MAX_IN_VAIN = 0.25  # of them


@dataclass(slots=True)
class UpdatePredictor:
    """Whether to expect that the present round goes through: from those before it, tried or not.

    Rounds that are clipped come in a row, so the last one must have gone through; and where they come and go,
    the plain update is the better one.
    """

    rounds: deque[bool] = field(default_factory=lambda: deque(maxlen=_LOOKS_BACK))

    def saw(self, through: bool) -> None:
        """Note whether a committed round went through."""
        self.rounds.append(through)

    @property
    def expects_a_commit(self) -> bool:
        """Whether to update before the votes are in."""
        in_vain = self.rounds.count(False)
        return bool(self.rounds) and self.rounds[-1] and in_vain <= _MAX_IN_VAIN * len(self.rounds)
