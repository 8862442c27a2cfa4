"""Events in rows with a cursor: by level, by words, and the newest while they are followed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.events import row
from oobleckd.console.widgets.listing import clamped, counted, matches, rows
from oobleckd.draw.lines import Line, clipped
from oobleckd.protocol.changes import Change

Level = Literal["all", "warn", "error"]
LEVELS: tuple[Level, ...] = ("all", "warn", "error")
_SHOWN: dict[Level, frozenset[str]] = {
    "all": frozenset({"debug", "info", "warn", "error"}),
    "warn": frozenset({"warn", "error"}),
    "error": frozenset({"error"}),
}
DEPENDS = ("events", "job")


class LogLook(msgspec.Struct, frozen=True):
    """Which rows, and where the cursor is: the change's place, or the newest one while ``follow``."""

    words: str = ""
    level: Level = "all"
    cursor: int = 0
    follow: bool = True


def paint(view: View, now: float, width: int, height: int, look: LogLook | None = None) -> list[Line]:
    """What is filtered in a line, and the rows in sight."""
    look = look or LogLook()
    found = selected(view, look)
    job = view.job.id if view.job is not None else ""
    said = counted(len(found), len(view.events), "events", look.words)
    head = f"{'following' if look.follow else 'standing still'}, {_LEVEL_WORDS[look.level]}  {said}"
    cursor = len(found) - 1 if look.follow else look.cursor
    body = rows(
        found, cursor, width, max(1, height - 1), lambda change: row(change, job, view.clock(now), width)
    )
    return [clipped(((head, "dim"),), width), *body][:height] if height > 1 else body


_LEVEL_WORDS: dict[Level, str] = {"all": "all levels", "warn": "warnings and errors", "error": "errors alone"}


def selected(view: View, look: LogLook) -> Sequence[Change]:
    """The rows, the oldest first."""
    return _PICKED.of(view.events, look)


@dataclass(slots=True)
class _Picked:
    """The rows of the last frame, and of which events: of thousands only those that came since
    are looked at.
    """

    events: tuple[Change, ...] = ()
    asked: tuple[str, Level] = ("", "all")
    found: tuple[Change, ...] = ()

    def of(self, events: tuple[Change, ...], look: LogLook) -> tuple[Change, ...]:
        """Those of ``events`` that are to be shown."""
        asked = look.words, look.level
        if asked == ("", "all"):
            return events
        if asked != self.asked or not _is_more(self.events, events):
            self.events, self.asked, self.found = (), asked, ()
        new = events[len(self.events) :]
        self.found += tuple(change for change in new if _is_shown(change, look))
        self.events = events
        return self.found


_PICKED = _Picked()


def _is_more(before: tuple[Change, ...], events: tuple[Change, ...]) -> bool:
    """Whether some were added, and nothing else has changed: where others went, the last one has moved."""
    last = len(before) - 1
    return last < 0 or (last < len(events) and events[0] is before[0] and events[last] is before[last])


def _is_shown(change: Change, look: LogLook) -> bool:
    return change.level in _SHOWN[look.level] and (not look.words or matches(_words(change), look.words))


def at_cursor(view: View, look: LogLook) -> Change | None:
    """The change of the cursor; None where no row is left."""
    found = selected(view, look)
    if not found:
        return None
    return found[-1] if look.follow else found[clamped(look.cursor, len(found))]


def _words(change: Change) -> str:
    return " ".join((change.kind, change.level, change.text, *change.story))
