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
from oobleckd.console.widgets import log, story
from oobleckd.console.widgets.listing import clamped
from oobleckd.console.widgets.log import LogLook
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line
from oobleckd.protocol.changes import Change

_LIST_SHARE = 58
_EVENT_ROWS, _LOW_ROWS, _STORY_ROWS = 12, 6, 9


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
        """List, one event, what else belongs to it."""
        yield Panel(self._list, "Events", id="list", depends=log.DEPENDS)
        yield Panel(self._one, "Event", id="one", depends=log.DEPENDS)
        yield Panel(self._story, "Story", id="story", depends=story.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """The list has nearly all; where it is wide the event and its story are beside it, where it is high
        the story is below.
        """
        match places.arrangement(width, height):
            case "wide":
                found = places.side_by_side(width, height, "list", "right", _LIST_SHARE)
                return found | places.above(found.pop("right"), ("one", _EVENT_ROWS), ("story", 0))
            case "medium":
                below = [("one", _LOW_ROWS), ("story", _STORY_ROWS)]
            case _:
                below = [("one", _LOW_ROWS - 1)]
        return places.one_below_other(width, height, "list", (("list", 0), *below))

    def titles(self) -> None:
        """What is filtered."""
        self.entitle(
            "list",
            f'Events: "{self.words}"' if self.words else "Events",
            "following" if self.follow else "",
        )
        change = log.at_cursor(self.view, self.look)
        key = story.nearest(change) if change is not None else ""
        self.entitle("story", f"Story of {key.replace(':', ' ')}" if key else "Story")

    def command(self) -> str:
        """The story of the event's incident, node or job; else the stream."""
        change = log.at_cursor(self.view, self.look)
        best = story.nearest(change) if change is not None else ""
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

    def _one(self, view: View, now: float, width: int, height: int) -> list[Line]:
        change = log.at_cursor(view, self.look)
        return story.one(change, view.clock(now), width, height) if change is not None else []

    def _story(self, view: View, now: float, width: int, height: int) -> list[Line]:
        change = log.at_cursor(view, self.look)
        key = story.nearest(change) if change is not None else ""
        return story.paint(view, now, width, height, (key,)) if key else [(("of nobody's story", "dim"),)]
