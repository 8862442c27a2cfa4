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
from oobleckd.console.widgets import choices, incidents, recovery
from oobleckd.console.widgets.incidents import IncidentsLook
from oobleckd.console.widgets.listing import missing
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line


class Incidents(ListPage):
    """A list; of the chosen one the phases and the choices."""

    TAG: ClassVar[ScreenName] = "incidents"
    BINDINGS: ClassVar[list[BindingType]] = bindings("incidents", "list")
    ROWS = "incidents"

    def body(self) -> Iterable[Panel]:
        """List, phases, choices."""
        yield Panel(self._list, "Incidents", id="list")
        yield Panel(self._phases, "Phases", id="phases")
        yield Panel(self._choices, "Work and choices", id="choices")

    def places(self, width: int, height: int) -> Places:
        """The list has what the others leave."""
        found, rest = places.framed_by(width, height, "list")
        match places.arrangement(width, height):
            case "tiny":
                return found
            case "small":
                return found | places.above(rest, ("list", 0), ("phases", 10))
            case _:
                rows = places.above(rest, ("list", 0), ("below", 18))
                below = rows.pop("below", None)
                return found | rows | (places.split(below, ("phases", 1), ("choices", 1)) if below else {})

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
        return recovery.one(view, incident, now, width, height) if incident is not None else _nothing(view)

    def _choices(self, view: View, _now: float, width: int, height: int) -> list[Line]:
        incident = incidents.at_cursor(view, self.look)
        return choices.lines(incident, width, height) if incident is not None else _nothing(view)


def _nothing(view: View) -> list[Line]:
    return [missing(view, "incidents", "nothing has failed")]
