"""The nodes in rows: what is filtered, in the order that is wanted, the rows in sight alone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import clamped, counted, matches, missing, nothing, rows
from oobleckd.console.widgets.nodes import STATES, natural
from oobleckd.draw.lines import Line, clipped, cut
from oobleckd.protocol.api import LayerRange, NodeState, NodeView
from oobleckd.words import CELLS, layers, seconds, size

Order = Literal["name", "state", "seen"]
ORDERS: tuple[Order, ...] = ("name", "state", "seen")
DEPENDS = ("nodes", "pipelines", "layers", "refused")
_RANK: dict[NodeState, int] = {state: rank for rank, state in enumerate(STATES)}
_ROOMY, _WIDE = 90, 130


# What a screen looks at is a small frozen value for a pure painter: painters are tested as text, and only
# rows in sight are made. (D-console-003)
class NodeTableLook(msgspec.Struct, frozen=True):
    """Which rows, in which order, and where the cursor is."""

    words: str = ""
    order: Order = "name"
    cursor: int = 0
    marked: tuple[str, ...] = ()


def paint(view: View, _now: float, width: int, height: int, look: NodeTableLook | None = None) -> list[Line]:
    """A line with the columns' names, and the rows in sight."""
    look = look or NodeTableLook()
    found = selected(view, look)
    if not found:
        none = f'no node has "{look.words}"' if look.words else "no nodes yet"
        return nothing(missing(view, "nodes", none), height)
    kept = any(node.spare or node.redundant for node in view.nodes)
    columns = _Columns(
        _places(view), {layer.layer: layer.copies for layer in view.layers}, look.marked, width, kept
    )
    body = rows(found, look.cursor, width, max(1, height - 1), columns.row)
    said = counted(len(found), len(view.nodes), "nodes", look.words)
    head = clipped(((columns.head() + said if width >= _ROOMY else said or columns.head(), "dim"),), width)
    return [head, *body][:height] if height > 1 else body


def selected(view: View, look: NodeTableLook) -> list[NodeView]:
    """The rows, in order."""
    found = [node for node in view.nodes if not look.words or matches(_words(node), look.words)]
    match look.order:
        case "state":
            return sorted(found, key=lambda node: (_RANK[node.state], natural(node.name)))
        case "seen":
            return sorted(found, key=lambda node: (-node.heartbeat_age_s, natural(node.name)))
        case _:
            return sorted(found, key=lambda node: natural(node.name))


def at_cursor(view: View, look: NodeTableLook) -> NodeView | None:
    """The node of the cursor; None where no row is left."""
    found = selected(view, look)
    return found[clamped(look.cursor, len(found))] if found else None


def _words(node: NodeView) -> str:
    return " ".join((node.name, node.state, node.zone, node.host, *node.kinds, node.reason))


def _places(view: View) -> dict[str, str]:
    """Node -> ``"P3 s1"``."""
    return {
        stage.device.rpartition("/")[0]: f"P{pipeline.index} s{index}"
        for pipeline in view.pipelines
        for index, stage in enumerate(pipeline.stages)
    }


class _Columns(NamedTuple):
    """What a row says; in a narrow panel without rack and kind of device, in a wide one with host and, where
    any node has them, spare and redundant layers (``kept``).
    """

    places: Mapping[str, str]
    copies: Mapping[int, int]
    marked: Collection[str]
    width: int
    kept: bool

    def head(self) -> str:
        """The columns' names."""
        more = _more("host", "spare", "redundant", kept=self.kept) if self.width >= _WIDE else ""
        return (
            "  "
            + self._text("node", "state", "seen", "rack", "device", "place", "layers")
            + " copies  "
            + more
        )

    def row(self, node: NodeView) -> Line:
        """One node."""
        sign, role = STATES[node.state]
        held = _held(node.layers)
        heartbeat = seconds(node.heartbeat_age_s) if node.state not in {"lost", "left"} else "-"
        kinds = "+".join(sorted(set(node.kinds)))
        text = self._text(
            node.name, node.state, heartbeat, node.zone, kinds, self.places.get(node.name, ""), held
        )
        least = min_copies(node, self.copies)
        # Why a node is lost is worth more than what it had.
        wide = self.width >= _WIDE and not node.reason
        more = _more(node.host, _spare(node), _held(node.redundant), kept=self.kept) if wide else ""
        return (
            ("◆" if node.name in self.marked else " ", "warn"), (sign, role), (text, ""),
            (f"{'-' if least is None else least:>7}  ", "bad" if least == 1 else ""), (more, ""),
            (node.reason, "dim"),
        )  # fmt: skip

    def _text(
        self, name: str, state: str, heartbeat: str, rack: str, kind: str, place: str, held: str
    ) -> str:
        if self.width < _ROOMY:
            return f" {cut(name, 12):<12} {state:<12} {heartbeat:>{CELLS}} {place:<8} {cut(held, 10):<10}"
        wide = f"{cut(rack, 8):<8} {cut(kind, 12):<12} "
        return f" {cut(name, 18):<18} {state:<12} {heartbeat:>{CELLS}}  {wide}{place:<8} {cut(held, 14):<14}"


def _held(ranges: Sequence[LayerRange]) -> str:
    return ", ".join(layers(each.start, each.stop) for each in ranges)


def _spare(node: NodeView) -> str:
    """The state of its warm spare, and what of the host's memory that takes."""
    return f"{node.spare} {size(node.spare_bytes)}" if node.spare and node.spare_bytes else node.spare


def _more(host: str, spare: str, redundant: str, *, kept: bool) -> str:
    more = f"{cut(spare, 16):<16} {cut(redundant, 12):<12} " if kept else ""
    return f"{cut(host, 14):<14} {more}"


def min_copies(node: NodeView, copies: Mapping[int, int]) -> int | None:
    """Live copies of that layer of a node that has the fewest; None where that is not known."""
    known = [
        copies[layer] for held in node.layers for layer in range(held.start, held.stop) if layer in copies
    ]
    return min(known, default=None)
