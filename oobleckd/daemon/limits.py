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
        left, at = self._left.pop(name, (self.burst, now))
        left = min(self.burst, left + max(0.0, now - at) * self.per_s)
        allowed = left >= 1.0
        self._left[name] = (
            left - allowed,
            now,
        )  # put last: the one that was quiet for longest is forgotten first
        while len(self._left) > _MAX_KNOWN:
            del self._left[next(iter(self._left))]
        return 0.0 if allowed else (1.0 - left) / self.per_s
