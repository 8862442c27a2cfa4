"""All pipelines in one strip, a cell each, by how much of the step they wait. Pure.

The cell's height and its colour both say it, so that the strip reads without colours as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oobleckd.console.model import View
from oobleckd.console.widgets.timeline import TimelineLook, bubbles, by_pipeline, shown_schedule
from oobleckd.draw.lines import Line, Role, Span, clipped

# Up to this share of waiting; the first is the best.
STEPS: tuple[tuple[float, str, Role], ...] = ((0.08, "▂", "good"), (0.15, "▄", "note"), (0.30, "▆", "warn"),
    (math.inf, "█", "bad"))  # fmt: skip
DEPENDS = ("schedule", "modelled")


def paint(view: View, _now: float, width: int, height: int, look: TimelineLook | None = None) -> list[Line]:
    """The legend, then the strip in the order in which the pipelines are listed."""
    look = look or TimelineLook()
    shown = shown_schedule(view, look.mode)
    if shown is None or width < 1:
        return []
    waiting = bubbles(shown)
    shares = [waiting[number] for number in by_pipeline(shown, look.order)]
    legend: list[Span] = [("a cell for each pipeline, by bubble  ", "dim")]
    for limit, sign, role in STEPS:
        legend += [(sign, role), (f" <{limit:.0%}  " if limit < 1 else " more", "dim")]
    strip = _strip(shares, width, max(1, height - 1))
    return [clipped(tuple(legend), width), *strip][:height] if height > 1 else strip[:height]


def _strip(shares: Sequence[float], width: int, height: int) -> list[Line]:
    """Where not all have a cell, one stands for several and shows the worst of them."""
    per_cell = math.ceil(len(shares) / (width * height)) or 1
    worst = [max(shares[first : first + per_cell]) for first in range(0, len(shares), per_cell)]
    return [_cells(worst[first : first + width]) for first in range(0, len(worst), width)]


def _cells(shares: Sequence[float]) -> Line:
    spans: list[Span] = []
    for share in shares:
        _, sign, role = next(step for step in STEPS if share < step[0])
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + sign, role)
        else:
            spans.append((sign, role))
    return tuple(spans)
