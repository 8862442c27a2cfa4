"""5 Incidents: every recovery by phase, what it cost, what was chosen and what was not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.widgets import choices, incidents, recovery, story
from oobleckd.console.widgets.incidents import IncidentsLook
from oobleckd.console.widgets.listing import missing
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line

_LEAST_BELOW, _MOST_BELOW, _STORY_ROWS, _LEAST_ROWS = 18, 20, 7, 6


class Incidents(ListPage):
    """A list; of the chosen one the phases and the choices."""

    TAG: ClassVar[ScreenName] = "incidents"
    BINDINGS: ClassVar[list[BindingType]] = bindings("incidents", "list")
    ROWS = "incidents"

    def body(self) -> Iterable[Panel]:
        """List, phases, choices, events."""
        yield Panel(self._list, "Incidents", id="list")
        yield Panel(self._phases, "Phases", id="phases")
        yield Panel(self._choices, "Work and choices", id="choices")
        yield Panel(self._story, "What happened", id="story")

    def places(self, width: int, height: int) -> Places:
        """The list has as many rows as there are incidents, and of few ones what happened is below; of many
        it has what the others leave.
        """
        found, rest = places.framed_by(width, height, "list")
        arrangement = places.arrangement(width, height)
        if arrangement == "tiny":
            return found
        if arrangement == "small":
            return found | places.above(rest, ("list", 0), ("phases", 10))
        most = rest.height - _LEAST_BELOW - _STORY_ROWS
        listed = max(_LEAST_ROWS, min(len(self.view.incidents) + 4, most))
        below_rows = max(_LEAST_BELOW, min(_MOST_BELOW, rest.height - listed - 2 * _STORY_ROWS))
        rows = places.above(rest, ("list", listed), ("below", below_rows), ("story", 0))
        below = rows.pop("below", None)
        return found | rows | (places.split(below, ("phases", 1), ("choices", 1)) if below else {})

    def shape(self) -> object:
        """How many incidents there are."""
        return len(self.view.incidents)

    def titles(self) -> None:
        """What is filtered."""
        count = len(self.view.incidents)
        self.entitle("list", f'Incidents: "{self.words}"' if self.words else "Incidents", f"{count} in all")

    def command(self) -> str:
        """The incident of the cursor in words."""
        incident = incidents.at_cursor(self.view, self.look)
        return (
            f"oobleckctl describe incident {incident.id}"
            if incident is not None
            else "oobleckctl get incidents"
        )

    @property
    def look(self) -> IncidentsLook:
        """What of the list one looks at."""
        return IncidentsLook(self.words, self.cursor)

    def num_rows(self) -> int:
        """Rows of the list."""
        return len(self.names())

    def names(self) -> Sequence[str]:
        """Ids."""
        return [incident.id for incident in incidents.selected(self.view, self.look)]

    # ------------------------------------------------------------------ keys

    def action_export(self) -> None:
        """Write it to a file."""
        incident = incidents.at_cursor(self.view, self.look)
        if incident is not None:
            self.host.export(incident.id)

    def action_visit(self) -> None:
        """Show everything as it was when it began."""
        incident = incidents.at_cursor(self.view, self.look)
        if incident is not None:
            self.host.visit(incident.at)

    # ------------------------------------------------------------------ panels

    def _list(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return incidents.paint(view, now, width, height, self.look)

    def _phases(self, view: View, now: float, width: int, height: int) -> list[Line]:
        incident = incidents.at_cursor(view, self.look)
        if incident is None:
            return _nothing(view)
        alone = not self._panels["choices"].display
        return recovery.one(view, incident, now, width, height, priced=alone)

    def _choices(self, view: View, _now: float, width: int, height: int) -> list[Line]:
        incident = incidents.at_cursor(view, self.look)
        return choices.lines(incident, width, height) if incident is not None else _nothing(view)

    def _story(self, view: View, now: float, width: int, height: int) -> list[Line]:
        incident = incidents.at_cursor(view, self.look)
        if incident is None:
            return _nothing(view)
        keys = (f"incident:{incident.id}", *(f"node:{name}" for name in incident.nodes))
        return story.paint(view, now, width, height, keys)


def _nothing(view: View) -> list[Line]:
    return [missing(view, "incidents", "nothing has failed")]
