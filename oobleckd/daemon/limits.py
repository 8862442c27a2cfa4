"""How often anybody may ask: a bucket of tokens for each, which fills at a steady rate.

Owns the arithmetic, not who somebody is (``callers``). Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MAX_KNOWN = 4096


@dataclass(slots=True)
class Limit:
    """``burst`` at once, ``per_s`` a second in the long run, for each name."""

    per_s: float
    burst: float
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, name: str, now: float) -> float:
        """Seconds until ``name`` may ask again; 0.0: it may now, and has one less to ask."""
        left = self._now(name, now)
        allowed = left >= 1.0
        self._keep(name, left - allowed, now)
        return 0.0 if allowed else (1.0 - left) / self.per_s

    def charge(self, name: str, cost: float, now: float) -> None:
        """What ``name`` was given did cost so much, which was not known before."""
        self._keep(name, self._now(name, now) - cost, now)

    def owes_s(self, name: str, now: float) -> float:
        """Seconds until what ``name`` was given is paid for; 0.0: it is."""
        return max(0.0, -self._now(name, now)) / self.per_s

    def _now(self, name: str, now: float) -> float:
        left, at = self._left.get(name, (self.burst, now))
        return min(self.burst, left + max(0.0, now - at) * self.per_s)

    def _keep(self, name: str, left: float, now: float) -> None:
        self._left.pop(name, None)
        self._left[name] = (left, now)  # put last: the one that was quiet for longest is forgotten first
        while len(self._left) > _MAX_KNOWN:
            del self._left[next(iter(self._left))]
