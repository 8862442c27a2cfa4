"""Chooses which events stay: thousands, and of each level the newest ones, whatever the others have to say.
Pure.

Owns the numbers. What else a change does to the picture is ``model``'s.
"""

from __future__ import annotations

from collections import Counter

from oobleckd.protocol.changes import Change

# With 200 in all, a rack's aftermath pushed out every error. (D-console-014)
EVENTS_KEPT = 4000
MIN_OF_LEVEL = 1000
# So many more are there before they are thinned: to look through all of them at every change would take
# longer than the rest.
SLACK = 400


def kept(events: tuple[Change, ...], change: Change) -> tuple[Change, ...]:
    """``events`` and ``change``. An ordinary step is a point of the curves; among the events it would push
    out all others.
    """
    if change.kind == "step" and change.level == "info":
        return events
    if change.kind == "console":  # what it has to say of itself it says again and again
        events = tuple(each for each in events if (each.kind, each.text) != (change.kind, change.text))
    more = events + (change,)  # noqa: RUF005 - one copy instead of two, at every change
    return more if len(more) < EVENTS_KEPT + SLACK else _thinned(more)


def _thinned(events: tuple[Change, ...]) -> tuple[Change, ...]:
    """The newest of each level, and of the rest the newest that have room."""
    seen: Counter[str] = Counter()
    own: list[int] = []
    rest: list[int] = []
    for index in reversed(range(len(events))):
        level = events[index].level
        seen[level] += 1
        (own if seen[level] <= MIN_OF_LEVEL else rest).append(index)
    return tuple(events[index] for index in sorted((*own, *rest[: EVENTS_KEPT - len(own)])))
