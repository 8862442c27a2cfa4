"""3 Pipelines: who computes what when in one step, as it was, as the planner has it, and where
they differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
from textual.binding import BindingType

from oobleckd.console.facts import Wants
from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Host, ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.screens.steps import StepCursor, moment_of
from oobleckd.console.widgets import events, fleet, optimes, pipelines, timeline
from oobleckd.console.widgets.panel import Panel
from oobleckd.console.widgets.timeline import Order, TimelineLook
from oobleckd.draw.lines import Line, plain

_ORDER_WORDS: dict[Order, str] = {
    "number": "in order",
    "waiting": "most waiting first",
    "hurt": "touched by a loss first",
}
_MOST_ROWS = 5
_FRAME_AND_LEGEND = 3
_ANY_WIDTH = 80  # rows do not depend on it
_DEPENDS = ("schedule", "modelled", "refused", "schedules")


class Pipelines(ListPage):
    """Stages by time, the strip of all pipelines, and the legend."""

    TAG: ClassVar[ScreenName] = "pipelines"
    BINDINGS: ClassVar[list[BindingType]] = bindings("pipelines", "list")

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.steps = StepCursor()
        self.mode = 0
        self.order = 0

    def body(self) -> Iterable[Panel]:
        """Timeline, fleet, events, legend."""
        yield Panel(self._timeline, "Pipelines", id="timeline", depends=_DEPENDS)
        yield Panel(self._fleet, "Fleet", id="fleet", depends=fleet.DEPENDS)
        yield Panel(events.paint, "Events", id="events", depends=events.DEPENDS)
        yield Panel(_legend, id="legend", depends=("link",))

    def places(self, width: int, height: int) -> Places:
        """The timeline has what the others leave. The strip is for pipelines that have no room in it."""
        strip = 5 if places.arrangement(width, height) == "wide" else 4
        # Three cells beside three pipelines that are drawn in full were a riddle. (D-console-018)
        room = height - places.VERDICT_ROWS - places.FOOTER_ROWS - _FRAME_AND_LEGEND
        parts = [("timeline", 0), ("legend", 1)] + ([("fleet", strip)] if self._least_rows() > room else [])
        found = places.one_below_other(width, height, "timeline", parts)
        if places.arrangement(width, height) not in {"wide", "medium"}:
            return found
        rows = self._used_rows(found["timeline"].height - places.FRAME_ROWS)
        return places.fitted(found, "timeline", rows, "events") if rows else found

    def shape(self) -> object:
        """How many rows all pipelines take, and those that hold them."""
        return self._least_rows(), len(self.view.pipelines), pipelines.num_rows(self.view)

    def _least_rows(self) -> int:
        shown = timeline.shown_schedule(self.view, self.look.mode)
        return timeline.least_rows(shown) if shown is not None else 0

    def wants(self) -> Wants:
        """Op times of one step; those of the model where they are looked at."""
        return Wants(schedule=True, modelled=self.look.mode != "measured", step=self.steps.step)

    def titles(self) -> None:
        """Which step, how long, and whether it stays."""
        follows = "follows the newest" if not self.steps.step else "stays at this step"
        if self.view.tape is not None:
            follows = "←→ the moments of known steps"
        known = len(self.view.schedules.steps) if self.view.schedules is not None else 0
        order = _ORDER_WORDS[self.look.order]
        title = plain(timeline.headline(self.view, self.look))
        self.entitle("timeline", f"Pipelines, {title}", f"{order}  {follows}  {known} known steps")

    def command(self) -> str:
        """The schedule in words."""
        job = self.view.job.id if self.view.job is not None else "JOB"
        step = f" --step {self.steps.step}" if self.steps.step else ""
        modelled = " --modelled" if self.look.mode == "modelled" else ""
        return f"oobleckctl describe schedule {job}{step}{modelled}"

    @property
    def look(self) -> TimelineLook:
        """What of the timeline one looks at."""
        return TimelineLook(timeline.MODES[self.mode], self.cursor, timeline.ORDERS[self.order])

    def num_rows(self) -> int:
        """Pipelines."""
        shown = timeline.shown_schedule(self.view, self.look.mode)
        return len(timeline.by_pipeline(shown)) if shown is not None else 0

    # ------------------------------------------------------------------ keys

    def action_mode(self) -> None:
        """Measured, modelled, difference."""
        self.mode = (self.mode + 1) % len(timeline.MODES)
        self.changed()

    def action_scrub(self, by: int) -> None:
        """Another step; in the past its moment."""
        at = moment_of(self.view, by)
        if at is not None:
            self.host.visit(at)
        else:
            self.steps.move(self.view.schedules, by)
            self.changed()

    def action_sort(self) -> None:
        """In order, most waiting first, or those first that a loss touches."""
        self.order = (self.order + 1) % len(timeline.ORDERS)
        self.cursor = 0
        self.changed()

    # ------------------------------------------------------------------ panels

    def _timeline(self, view: View, now: float, width: int, height: int) -> list[Line]:
        """Lanes, as high as there is room; below them, if there is some, how long which was at what."""
        shown = timeline.shown_schedule(view, self.look.mode)
        needed = timeline.num_rows(shown) if shown else 0
        if not shown or self.look.mode == "difference" or self.cursor or needed >= height:
            return timeline.paint(view, now, width, height, self.look)
        below = self._below(view, now, width, height - needed)
        look = msgspec.structs.replace(self.look, most_rows=_MOST_ROWS)
        lanes = timeline.paint(view, now, width, height - len(below) - 1, look)
        return [*lanes, (), *below]

    def _below(self, view: View, now: float, width: int, height: int) -> list[Line]:
        """What there is room for below the lanes: how long which was at what, and who holds what."""
        shown = timeline.shown_schedule(view, self.look.mode)
        below: list[Line] = []
        if shown is not None and len(shown.lanes) + 2 <= height:
            below = optimes.paint(shown, timeline.by_pipeline(shown, self.look.order), width)
        if len(view.pipelines) + len(below) + 2 <= height:
            below = [*below, (), *pipelines.paint(view, now, width, height - len(below) - 2)]
        return below

    def _used_rows(self, height: int) -> int:
        """Of so many rows, those that lanes and what is below them take; 0 where they take all."""
        shown = timeline.shown_schedule(self.view, self.look.mode)
        needed = timeline.num_rows(shown) if shown else 0
        if not shown or needed >= height:
            return 0
        below = 1 + len(self._below(self.view, self.now, _ANY_WIDTH, height - needed))
        tall = max(1, min(_MOST_ROWS, (height - below - needed) // len(shown.lanes) + 1))
        return needed + (tall - 1) * len(shown.lanes) + below

    def _fleet(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return fleet.paint(view, now, width, height, self.look)


def _legend(_view: View, _now: float, width: int, _height: int) -> list[Line]:
    return [timeline.legend(width)]
