"""Times of day as people say and read them. Pure.

Owns what may be said and what is wrong with the rest; ``now`` is an argument, and the zone is this machine's.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

SAYS = "12:04, 12:04:31, 2026-11-22T12:04:31, -90s, -5m, -2h, or now"
_AGO = re.compile(r"([+-])(\d+(?:\.\d+)?)\s*(s|m|min|h)")
_UNIT_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_OF_DAY = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?")


def moment(text: str, now: float, shown: float | None = None) -> float:
    """POSIX seconds of ``text``. A time of day is the one nearest to what is ``shown`` of the past, else the
    last one that was; ``+10s`` counts from what is shown. A moment of 0 shows nothing.

    Raises ValueError with one sentence.
    """
    said = text.strip()
    if said in {"now", ""}:
        return now
    if found := _AGO.fullmatch(said):
        sign, number, unit = found.groups()
        return (shown or now) + float(f"{sign}{number}") * _UNIT_S[unit]
    if found := _OF_DAY.fullmatch(said):
        return _of_day(said, found, now, shown or now)
    try:
        return datetime.fromisoformat(said).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time: say {SAYS}") from None


def _of_day(text: str, found: re.Match[str], now: float, shown: float) -> float:
    hours, minutes, seconds = int(found[1]), int(found[2]), float(found[3] or 0.0)
    if hours > 23 or minutes > 59 or seconds >= 60:
        raise ValueError(f"{text!r} is no time of day")
    day = datetime.fromtimestamp(shown).astimezone()
    that = day.replace(hour=hours, minute=minutes, second=0, microsecond=0) + timedelta(seconds=seconds)
    near = [(that + timedelta(days=days)).timestamp() for days in (-1, 0, 1)]
    return min((at for at in near if at <= max(now, shown)), key=lambda at: abs(at - shown))
