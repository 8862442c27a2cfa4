"""All nodes in half blocks, two of them in a cell, by rack or by pipeline. Pure.

Ink is a node at work, and what is missing of a cell is a node that is not: the shape says it, the colour says
why. Those that are not well are named below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import missing
from oobleckd.console.widgets.nodes import STATES, counts, named, natural
from oobleckd.draw.lines import Line, Role, Span, clipped, cut
from oobleckd.protocol.nodeviews import NodeState, NodeView

By = Literal["rack", "pipeline", "none"]
GROUPINGS: tuple[By, ...] = ("rack", "pipeline", "none")
DEPENDS = ("nodes", "pipelines", "refused")
Half = Literal["good", "warn", "bad", "note", "dim"]
HALVES: dict[NodeState, Half] = {
    "lost": "bad", "disconnected": "warn", "draining": "warn", "joining": "note", "drained": "dim",
    "active": "good", "standby": "note", "left": "dim",
}  # fmt: skip
_ORDER: tuple[Half, ...] = ("good", "warn", "bad", "note", "dim")
_RANK: tuple[Half, ...] = ("bad", "warn", "note", "dim", "good")
_WHOLE: dict[Half, str] = {"good": "█", "warn": "▒", "bad": "✗", "note": "▓", "dim": "·"}
_PAIRS: dict[tuple[Half, Half], Role] = {
    ("good", "warn"): "good/warn", ("good", "bad"): "good/bad", ("good", "note"): "good/note",
    ("good", "dim"): "good/dim", ("warn", "bad"): "warn/bad", ("warn", "note"): "warn/note",
    ("warn", "dim"): "warn/dim", ("bad", "note"): "bad/note", ("bad", "dim"): "bad/dim",
    ("note", "dim"): "note/dim",
}  # fmt: skip
_ILL = ("lost", "disconnected", "draining", "joining")
_LABEL, _BELOW = 10, 2


def paint(view: View, _now: float, width: int, height: int, by: By = "rack") -> list[Line]:
    """Groups of nodes, then who is not well, then how many are in which state."""
    if not view.nodes:
        return [missing(view, "nodes", "no nodes yet")]
    if height <= 1:
        return [counts(view.nodes, width)][:height]
    groups = grouped(view, by)
    below = (
        [_named(view.nodes, width), counts(view.nodes, width)] if height > 2 else [counts(view.nodes, width)]
    )
    room = height - len(below)
    label = _label(groups)
    lines = _by_name(groups, label, width, room) or _fitting(groups, label, width, room)
    return [*lines, *below][:height]


def grouping(view: View, by: By, width: int, height: int) -> str:
    """How they are grouped in so much room, in words: by what some of them have."""
    groups = grouped(view, by)
    if not any(name for name, _ in groups):
        return "all together"
    return (
        f"by {by}"
        if _have_room(groups, width - _label(groups), height - _BELOW)
        else "all together, for lack of room"
    )


def grouped(view: View, by: By) -> list[tuple[str, list[NodeView]]]:
    """Names of the groups with their nodes, each in the order of names; nodes of no group come last."""
    home = {node: f"P{pipeline.index}" for pipeline in view.pipelines for node in pipeline.nodes}
    groups: dict[str, list[NodeView]] = {}
    for node in sorted(view.nodes, key=lambda node: natural(node.name)):
        name = node.zone if by == "rack" else home.get(node.name, "") if by == "pipeline" else ""
        groups.setdefault(name, []).append(node)
    return sorted(groups.items(), key=lambda group: (not group[0], natural(group[0])))


def _label(groups: Sequence[tuple[str, list[NodeView]]]) -> int:
    """Cells for the groups' names."""
    return 0 if len(groups) == 1 else min(_LABEL, 1 + max(len(name) for name, _ in groups))


def _have_room(groups: Sequence[tuple[str, list[NodeView]]], cells: int, height: int) -> bool:
    """Whether every group has lines of its own."""
    return sum(math.ceil(len(nodes) / (2 * max(1, cells))) for _, nodes in groups) <= height


def _by_name(groups: Sequence[tuple[str, list[NodeView]]], label: int, width: int, height: int) -> list[Line]:
    """Every node by its sign and name; nothing where not all have room."""
    if sum(len(nodes) for _, nodes in groups) > width * height:
        return []  # a thousand names need not be measured
    wide = max(len(node.name) for _, nodes in groups for node in nodes) + len("■   ")
    columns = (width - label) // wide
    if columns < 1 or sum(math.ceil(len(nodes) / columns) for _, nodes in groups) > height:
        return []
    lines: list[Line] = []
    for name, nodes in groups:
        for first in range(0, len(nodes), columns):
            text = (cut(name or "-", label - 1) if first == 0 else "").ljust(label) if label else ""
            lines.append(((text, "dim"), *named(nodes[first : first + columns], wide)))
    return lines


def _fitting(groups: Sequence[tuple[str, list[NodeView]]], label: int, width: int, height: int) -> list[Line]:
    """Every group on lines of its own; where those are too many, all nodes together, several to a half."""
    cells = max(1, width - label)
    if _have_room(groups, cells, height):
        return [line for name, nodes in groups for line in _group(name, nodes, label, cells)]
    nodes = [node for _, group in groups for node in group]
    per_half = math.ceil(len(nodes) / (2 * max(1, width) * max(1, height)))
    halves = [_worst(nodes[first : first + per_half]) for first in range(0, len(nodes), per_half)]
    return [_line(halves[first : first + 2 * width]) for first in range(0, len(halves), 2 * max(1, width))]


def _group(name: str, nodes: Sequence[NodeView], label: int, cells: int) -> Iterator[Line]:
    for first in range(0, len(nodes), 2 * cells):
        halves = [HALVES[node.state] for node in nodes[first : first + 2 * cells]]
        text = (cut(name or "-", label - 1) if first == 0 else "").ljust(label) if label else ""
        yield ((text, "dim"), *_line(halves))


def _worst(nodes: Sequence[NodeView]) -> Half:
    return min((HALVES[node.state] for node in nodes), key=_RANK.index)


def _line(halves: Sequence[Half]) -> Line:
    """Upper half first, then the lower one, then the next cell."""
    spans: list[Span] = []
    for index in range(0, len(halves), 2):
        span = cell(halves[index], halves[index + 1] if index + 1 < len(halves) else None)
        if spans and spans[-1][1] == span[1]:
            spans[-1] = (spans[-1][0] + span[0], span[1])
        else:
            spans.append(span)
    return tuple(spans)


def cell(upper: Half, lower: Half | None) -> Span:
    """Two nodes in one cell. The ink is the one that is better off."""
    if lower is None:
        return ("▀", upper)
    if upper == lower:
        return (_WHOLE[upper], upper)
    if _ORDER.index(upper) < _ORDER.index(lower):
        return ("▀", _PAIRS[upper, lower])
    return ("▄", _PAIRS[lower, upper])


def _named(nodes: Sequence[NodeView], width: int) -> Line:
    """Who is not well, the worst first."""
    ill = sorted(
        (node for node in nodes if node.state in _ILL),
        key=lambda node: (_ILL.index(node.state), natural(node.name)),
    )
    if not ill:
        return (("all are well", "dim"),)
    spans: list[Span] = []
    for node in ill[: max(1, width // 4)]:
        sign, role = STATES[node.state]
        spans.append((f"{sign} {node.name} {node.state}  ", role))
    return clipped(tuple(spans), width)
