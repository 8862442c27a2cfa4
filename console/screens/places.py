"""Where the overview's panels lie in a terminal of a given size. Pure.

Three arrangements: *wide* from 140 x 40, *medium* from 100 x 30, else *small* (made for 80 x 24), which leaves the
templates out. Every cell above the footer belongs to exactly one panel.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Arrangement = Literal["wide", "medium", "small"]
VERDICT_ROWS = 3


class Place(NamedTuple):
    """Left edge, top edge, width and height in cells."""

    x: int
    y: int
    width: int
    height: int


def arrangement(width: int, height: int) -> Arrangement:
    """The arrangement of a terminal of ``width`` x ``height`` cells."""
    if width >= 140 and height >= 40:
        return "wide"
    return "medium" if width >= 100 and height >= 30 else "small"


def places(width: int, height: int) -> dict[str, Place]:
    """Panel -> place, in an area of ``width`` x ``height`` cells (the terminal without its footer)."""
    match arrangement(width, height + 1):
        case "wide":
            return _beside(width, height, left=56, templates=8, training=10, bottom=13)
        case "medium":
            return _beside(width, height, left=48, templates=6, training=6, bottom=12)
        case _:
            return _stacked(width, height)


def _beside(
    width: int, height: int, *, left: int, templates: int, training: int, bottom: int
) -> dict[str, Place]:
    """Nodes, templates and training on the left, pipelines on the right, the incident and events below."""
    middle = height - VERDICT_ROWS - bottom
    nodes = middle - templates - training
    y = VERDICT_ROWS
    split = width * 3 // 5
    return {
        "verdict": Place(0, 0, width, VERDICT_ROWS),
        "nodes": Place(0, y, left, nodes),
        "templates": Place(0, y + nodes, left, templates),
        "training": Place(0, y + nodes + templates, left, training),
        "pipelines": Place(left, y, width - left, middle),
        "recovery": Place(0, y + middle, split, bottom),
        "events": Place(split, y + middle, width - split, bottom),
    }


def _stacked(width: int, height: int) -> dict[str, Place]:
    """Three rows of panels under the verdict; what is beyond 24 rows goes to the pipelines."""
    top, bottom = 5, 9
    middle = max(3, height - VERDICT_ROWS - top - bottom)
    half, split = width // 2, width * 3 // 5
    y = VERDICT_ROWS
    return {
        "verdict": Place(0, 0, width, VERDICT_ROWS),
        "nodes": Place(0, y, half, top),
        "training": Place(half, y, width - half, top),
        "pipelines": Place(0, y + top, width, middle),
        "recovery": Place(0, y + top + middle, split, bottom),
        "events": Place(split, y + top + middle, width - split, bottom),
    }
