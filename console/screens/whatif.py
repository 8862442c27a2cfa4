"""8 What-if: mark nodes, see what follows if they die, and let them die."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.acts import HOWS, ConsoleAct
from oobleckd.console.facts import Wants
from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Host, ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.screens.risk import Risk
from oobleckd.console.widgets import copies, events, impact, nodetable, pipelines
from oobleckd.console.widgets.nodetable import NodeTableLook
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line

_UPPER_ROWS, _LOWER_ROWS = 12, 12


class WhatIf(ListPage):
    """The nodes with marks, and what the daemon says would follow."""

    TAG: ClassVar[ScreenName] = "whatif"
    BINDINGS: ClassVar[list[BindingType]] = bindings("whatif", "list")
    ROWS = "nodes"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.how = 0
        self._risk = Risk(many=True)

    def body(self) -> Iterable[Panel]:
        """Nodes, what follows; where there is room the plan, who else matters, copies and events."""
        yield Panel(self._table, "Nodes", id="table", depends=nodetable.DEPENDS)
        yield Panel(self._impact, "What follows", id="impact", depends=impact.DEPENDS)
        yield Panel(pipelines.paint, "Who holds what", id="plan", depends=pipelines.DEPENDS)
        yield Panel(impact.ranking, "One node alone", id="ranking", depends=impact.DEPENDS)
        yield Panel(copies.paint, "Live copies of each layer", id="copies", depends=copies.DEPENDS)
        yield Panel(events.paint, "Events", id="events", depends=events.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """Side by side, where it is wide enough; below them what else there is room for."""
        found = places.side_by_side(width, height, "table", "impact", 48)
        if places.arrangement(width, height) not in {"wide", "medium"}:
            return found
        table, follows = found["table"], found["impact"]
        upper = max(_UPPER_ROWS, min(len(self.view.nodes) + 3, table.height - _LOWER_ROWS))
        found |= places.above(table, ("table", upper), ("plan", 0))
        found = places.fitted(found, "plan", pipelines.num_rows(self.view), "copies")
        ranked = impact.num_rows(self.view)
        if not self.host.marks.names:  # what follows is the ranking itself, below a hint
            return places.fitted(found, "impact", 1 + ranked, "events")
        found |= places.above(follows, ("impact", upper), ("ranking", 0))
        return places.fitted(found, "ranking", ranked, "events")

    def shape(self) -> object:
        """How many rows nodes, pipelines and the ranking have, and whether nodes are marked."""
        view = self.view
        rows = len(view.nodes), pipelines.num_rows(view), impact.num_rows(view)
        return rows, bool(self.host.marks.names)

    def wants(self) -> Wants:
        """What would follow without the marked nodes, or without one of those that matter most; and who holds
        what.
        """
        marked = self.host.marks.names
        ranked = places.arrangement(*self.size) in {"wide", "medium"} or not marked
        others = self._risk.candidates(self.view) if ranked else ()
        return Wants(layers=True, impacts=(*((marked,) if marked else ()), *others))

    def titles(self) -> None:
        """Who is marked, and how they would die."""
        marked = self.host.marks.names
        self.entitle("table", f"Nodes, {len(marked)} marked", f"would die by {HOWS[self.how]}")
        self.entitle("impact", f"Without {', '.join(marked)}" if marked else "What follows")

    def command(self) -> str:
        """The same question in words."""
        marked = self.host.marks.names
        return f"oobleckctl what-if --without {','.join(marked)}" if marked else "oobleckctl get nodes"

    @property
    def look(self) -> NodeTableLook:
        """What of the nodes one looks at."""
        return NodeTableLook(self.words, "name", self.cursor, self.host.marks.names)

    def num_rows(self) -> int:
        """Rows of the nodes."""
        return len(self.names())

    def names(self) -> Sequence[str]:
        """Of nodes."""
        return [node.name for node in nodetable.selected(self.view, self.look)]

    # ------------------------------------------------------------------ keys

    def action_mark(self) -> None:
        """Mark the node, or take the mark back."""
        node = nodetable.at_cursor(self.view, self.look)
        if node is not None:
            self.host.marks.toggle(node.name)
            self.changed()

    def action_clear(self) -> None:
        """Take all marks back."""
        self.host.marks.clear()
        self.changed()

    def action_how(self) -> None:
        """Another way to die."""
        self.how = (self.how + 1) % len(HOWS)
        self.changed()

    def action_inject(self) -> None:
        """Let them die, if that is confirmed."""
        marked = self.host.marks.names
        self.host.ask(ConsoleAct("kill", marked, HOWS[self.how]), marked)

    # ------------------------------------------------------------------ panels

    def _table(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return nodetable.paint(view, now, width, height, self.look)

    def _impact(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return impact.paint(view, now, width, height, self.host.marks.names)
