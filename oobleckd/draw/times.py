"""Times of day and dates as people read them, in the zone of this machine. Pure: what "today" is, is an
argument.

Owns the one rule: a time that is not of today bears its date.
"""

from __future__ import annotations

from datetime import UTC, datetime


def clock(at: float, digits: int = 0) -> str:
    """Local time of day of POSIX seconds, with so many digits after the second."""
    return _local(at).isoformat(" ", "microseconds")[11 : 20 + digits if digits else 19]


def dated(at: float, now: float, digits: int = 0) -> str:
    """The time of day of ``at``, with its date where that is not the one of ``now``."""
    date = _local(at).date()
    return clock(at, digits) if date == _local(now).date() else f"{date} {clock(at, digits)}"


def minute(at: float, now: float) -> str:
    """The same to the minute, where nobody asks for more: ``"10:34"``, ``"2026-11-27 10:34"``."""
    return dated(at, now)[: -len(":00")]


def day(at: float) -> str:
    """The date and minute (UTC) of POSIX seconds ``at``, such as 2026-11-27 20:15Z."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%MZ")


def _local(at: float) -> datetime:
    return datetime.fromtimestamp(at).astimezone()
