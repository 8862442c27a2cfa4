"""6 Job: loss, throughput, and where the time of the devices went."""

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
from oobleckd.console.widgets import curves, goodput, jobfacts
from oobleckd.console.widgets.panel import Panel


class JobPage(Page):
    """Facts, curves with the incidents, and goodput by cause."""

    TAG: ClassVar[ScreenName] = "job"
    BINDINGS: ClassVar[list[BindingType]] = bindings("job")

    def body(self) -> Iterable[Panel]:
        """Facts, curves, goodput."""
        yield Panel(jobfacts.paint, "Job", id="facts", depends=jobfacts.DEPENDS)
        yield Panel(curves.paint, "Curves of the run", id="curves", depends=curves.DEPENDS)
        yield Panel(goodput.paint, "Where the time went", id="goodput", depends=goodput.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """The curves have what the others leave."""
        small = places.arrangement(width, height) == "small"
        return places.one_below_other(
            width,
            height,
            "curves",
            (("facts", 5 if small else 6), ("curves", 0), ("goodput", 7 if small else 12)),
        )

    def wants(self) -> Wants:
        """Where the time went."""
        return Wants(goodput=True, curve=True)

    def titles(self) -> None:
        """What the signs on the axes are."""
        self.entitle("curves", "Curves of the run", curves.said(self.view))

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
