"""The newest lines that a node wrote, with a place in them and words that are looked for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import clamped, matches, nothing, window
from oobleckd.draw.lines import Line, Role, clipped


class NodeLogLook(msgspec.Struct, frozen=True):
    """Of which node, from where: the line at the bottom, or the newest one while ``follow``; and which
    ``words`` are looked for.
    """

    node: str
    words: str = ""
    cursor: int = 0
    follow: bool = True


def paint(view: View, _now: float, width: int, height: int, look: NodeLogLook) -> list[Line]:
    """The lines in sight; where there are none, why."""
    lines = lines_of(view, look.node)
    if not lines:
        return nothing(clipped(_missing(view, look.node), width), height)
    last = len(lines) - 1 if look.follow else clamped(look.cursor, len(lines))
    shown = window(max(last, height - 1) - height // 2 + 1, len(lines), height)
    return [
        clipped(
            ((lines[index], _role(lines[index], look, at_cursor=index == last and not look.follow)),), width
        )
        for index in shown
    ]


def lines_of(view: View, node: str) -> tuple[str, ...]:
    """What is known of the node's."""
    return view.log.lines if view.log is not None and view.log.node == node else ()


def found(view: View, look: NodeLogLook) -> list[int]:
    """Lines that have the words."""
    lines = lines_of(view, look.node)
    return [index for index, line in enumerate(lines) if look.words and matches(line, look.words)]


def following(places: Sequence[int], cursor: int, by: int) -> int:
    """The place before ``cursor`` or after it; where there is none, the cursor stays."""
    if by < 0:
        return max((place for place in places if place < cursor), default=cursor)
    return min((place for place in places if place > cursor), default=cursor)


def _role(line: str, look: NodeLogLook, *, at_cursor: bool) -> Role:
    if at_cursor:
        return "cursor"
    if look.words and matches(line, look.words):
        return "warn"
    return "dim" if look.words else ""


def _missing(view: View, node: str) -> Line:
    if view.tape is not None:
        return (("what a node wrote is not kept of the past; esc comes back to now", "dim"),)
    if problem := view.refusal("log"):
        return ((f"not known: {problem}", "warn"),)
    if view.log is not None and view.log.node == node:
        return ((f"{node} has written nothing", "dim"),)
    return ((f"asking for what {node} wrote …", "dim"),)
