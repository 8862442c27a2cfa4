"""The nodes in rows: what is filtered, in the order that is wanted, the rows in sight alone; as many columns
as have room, and of those that only some clusters know, only where one knows them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets import figures
from oobleckd.console.widgets.listing import clamped, counted, matches, missing, nothing, rows
from oobleckd.console.widgets.nodes import STATES, natural
from oobleckd.draw.lines import Line, Role, Span, cell, clipped, length
from oobleckd.protocol.nodeviews import NodeState, NodeView, ranges
from oobleckd.words import CELLS, seconds, size

Order = Literal["name", "state", "seen"]
ORDERS: tuple[Order, ...] = ("name", "state", "seen")
DEPENDS = ("nodes", "pipelines", "layers", "refused")
_RANK: dict[NodeState, int] = {state: rank for rank, state in enumerate(STATES)}
_ROOMY = 110
_GAP = 1


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
    columns = _fitting(_columns(view, width), width)
    body = rows(found, look.cursor, width, max(1, height - 1), lambda node: _row(node, columns, look.marked))
    said = counted(len(found), len(view.nodes), "nodes", look.words)
    names = "   " + (" " * _GAP).join(cell(each.name, each.width, right=each.right) for each in columns)
    head = clipped(((f"{names}  {said}".rstrip() if width >= _ROOMY else said or names, "dim"),), width)
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
        stage.devices[0].rpartition("/")[0]: f"P{pipeline.index} s{index}"
        for pipeline in view.pipelines
        for index, stage in enumerate(pipeline.shown)
    }


# --------------------------------------------------------------------------- columns


class NodeColumn(NamedTuple):
    """What a row says of a node, in exactly ``width`` cells; those with a small ``rank`` have room first."""

    name: str
    width: int
    rank: int
    said: Callable[[NodeView], Iterable[Span]]
    right: bool = False


def _text(say: Callable[[NodeView], str], role: Role = "") -> Callable[[NodeView], Iterable[Span]]:
    return lambda node: ((say(node), role),)


def _columns(view: View, width: int) -> list[NodeColumn]:
    """All that could be said, from left to right. The first ones say who it is and how it is."""
    places = _places(view)
    copies = {layer.layer: layer.copies for layer in view.layers}
    name, held = (18, 14) if width >= _ROOMY else (12, 10)
    found = [
        NodeColumn("node", name, 0, _text(lambda node: node.name)),
        NodeColumn("state", 12, 0, _text(lambda node: node.state)),
        NodeColumn("place", 9, 1, _text(lambda node: places.get(node.name, ""))),
        NodeColumn("layers", held, 2, _text(lambda node: ranges(node.layers))),
        NodeColumn("copies", 6, 1, lambda node: (_copies(min_copies(node, copies)),), right=True),
        NodeColumn("seen", CELLS, 5, _text(_seen), right=True),
    ]
    found += [
        NodeColumn(name, wide, rank, said, right=right)
        for name, wide, rank, said, right, known in figures.columns()
        if any(map(known, view.nodes))
    ]
    if any(node.zone for node in view.nodes):
        found.append(NodeColumn("rack", 8, 10, _text(lambda node: node.zone)))
    found.append(NodeColumn("device", 14, 11, _text(lambda node: "+".join(sorted(set(node.kinds))))))
    found.append(NodeColumn("host", 14, 13, _text(lambda node: node.host)))
    if any(node.spare or node.redundant for node in view.nodes):
        found.append(NodeColumn("spare", 16, 14, _text(_spare)))
        found.append(NodeColumn("redundant", 12, 14, _text(lambda node: ranges(node.redundant))))
    return found


def _fitting(columns: Sequence[NodeColumn], width: int) -> list[NodeColumn]:
    """Those that have room beside the signs, in their order."""
    left, kept = width - 3, set[str]()
    for each in sorted(columns, key=lambda each: each.rank):
        if each.width <= left:
            kept.add(each.name)
            left -= each.width + _GAP
    return [each for each in columns if each.name in kept] or list(columns[:1])


def _row(node: NodeView, columns: Sequence[NodeColumn], marked: Collection[str]) -> Line:
    sign, role = STATES[node.state]
    spans: list[Span] = [("◆" if node.name in marked else " ", "warn"), (sign, role), (" ", "")]
    for each in columns:
        # Why a node is lost is worth more than what it had.
        if node.reason and each.rank > (0 if node.state in _GONE else _SAYS_WHO):
            continue
        spans += [*_filled(tuple(each.said(node)), each), (" " * _GAP, "")]
    return (*spans, (node.reason, "dim")) if node.reason else tuple(spans[:-1])


_SAYS_WHO = 2
_GONE = frozenset({"lost", "left"})


def _filled(spans: Sequence[Span], column: NodeColumn) -> Line:
    """In exactly the column's width."""
    if len(spans) == 1:
        ((text, role),) = spans
        return ((cell(text, column.width, right=column.right), role),)
    cut_off = clipped(tuple(spans), column.width)
    return (*cut_off, (" " * (column.width - length(cut_off)), ""))


def _copies(least: int | None) -> Span:
    return ("-" if least is None else str(least), "bad" if least == 1 else "")


def _seen(node: NodeView) -> str:
    return seconds(node.heartbeat_age_s) if node.state not in {"lost", "left"} else "-"


def _spare(node: NodeView) -> str:
    """The state of its warm spare, and what of the host's memory that takes."""
    return f"{node.spare} {size(node.spare_bytes)}" if node.spare and node.spare_bytes else node.spare


def min_copies(node: NodeView, copies: Mapping[int, int]) -> int | None:
    """Live copies of that layer of a node that has the fewest; None where that is not known."""
    known = [
        copies[layer] for held in node.layers for layer in range(held.start, held.stop) if layer in copies
    ]
    return min(known, default=None)
