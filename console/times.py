"""Times of day as people say them. Pure.

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
    """POSIX seconds of ``text``. A time of day is the last one that was; ``+10s`` counts from what is ``shown``.

    Raises ValueError with one sentence.
    """
    said = text.strip()
    if said in {"now", ""}:
        return now
    if found := _AGO.fullmatch(said):
        sign, number, unit = found.groups()
        return (now if shown is None else shown) + float(f"{sign}{number}") * _UNIT_S[unit]
    if found := _OF_DAY.fullmatch(said):
        return _of_day(said, found, now)
    try:
        return datetime.fromisoformat(said).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time: say {SAYS}") from None


def _of_day(text: str, found: re.Match[str], now: float) -> float:
    hours, minutes, seconds = int(found[1]), int(found[2]), float(found[3] or 0.0)
    if hours > 23 or minutes > 59 or seconds >= 60:
        raise ValueError(f"{text!r} is no time of day")
    today = datetime.fromtimestamp(now).astimezone()
    at = today.replace(hour=hours, minute=minutes, second=0, microsecond=0) + timedelta(seconds=seconds)
    if at.timestamp() > now:
        at -= timedelta(days=1)
    return at.timestamp()
