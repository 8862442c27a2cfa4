"""Axes: where a value lies, and which values are written beside it.

Pure; owns no words and no colour.
"""

from __future__ import annotations

import math

import msgspec

from oobleckd.words import loss, plain

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_DECADES = 4
"""Ticks between powers of ten are written where there are no more than so many of these."""


class Axis(msgspec.Struct, frozen=True):
    """From ``low`` to ``high`` on the page from ``begin`` to ``end``, in its units."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where ``value`` lies, which is held to the axis."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values on it, and how they are written."""
        found = _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high, about)
        if len(found) < 2:  # of a part of a decade
            found = _ticks(self.low, self.high, about)
        return [(value, written(value)) for value in found]


def written(value: float) -> str:
    """A value beside a tick."""
    if abs(value) < 1000:
        return plain(value if abs(value) < 1e-4 else round(value, 6))
    return f"{value:,.0f}"


def exact(value: float | None) -> str:
    """A value in a table."""
    return "-" if value is None else loss(value)


def _ticks(low: float, high: float, about: int) -> list[float]:
    if high <= low:
        return [low]
    rough = (high - low) / about
    unit: float = 10.0 ** math.floor(math.log10(rough))
    step = next((each * unit for each in _STEPS if each * unit >= rough), 10 * unit)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1, 2, 5) if high <= low * 10**_DECADES else (1,)
    every = max(1, (last - first) // 8)
    values = [part * 10.0**power for power in range(first, last + 1, every) for part in parts]
    return [value for value in values if low <= value <= high]
