"""The overview: one live picture of the job, its nodes, its pipelines and its last incident."""

from __future__ import annotations

from collections.abc import Iterator

from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Footer

from console.model import View
from console.screens.places import Place, places
from console.widgets import events as events_panel
from console.widgets import nodes, pipelines, recovery, templates, training, verdict
from console.widgets.panel import Panel
from oobleckd.draw.lines import Line

FOOTER_ROWS = 1


class Overview(Screen[None]):
    """Eight panels without focus: everything is seen at once, nothing has to be opened."""

    DEFAULT_CSS = """
    Overview { layout: vertical; overflow: hidden; }
    #body { height: 1fr; width: 1fr; overflow: hidden; }
    #body Panel { position: absolute; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen_at: float | None = None

    def compose(self) -> ComposeResult:
        """The panels; where they lie is decided when the size is known."""
        with Container(id="body"):
            yield Panel(self._verdict, id="verdict", keeps_warnings=True)
            yield Panel(nodes.paint, "Nodes", id="nodes", depends=nodes.DEPENDS)
            yield Panel(templates.paint, "Templates", id="templates", depends=templates.DEPENDS)
            yield Panel(training.paint, "Training", id="training")
            yield Panel(pipelines.paint, "Pipelines", id="pipelines", depends=pipelines.DEPENDS)
            yield Panel(recovery.paint, "Last incident", id="recovery")
            yield Panel(events_panel.paint, "Events", id="events", depends=events_panel.DEPENDS)
        yield Footer(show_command_palette=False)

    def panels(self) -> Iterator[Panel]:
        """All panels."""
        yield from self.query(Panel)

    def show(self, view: View, now: float) -> None:
        """Paint ``view`` as it is at ``now``."""
        for panel in self.panels():
            if panel.display:
                panel.show(view, now)

    def on_resize(self, event: events.Resize) -> None:
        """Put every panel in its place; one without a place is not shown."""
        where = places(event.size.width, event.size.height - FOOTER_ROWS)
        for panel in self.panels():
            place = where.get(panel.id or "")
            panel.display = place is not None
            if place is not None:
                _put(panel, place)

    def _verdict(self, view: View, now: float, width: int, height: int) -> list[Line]:
        lines = verdict.paint(view, now, width, height)
        return lines if self.frozen_at is None else [*lines[:-1], verdict.frozen(self.frozen_at)]


def _put(panel: Panel, place: Place) -> None:
    panel.styles.offset = (place.x, place.y)
    panel.styles.width = place.width
    panel.styles.height = place.height
