"""7 Events: what happened on one clock, with filters, and a way to the state of that time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Host, ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.widgets import log
from oobleckd.console.widgets.listing import clamped
from oobleckd.console.widgets.log import LogLook
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line, clipped, wrapped
from oobleckd.protocol.changes import Change

# The nearest to what one looks at comes first.
_STORIES = ("incident", "node", "job")


class EventsPage(ListPage):
    """A list that follows, and the chosen event in full."""

    TAG: ClassVar[ScreenName] = "events"
    BINDINGS: ClassVar[list[BindingType]] = bindings("events", "list")
    ROWS = "events"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.follow = True
        self.level = 0

    def body(self) -> Iterable[Panel]:
        """List, one event."""
        yield Panel(self._list, "Events", id="list", depends=log.DEPENDS)
        yield Panel(self._one, "Event", id="one", depends=log.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """The list has nearly all."""
        return places.one_below_other(width, height, "list", (("list", 0), ("one", 5)))

    def titles(self) -> None:
        """What is filtered."""
        self.entitle(
            "list",
            f'Events: "{self.words}"' if self.words else "Events",
            "following" if self.follow else "",
        )

    def command(self) -> str:
        """The story of the event's incident, node or job; else the stream."""
        change = log.at_cursor(self.view, self.look)
        keys = [key for key in (change.story if change is not None else ()) if _kind(key) in _STORIES]
        best = min(keys, key=lambda key: _STORIES.index(_kind(key)), default="")
        return f"oobleckctl story {best}" if best else "oobleckctl events -f"

    @property
    def look(self) -> LogLook:
        """What of the list one looks at."""
        return LogLook(self.words, log.LEVELS[self.level], self.cursor, self.follow)

    def num_rows(self) -> int:
        """Rows of the list."""
        return len(self.names())

    def names(self) -> Sequence[Change]:
        """Events are their own names: some have the same number."""
        return log.selected(self.view, self.look)

    # ------------------------------------------------------------------ keys

    def action_move(self, by: int) -> None:
        """To move is to stand still; at the last row it follows again."""
        rows = self.num_rows()
        here = rows - 1 if self.follow else self.cursor
        self.cursor = clamped(clamped(here, rows) + by, rows)
        self.follow = by > 0 and self.cursor >= rows - 1
        self.changed()

    def action_follow(self) -> None:
        """Follow, or stand still."""
        self.cursor = clamped(self.num_rows() - 1, self.num_rows()) if self.follow else self.cursor
        self.follow = not self.follow
        self.changed()

    def action_level(self) -> None:
        """All, warnings, errors."""
        self.level = (self.level + 1) % len(log.LEVELS)
        self.stay()
        self.changed()

    def action_visit(self) -> None:
        """Show everything as it was at that time."""
        change = log.at_cursor(self.view, self.look)
        if change is not None:
            self.host.visit(change.at)

    # ------------------------------------------------------------------ panels

    def _list(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return log.paint(view, now, width, height, self.look)

    def _one(self, view: View, _now: float, width: int, height: int) -> list[Line]:
        change = log.at_cursor(view, self.look)
        if change is None:
            return []
        text: list[Line] = [((line, ""),) for line in wrapped(change.text, width, max(1, height - 1))]
        head: Line = (
            (f"number {change.seq}, {change.kind}, {change.level}", "note"),
            (f"   {' '.join(change.story)}", "dim"),
        )
        return [clipped(head, width), *text]


def _kind(key: str) -> str:
    return key.partition(":")[0]
