"""6 Job: progress, curves of the run, how long steps take, and where the time of the devices went."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.acts import ConsoleAct
from oobleckd.console.facts import Wants
from oobleckd.console.keys import ScreenName
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Page, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.widgets import curves, goodput, jobfacts, steptimes
from oobleckd.console.widgets.panel import Panel


class JobPage(Page):
    """Facts, curves with the incidents, goodput by cause, and the spread of step times."""

    TAG: ClassVar[ScreenName] = "job"
    BINDINGS: ClassVar[list[BindingType]] = bindings("job")

    def body(self) -> Iterable[Panel]:
        """Facts, curves, goodput, step times."""
        yield Panel(jobfacts.paint, "Job", id="facts", depends=jobfacts.DEPENDS)
        yield Panel(curves.paint, "Curves of the run", id="curves", depends=curves.DEPENDS)
        yield Panel(goodput.paint, "Where the time went", id="goodput", depends=goodput.DEPENDS)
        yield Panel(steptimes.paint, "Step times", id="times", depends=steptimes.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """The curves have what the others leave."""
        found, rest = places.framed_by(width, height, "curves")
        match places.arrangement(width, height):
            case "tiny":
                return found
            case "small":
                return found | places.above(rest, ("facts", 6), ("curves", 0), ("goodput", 5))
            case found_size:
                low_rows = 13 if found_size == "wide" else 10
                facts = ("facts", jobfacts.rows(self.view) + 2)
                rows = places.above(rest, facts, ("curves", 0), ("low", low_rows))
                low = rows.pop("low", None)
                return found | rows | (places.split(low, ("goodput", 3), ("times", 2)) if low else {})

    def shape(self) -> object:
        """How many lines the facts have."""
        return jobfacts.rows(self.view)

    def wants(self) -> Wants:
        """Where the time went."""
        return Wants(goodput=True, curve=True)

    def titles(self) -> None:
        """What the signs on the axes are."""
        self.entitle("curves", "Curves of the run", curves.said(self.view))
        self.entitle("times", "Step times", steptimes.said(self.view))

    def command(self) -> str:
        """The job in words."""
        return (
            f"oobleckctl describe job {self.view.job.id}"
            if self.view.job is not None
            else "oobleckctl get jobs"
        )

    # ------------------------------------------------------------------ keys

    def action_pause(self) -> None:
        """Pause, or go on."""
        paused = self.view.job is not None and self.view.job.state == "paused"
        self.host.ask(ConsoleAct("resume" if paused else "pause", self._names()))

    def action_checkpoint(self) -> None:
        """Write one at the next boundary."""
        self.host.ask(ConsoleAct("checkpoint", self._names()))

    def action_cancel(self) -> None:
        """End the job."""
        self.host.ask(ConsoleAct("cancel", self._names()))

    def _names(self) -> tuple[str, ...]:
        return (self.view.job.id,) if self.view.job is not None else ()
