"""Where panels lie in a terminal of a given size. Pure.

Four arrangements: *wide* from 140 x 40, *medium* from 100 x 30, *small* (made for 80 x 24), and *tiny* below
56 x 16, where one panel is left. Every cell belongs to exactly one panel; the last row is the footer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Arrangement = Literal["wide", "medium", "small", "tiny"]
VERDICT_ROWS = 3
FOOTER_ROWS = 1
MIN_ROWS = 3
FRAME_ROWS = 2
_REST_ROWS = 5  # with its frame; in fewer there is nothing worth a panel


class PagePlace(NamedTuple):
    """Left edge, top edge, width and height in cells."""

    x: int
    y: int
    width: int
    height: int


Places = dict[str, PagePlace]


def arrangement(width: int, height: int) -> Arrangement:
    """The arrangement of a terminal of ``width`` x ``height`` cells."""
    if width >= 140 and height >= 40:
        return "wide"
    if width >= 100 and height >= 30:
        return "medium"
    return "small" if width >= 56 and height >= 16 else "tiny"


def framed_by(width: int, height: int, main: str) -> tuple[Places, PagePlace]:
    """Verdict and footer, and what is left for the others. In a tiny terminal that is all for ``main``."""
    tiny = arrangement(width, height) == "tiny"
    top = 1 if tiny else VERDICT_ROWS
    bottom = FOOTER_ROWS if height > 2 else 0
    rest = PagePlace(0, top, width, max(0, height - top - bottom))
    found = {"verdict": PagePlace(0, 0, width, min(top, height))}
    if bottom:
        found["footer"] = PagePlace(0, height - bottom, width, bottom)
    if tiny and rest.height:
        found[main] = rest
    return found, rest


def above(area: PagePlace, *parts: tuple[str, int]) -> Places:
    """``parts`` above each other, each with its rows; 0 is for the one that takes what is left.

    From the last one on, parts go as long as that one would have less than it needs.
    """
    fixed = [part for part in parts if part[1]]
    while fixed and area.height - sum(rows for _, rows in fixed) < MIN_ROWS:
        fixed.pop()
    left = area.height - sum(rows for _, rows in fixed)
    found: Places = {}
    y = area.y
    for name, rows in parts:
        if rows and (name, rows) not in fixed:
            continue
        height = rows or left
        if height > 0:
            found[name] = PagePlace(area.x, y, area.width, height)
            y += height
    return found


def fitted(found: Places, panel: str, rows: int, rest: str) -> Places:
    """``found``, but ``panel`` has its ``rows`` and a frame alone where what that leaves is worth a panel of
    its own: ``rest``, below it.
    """
    area = found.get(panel)
    if area is None or area.height - rows - FRAME_ROWS < _REST_ROWS:
        return found
    return found | above(area, (panel, rows + FRAME_ROWS), (rest, 0))


def beside(area: PagePlace, left: int) -> tuple[PagePlace, PagePlace]:
    """Two areas side by side, the first with ``left`` columns."""
    left = max(1, min(left, area.width - 1))
    return (
        PagePlace(area.x, area.y, left, area.height),
        PagePlace(area.x + left, area.y, area.width - left, area.height),
    )


def split(area: PagePlace, *parts: tuple[str, int]) -> Places:
    """``parts`` side by side, each with its share of the width."""
    total = sum(share for _, share in parts)
    found: Places = {}
    x = area.x
    for index, (name, share) in enumerate(parts):
        last = index == len(parts) - 1
        width = area.x + area.width - x if last else area.width * share // total
        found[name] = PagePlace(x, area.y, width, area.height)
        x += width
    return found


def overview(width: int, height: int) -> Places:
    """Nodes, templates and training on the left, pipelines on the right, the incident and events below."""
    found, rest = framed_by(width, height, "pipelines")
    match arrangement(width, height):
        case "tiny":
            return found
        case "small":
            return found | _stacked(rest)
        case "wide":
            return found | _columns(rest, left=56, templates=8, training=10, bottom=13)
        case _:
            return found | _columns(rest, left=48, templates=6, training=6, bottom=12)


def _columns(area: PagePlace, *, left: int, templates: int, training: int, bottom: int) -> Places:
    upper = PagePlace(area.x, area.y, area.width, area.height - bottom)
    lower = PagePlace(area.x, area.y + upper.height, area.width, bottom)
    column, right = beside(upper, left)
    return (
        above(column, ("nodes", 0), ("templates", templates), ("training", training))
        | {"pipelines": right}
        | split(lower, ("recovery", 3), ("events", 2))
    )


def _stacked(area: PagePlace) -> Places:
    """Three rows of panels; what is beyond 24 rows goes to the pipelines."""
    rows = above(area, ("top", 5), ("pipelines", 0), ("bottom", 9))
    found: Places = {"pipelines": rows["pipelines"]}
    if "top" in rows:
        found |= split(rows["top"], ("nodes", 1), ("training", 1))
    if "bottom" in rows:
        found |= split(rows["bottom"], ("recovery", 3), ("events", 2))
    return found


def one_below_other(width: int, height: int, main: str, parts: Sequence[tuple[str, int]]) -> Places:
    """The usual screen: ``parts`` above each other under the verdict; ``main`` alone where it is tiny."""
    found, rest = framed_by(width, height, main)
    return found if arrangement(width, height) == "tiny" else found | above(rest, *parts)


def side_by_side(width: int, height: int, main: str, other: str, share: int = 50) -> Places:
    """``main`` with ``share`` per cent of the width, ``other`` beside it; where it is narrow, below it."""
    found, rest = framed_by(width, height, main)
    match arrangement(width, height):
        case "tiny":
            return found
        case "small":
            return found | above(rest, (main, 0), (other, rest.height // 2))
        case _:
            return found | split(rest, (main, share), (other, 100 - share))
