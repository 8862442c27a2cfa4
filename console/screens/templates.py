"""4 Templates: what the planner made for the job, which numbers of nodes that covers, and what is in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.facts import Wants
from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Host, ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.widgets import copies, coverage, events, pipelines, templatetable
from oobleckd.console.widgets.panel import Panel
from oobleckd.console.widgets.templatetable import TemplateTableLook
from oobleckd.draw.lines import Line


class Templates(ListPage):
    """A table with the split of the layers, the numbers of nodes, and the pipelines in use."""

    TAG: ClassVar[ScreenName] = "templates"
    BINDINGS: ClassVar[list[BindingType]] = bindings("templates", "list")

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.used_first = False

    def body(self) -> Iterable[Panel]:
        """Table, coverage; what there is room for below that."""
        yield Panel(self._table, "Templates", id="table", depends=templatetable.DEPENDS)
        yield Panel(coverage.paint, "Coverage", id="coverage", depends=coverage.DEPENDS)
        yield Panel(pipelines.paint, "Who holds what", id="plan", depends=pipelines.DEPENDS)
        yield Panel(copies.paint, "Live copies of each layer", id="copies", depends=copies.DEPENDS)
        yield Panel(events.paint, "Events", id="events", depends=events.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """The table has most of the width; where it is above the coverage, as many rows as it needs."""
        if places.arrangement(width, height) == "small":
            table = min(len(self.view.templates) + 3, height // 2)
            return places.one_below_other(width, height, "table", (("table", table), ("coverage", 0)))
        found = places.side_by_side(width, height, "table", "coverage", 62)
        table, numbers, plan = self._rows()
        found = places.fitted(found, "table", table, "events")
        found = places.fitted(found, "coverage", numbers, "plan")
        return places.fitted(found, "plan", plan, "copies")

    def shape(self) -> object:
        """How many templates there are, and what rows each panel has."""
        return len(self.view.templates), self._rows()

    def _rows(self) -> tuple[int, int, int]:
        """Of templates, of coverage, of pipelines."""
        view = self.view
        return templatetable.num_rows(view), coverage.num_rows(view), pipelines.num_rows(view)

    def wants(self) -> Wants:
        """What steps took, and who holds which layer."""
        return Wants(schedule=True, layers=True)

    def titles(self) -> None:
        """What is filtered, how the table is sorted."""
        title = f'Templates: "{self.words}"' if self.words else "Templates"
        self.entitle("table", title, "in use first" if self.used_first else "by size")

    def command(self) -> str:
        """The templates in words."""
        return "oobleckctl get templates"

    @property
    def look(self) -> TemplateTableLook:
        """What of the table one looks at."""
        return TemplateTableLook(self.words, self.cursor, self.used_first)

    def num_rows(self) -> int:
        """Rows of the table."""
        return len(templatetable.selected(self.view, self.look))

    def action_sort(self) -> None:
        """Sort the table by size, or show the templates in use first: each call switches."""
        self.used_first = not self.used_first
        self.cursor = 0
        self.changed()

    def _table(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return templatetable.paint(view, now, width, height, self.look)
