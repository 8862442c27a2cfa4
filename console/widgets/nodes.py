"""The nodes: a line each while there is room, else a cell each, else a cell for several. Glyphs say the
state.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import missing
from oobleckd.draw.lines import Line, Role, Span, clipped, cut
from oobleckd.protocol.nodeviews import NodeState, NodeView, ranges
from oobleckd.words import CELLS, layers, seconds

DEPENDS = ("nodes", "refused")
# In order of how much they matter: a cell that stands for several nodes shows the worst of them.
# The shape says the state, as colour must not say anything alone; a sign for each node is twice as large.
# (D-console-006)
STATES: dict[NodeState, tuple[str, Role]] = {
    "lost": ("✗", "bad"),
    "disconnected": ("?", "warn"),
    "draining": ("↓", "warn"),
    "joining": ("+", "note"),
    "drained": ("_", "dim"),
    "active": ("■", "good"),
    "standby": ("□", "note"),
    "left": ("·", "dim"),
}
_RANK: dict[NodeState, int] = {state: rank for rank, state in enumerate(STATES)}


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """The nodes in name order, and how many are in which state."""
    nodes = sorted(view.nodes, key=lambda node: natural(node.name))
    if not nodes:
        return [missing(view, "nodes", "no nodes yet")]
    if len(nodes) < height:
        name = min(20, max(len(node.name) for node in nodes))
        state = max(len(node.state) for node in nodes)
        body = [_row(node, name, state, width) for node in nodes]
    else:
        body = _named_grid(nodes, width, height - 1) or _grid(nodes, width, height - 1)
    return [*body, counts(nodes, width)][:height]


@lru_cache(maxsize=1 << 17)
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts node-2 before node-10. Kept: in every frame thousands of names are sorted that were sorted
    before.
    """
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


def _row(node: NodeView, name: int, state: int, width: int) -> Line:
    glyph, role = STATES[node.state]
    held = ranges(node.layers)
    redundant = ", ".join(layers(each.start, each.stop) for each in node.redundant)
    what = node.reason or (f"layers {held}" if held else "") + (
        f", redundant layers {redundant}" if redundant else ""
    )
    here = node.state not in {"lost", "left"}
    seen = f"  {f'seen {seconds(node.heartbeat_age_s)}':>{CELLS}}" if here else ""
    left = f" {cut(node.name, name):<{name}}  {node.state:<{state}}  "
    room = max(0, width - 1 - len(left) - len(seen))
    return ((glyph, role), (left, ""), (cut(what, room).ljust(room), "dim"), (seen, "dim"))


def _named_grid(nodes: Sequence[NodeView], width: int, height: int) -> list[Line]:
    """Glyph and name; nothing where not all have room."""
    cell = max(len(node.name) for node in nodes) + 4
    columns = width // cell
    if columns == 0 or len(nodes) > columns * height:
        return []
    return [named(nodes[first : first + columns], cell) for first in range(0, len(nodes), columns)]


def named(nodes: Sequence[NodeView], width: int) -> Line:
    """Sign and name of each in ``width`` cells."""
    spans: list[Span] = []
    for node in nodes:
        glyph, role = STATES[node.state]
        spans += [(glyph, role), (f" {node.name}".ljust(width - 1), "")]
    return tuple(spans)


def _grid(nodes: Sequence[NodeView], width: int, height: int) -> list[Line]:
    """One glyph for a node, or for as many as it takes to fit."""
    per_cell = math.ceil(len(nodes) / max(1, width * height))
    worst: list[NodeState] = [
        min((node.state for node in nodes[first : first + per_cell]), key=_RANK.__getitem__)
        for first in range(0, len(nodes), per_cell)
    ]
    return [_run_lengths(worst[first : first + width]) for first in range(0, len(worst), max(1, width))]


def _run_lengths(states: Sequence[NodeState]) -> Line:
    spans: list[Span] = []
    for state in states:
        glyph, role = STATES[state]
        if spans and spans[-1][1] == role and spans[-1][0][0] == glyph:
            spans[-1] = (spans[-1][0] + glyph, role)
        else:
            spans.append((glyph, role))
    return tuple(spans)


def counts(nodes: Sequence[NodeView], width: int) -> Line:
    """How many nodes are in which state, the worst first."""
    found = Counter(node.state for node in nodes)
    spans: list[Span] = []
    for state, (glyph, role) in STATES.items():
        if found[state]:
            spans += [(f"{glyph} ", role), (f"{found[state]} {state}  ", "")]
    return clipped(tuple(spans), width)
