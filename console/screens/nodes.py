"""2 Nodes: every node in half blocks and in rows, how many live copies each layer has, and what devices say
of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import BindingType

from oobleckd.console.acts import ConsoleAct
from oobleckd.console.facts import Wants
from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.screens import places
from oobleckd.console.screens.page import Host, ListPage, bindings
from oobleckd.console.screens.places import Places
from oobleckd.console.widgets import copies, figures, grid, nodetable
from oobleckd.console.widgets.listing import clamped
from oobleckd.console.widgets.nodetable import NodeTableLook
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line

_TOP_ROWS = 8
_DEVICE_ROWS, _COPIES_ROWS = 6, 5
_HEADED = 3  # a table's frame and the names of its columns


class NodesPage(ListPage):
    """A grid, the layers, a table with a cursor, and what its devices say."""

    TAG: ClassVar[ScreenName] = "nodes"
    BINDINGS: ClassVar[list[BindingType]] = bindings("nodes", "list")
    ROWS = "nodes"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.by = 0
        self.order = 0
        self._num_groups = 0
        self._counted: object = None
        self._grouped: tuple[tuple[object, ...], str] = ((None,) * 5, "")

    def body(self) -> Iterable[Panel]:
        """Grid, layers, table, devices."""
        yield Panel(self._grid, "Nodes", id="grid", depends=grid.DEPENDS)
        yield Panel(copies.paint, "Live copies of each layer", id="copies", depends=copies.DEPENDS)
        yield Panel(self._table, "Table", id="table", depends=nodetable.DEPENDS)
        yield Panel(self._devices, "Devices", id="devices", depends=nodetable.DEPENDS)

    def places(self, width: int, height: int) -> Places:
        """Grid and layers above, the table below, as high as it has rows; devices have what is left. In
        little room the grid is for those that the table has no rows for.
        """
        found, rest = places.framed_by(width, height, "table")
        match places.arrangement(width, height):
            case "tiny":
                return found
            case "small":
                if len(self.view.nodes) + _HEADED <= rest.height - _COPIES_ROWS:
                    return found | places.above(rest, ("table", 0), ("copies", _COPIES_ROWS))
                return found | places.above(rest, ("table", 0), ("grid", 5), ("copies", _COPIES_ROWS))
            case _:
                top_rows = min(rest.height * 2 // 5, max(_TOP_ROWS, self._num_groups + 4))
                table = min(len(self.view.nodes) + 3, rest.height - top_rows - _DEVICE_ROWS)
                rows = places.above(rest, ("top", top_rows), ("table", max(table, _TOP_ROWS)), ("devices", 0))
                top = rows.pop("top", None)
                return found | rows | (places.split(top, ("grid", 3), ("copies", 2)) if top else {})

    def shape(self) -> object:
        """How many nodes and racks there are."""
        if self._counted is not self.view.nodes:
            self._counted = self.view.nodes
            self._num_groups = len({node.zone for node in self.view.nodes})
        return len(self.view.nodes), self._num_groups

    def wants(self) -> Wants:
        """Who holds which layer."""
        return Wants(layers=True)

    def titles(self) -> None:
        """How the grid is grouped, how the table is sorted."""
        self.entitle("grid", "Nodes", self._grouping())
        order = nodetable.ORDERS[self.order]
        self.entitle("table", f'Table: "{self.words}"' if self.words else "Table", f"by {order}")

    def _grouping(self) -> str:
        """Made anew with other nodes alone: to group a thousand takes a while."""
        width, height = self._panels["grid"].size if "grid" in self._panels else (0, 0)
        asked = self.view.nodes, self.view.pipelines, self.by, width, height
        if any(one is not two for one, two in zip(asked, self._grouped[0], strict=True)):
            said = grid.grouping(self.view, grid.GROUPINGS[self.by], width, height)
            self._grouped = asked, said
        return self._grouped[1]

    def command(self) -> str:
        """The node of the cursor in words."""
        node = nodetable.at_cursor(self.view, self.look)
        return f"oobleckctl describe node {node.name}" if node is not None else "oobleckctl get nodes"

    @property
    def look(self) -> NodeTableLook:
        """What of the table one looks at."""
        return NodeTableLook(self.words, nodetable.ORDERS[self.order], self.cursor, self.host.marks.names)

    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.names())

    def names(self) -> Sequence[str]:
        """Of nodes."""
        return [node.name for node in nodetable.selected(self.view, self.look)]

    # ------------------------------------------------------------------ keys

    def action_group(self) -> None:
        """Group the grid by something else."""
        self.by = (self.by + 1) % len(grid.GROUPINGS)
        self.changed()

    def action_sort(self) -> None:
        """Sort the table by something else."""
        self.order = (self.order + 1) % len(nodetable.ORDERS)
        self.cursor = 0
        self.changed()

    def action_mark(self) -> None:
        """Mark the node for the what-if screen, or take the mark back."""
        node = nodetable.at_cursor(self.view, self.look)
        if node is not None:
            self.host.marks.toggle(node.name)
            self.changed()

    def action_drain(self) -> None:
        """Take the node out, if that is confirmed."""
        node = nodetable.at_cursor(self.view, self.look)
        self.host.ask(ConsoleAct("drain", (node.name,) if node else ()), (node.name,) if node else ())

    def action_undrain(self) -> None:
        """Let the node be used again, if that is confirmed."""
        node = nodetable.at_cursor(self.view, self.look)
        self.host.ask(ConsoleAct("undrain", (node.name,) if node else ()))

    def action_log(self) -> None:
        """What the node wrote last."""
        node = nodetable.at_cursor(self.view, self.look)
        if node is not None:
            self.host.show_log(node.name)

    # ------------------------------------------------------------------ panels

    def _grid(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return grid.paint(view, now, width, height, grid.GROUPINGS[self.by])

    def _devices(self, view: View, _now: float, width: int, height: int) -> list[Line]:
        found = nodetable.selected(view, self.look)
        return figures.paint(view, width, height, found, clamped(self.cursor, len(found)))

    def _table(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return nodetable.paint(view, now, width, height, self.look)
