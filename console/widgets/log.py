"""Events in rows with a cursor: by level, by words, and the newest while they are followed. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from console.model import View
from console.widgets.events import row
from console.widgets.listing import clamped, counted, matches, rows
from oobleckd.draw.lines import Line, clipped
from oobleckd.protocol.api import Change

Level = Literal["all", "warn", "error"]
LEVELS: tuple[Level, ...] = ("all", "warn", "error")
_SHOWN: dict[Level, frozenset[str]] = {
    "all": frozenset({"debug", "info", "warn", "error"}),
    "warn": frozenset({"warn", "error"}),
    "error": frozenset({"error"}),
}
DEPENDS = ("events", "job")


class Look(msgspec.Struct, frozen=True):
    """Which rows, and where the cursor is: the change's place, or the newest one while ``follow``."""

    words: str = ""
    level: Level = "all"
    cursor: int = 0
    follow: bool = True


def paint(view: View, _now: float, width: int, height: int, look: Look | None = None) -> list[Line]:
    """What is filtered in a line, and the rows in sight."""
    look = look or Look()
    found = selected(view, look)
    job = view.job.id if view.job is not None else ""
    said = counted(len(found), len(view.events), "events", look.words)
    head = f"{'following' if look.follow else 'standing still'}, {_LEVEL_WORDS[look.level]}  {said}"
    cursor = len(found) - 1 if look.follow else look.cursor
    body = rows(found, cursor, width, max(1, height - 1), lambda change: row(change, job, width))
    return [clipped(((head, "dim"),), width), *body][:height] if height > 1 else body


_LEVEL_WORDS: dict[Level, str] = {"all": "all levels", "warn": "warnings and errors", "error": "errors alone"}


def selected(view: View, look: Look) -> list[Change]:
    """The rows, the oldest first."""
    return [
        change
        for change in view.events
        if change.level in _SHOWN[look.level] and matches(_words(change), look.words)
    ]


def at_cursor(view: View, look: Look) -> Change | None:
    """The change of the cursor; None where no row is left."""
    found = selected(view, look)
    if not found:
        return None
    return found[-1] if look.follow else found[clamped(look.cursor, len(found))]


def _words(change: Change) -> str:
    return " ".join((change.kind, change.level, change.text, *change.story))
