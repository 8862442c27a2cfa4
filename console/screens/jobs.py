"""9 Jobs: all jobs and the queue; the one that is chosen is shown on every screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec
from textual.binding import BindingType

from oobleckd.console.facts import Wants
from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.widgets import curves, jobfacts, jobtable
from oobleckd.console.widgets.jobtable import JobTableLook
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line

_CURVE_ROWS, _FEW_CURVE_ROWS = 10, 7


class JobsPage(ListPage):
    """A table with a cursor, the job of the cursor in words, and the curves of the one that is shown."""

    TAG: ClassVar[ScreenName] = "jobs"
    BINDINGS: ClassVar[list[BindingType]] = bindings("jobs", "list")
    ROWS = "jobs"

    def body(self) -> Iterable[Panel]:
        """Table, facts."""
        yield Panel(self._table, "Jobs", id="table", depends=jobtable.DEPENDS)
        yield Panel(self._facts, "Job", id="facts", depends=jobtable.DEPENDS)
        yield Panel(curves.paint, "Curves of the run", id="curves", depends=curves.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """The table has as many rows as there are jobs, where that leaves room for curves."""
        facts = ("facts", jobfacts.ROWS + 2)
        room = height - places.VERDICT_ROWS - places.FOOTER_ROWS - facts[1]
        if places.arrangement(width, height) in {"tiny", "small"}:
            few = len(self.view.jobs) + 3
            roomy = few + _FEW_CURVE_ROWS <= room
            parts = (("table", few), facts, ("curves", 0)) if roomy else (("table", 0), facts)
            return places.one_below_other(width, height, "table", parts)
        table = min(len(self.view.jobs) + 4, room - _CURVE_ROWS)
        return places.one_below_other(width, height, "table", (("table", table), facts, ("curves", 0)))

    def shape(self) -> object:
        """How many jobs there are."""
        return len(self.view.jobs)

    def wants(self) -> Wants:
        """The curves of the job that is shown."""
        return Wants(curve=True)

    def titles(self) -> None:
        """How many wait, and which one is shown."""
        waiting = len(jobtable.places(self.view))
        self.entitle(
            "table",
            f'Jobs: "{self.words}"' if self.words else "Jobs",
            f"{waiting:,} in the queue   {'▸ chosen' if self.view.chosen else '▸ the one at work'}",
        )
        shown = self.view.job.id if self.view.job is not None else "the run"
        self.entitle("curves", f"Curves of {shown}", curves.said(self.view))
        job = jobtable.at_cursor(self.view, self.look)
        self.entitle("facts", job.id if job is not None else "Job")

    def command(self) -> str:
        """The job of the cursor in words."""
        job = jobtable.at_cursor(self.view, self.look)
        return f"oobleckctl describe job {job.id}" if job is not None else "oobleckctl get jobs"

    @property
    def look(self) -> JobTableLook:
        """What of the table one looks at."""
        return JobTableLook(self.words, self.cursor)

    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.names())

    def names(self) -> Sequence[str]:
        """Ids of jobs."""
        return [job.id for job in jobtable.selected(self.view, self.look)]

    # ------------------------------------------------------------------ keys

    def action_choose(self) -> None:
        """Show the job of the cursor on every screen."""
        job = jobtable.at_cursor(self.view, self.look)
        if job is not None:
            self.host.choose(job.id)

    def action_automatic(self) -> None:
        """Show whichever job is at work."""
        self.host.choose("")

    # ------------------------------------------------------------------ panels

    def _table(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return jobtable.paint(view, now, width, height, self.look)

    def _facts(self, view: View, now: float, width: int, height: int) -> list[Line]:
        job = jobtable.at_cursor(view, self.look)
        return jobfacts.paint(msgspec.structs.replace(view, job=job), now, width, height)
