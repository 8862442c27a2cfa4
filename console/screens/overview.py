"""1 Overview: the job, its nodes, its pipelines and its last incident in one live picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.facts import Wants
from oobleckd.console.keys import SCREENS, ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Host, Page, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.screens.risk import Risk
from oobleckd.console.screens.steps import StepCursor, moment_of
from oobleckd.console.widgets import events as events_panel
from oobleckd.console.widgets import (
    fleet,
    grid,
    impact,
    nodes,
    pipelines,
    recovery,
    shares,
    timeline,
    training,
)
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line, plain
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.watch import ScheduleView

# Up to so many nodes are named one by one; more are a picture.
FEW_NODES = 60
_ROOM_FOR_LEGEND = 12


class Overview(Page):
    """Eight panels: everything is seen at once; the marked one opens the screen that has more of it."""

    TAG: ClassVar[ScreenName] = "overview"
    BINDINGS: ClassVar[list[BindingType]] = bindings("overview")

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.steps = StepCursor()
        self.marked = -1
        self.incident = ""
        self._risk = Risk()
        self._drawn: tuple[ScheduleView | None, tuple[int, int], list[Line]] = (None, (0, 0), [])

    def body(self) -> Iterable[Panel]:
        """The panels; the marked one opens its screen."""
        yield Panel(_nodes, "Nodes", id="nodes", depends=grid.DEPENDS, opens="nodes")
        yield Panel(shares.paint, "Templates", id="templates", depends=shares.DEPENDS, opens="templates")
        yield Panel(training.paint, "Training", id="training", opens="job")
        yield Panel(
            self._pipelines, "Pipelines", id="pipelines",
            depends=("pipelines", "nodes", "schedule", "refused"), opens="pipelines",
        )  # fmt: skip
        yield Panel(self._recovery, "Last incident", id="recovery", opens="incidents")
        yield Panel(events_panel.paint, "Events", id="events", depends=events_panel.DEPENDS, opens="events")

    def places(self, width: int, height: int) -> Places:
        """The mock's places."""
        return places.overview(width, height)

    def wants(self) -> Wants:
        """Op times, layers, goodput, and what a failure of the nodes most at risk would cost."""
        asked = self._risk.candidates(self.view)
        return Wants(
            schedule=True, layers=True, goodput=True, curve=True, step=self.steps.step, impacts=asked
        )

    def titles(self) -> None:
        """Which step, and which of how many incidents."""
        if self.view.schedule is None:
            self.entitle("pipelines", "Pipelines")
        else:
            step = plain(timeline.headline(self.view, timeline.TimelineLook()))
            self.entitle("pipelines", f"Pipelines, {step}", "←→ scrub")
        incident = self._shown()
        last = incident is not None and incident is self.view.incident
        own = self.view.own_incidents
        count, number = len(own), own.index(incident) + 1 if incident is not None else 0
        self.entitle(
            "recovery",
            "Last incident" if last or not count else "Incident",
            f"{number} of {count}" if count else "",
        )

    def command(self) -> str:
        """The job in words."""
        return (
            f"oobleckctl describe job {self.view.job.id}"
            if self.view.job is not None
            else "oobleckctl status"
        )

    # ------------------------------------------------------------------ keys

    def action_mark(self, by: int) -> None:
        """Mark another panel."""
        found = [panel for panel in self.panels() if panel.opens and panel.display]
        if not found:
            return
        self.marked = (
            (self.marked + by) % len(found) if self.marked >= 0 else (0 if by > 0 else len(found) - 1)
        )
        for index, panel in enumerate(found):
            panel.set_class(index == self.marked, "marked")

    def action_open(self) -> None:
        """Go where there is more of the marked panel."""
        for panel in self.query(".marked").results(Panel):
            self.host.goto(_screen(panel.opens))

    def action_incident(self, by: int) -> None:
        """Look at an earlier incident, or a later one."""
        ids = [incident.id for incident in self.view.own_incidents]
        shown = self._shown()
        if shown is not None:
            at = min(max(0, ids.index(shown.id) + by), len(ids) - 1)
            self.incident = "" if at == len(ids) - 1 else ids[at]
            self.changed()

    def action_scrub(self, by: int) -> None:
        """Another step; in the past its moment."""
        at = moment_of(self.view, by)
        if at is not None:
            self.host.visit(at)
        else:
            self.steps.move(self.view.schedules, by)
            self.changed()

    # ------------------------------------------------------------------ panels

    def _pipelines(self, view: View, now: float, width: int, height: int) -> list[Line]:
        """Who computes what when, where that is known; else who holds what."""
        if view.schedule is None:
            return pipelines.paint(view, now, width, height)
        if height < _ROOM_FOR_LEGEND:
            return timeline.paint(view, now, width, height, _look(view, height))
        # A thousand lanes, of a step that stays the same while nodes change in every frame.
        of, size, drawn = self._drawn
        if of is not view.schedule or size != (width, height):
            drawn = _timeline(view, now, width, height)
            self._drawn = view.schedule, (width, height), drawn
        return [*drawn, *_holders(view, now, width, height - len(drawn))]

    def _shown(self) -> IncidentView | None:
        found = [incident for incident in self.view.own_incidents if incident.id == self.incident]
        return found[0] if found else self.view.incident

    def _recovery(self, view: View, now: float, width: int, height: int) -> list[Line]:
        cost = impact.line(view, width, self._risk.candidates(view))
        incident = self._shown()
        room = height - bool(cost and height > 7)
        lines = (
            recovery.one(view, incident, now, width, room)
            if incident
            else recovery.paint(view, now, width, room)
        )
        return [*lines, cost] if cost and room < height else lines


def _screen(name: str) -> ScreenName:
    return next(screen for screen in SCREENS if screen == name)


def _nodes(view: View, now: float, width: int, height: int) -> list[Line]:
    paint = nodes.paint if len(view.nodes) <= FEW_NODES else grid.paint
    return paint(view, now, width, height)


def _timeline(view: View, now: float, width: int, height: int) -> list[Line]:
    """Lanes, what their signs mean, and in a strip all pipelines, where not all have lanes."""
    shown = view.schedule
    all_in_sight = shown is not None and timeline.least_rows(shown) < height
    strip = [] if all_in_sight else fleet.paint(view, now, width, 2)
    room = height - 1 - len(strip)
    return [*timeline.paint(view, now, width, room, _look(view, room)), timeline.legend(width), *strip]


def _look(view: View, height: int) -> timeline.TimelineLook:
    """Where not all pipelines have room, those that a loss touches are what one looks for."""
    needed = timeline.least_rows(view.schedule) if view.schedule is not None else 0
    return timeline.TimelineLook(order="hurt" if needed > height else "number")


def _holders(view: View, now: float, width: int, height: int) -> list[Line]:
    """Who holds which layers, where all of it has room below the timeline."""
    if not view.pipelines or len(view.pipelines) >= height:
        return []
    return [(), *pipelines.paint(view, now, width, height - 1)]
