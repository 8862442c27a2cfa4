"""How fast preparing goes, by what it says of itself. Owns no clock: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from oobleckd.prepare.build import PrepareProgress


@dataclass(slots=True)
class Pace:
    """Of the present phase: what was done before this began is no pace."""

    phase: str = ""
    first: int = 0
    began_s: float = 0.0

    def heard(self, far: PrepareProgress, now_s: float) -> float:
        """Bytes a second since the phase began; 0 where nothing is done yet."""
        if far.phase != self.phase:
            self.phase, self.first, self.began_s = far.phase, far.done, now_s
        took_s = now_s - self.began_s
        return (far.done - self.first) / took_s if took_s > 0 else 0.0
