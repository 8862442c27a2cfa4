"""A drawing of a schedule: a row for each stage, time to the right. Pure.

A forward is light, a backward full, with the micro-batch's number where there is room; a dot is waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oobleckd.draw.lines import Line, Role, Span, more

FORWARD, BACKWARD, WAITING = "░", "█", "·"
LEGEND: Line = (
    (FORWARD * 2, "note"), (" forward  ", "dim"), (BACKWARD * 2, "good"), (" backward  ", "dim"),
    (WAITING * 2, "dim"), (" waiting", "dim"),
)  # fmt: skip
_LOOKS: dict[bool, tuple[str, Role]] = {True: (BACKWARD, "good"), False: (FORWARD, "note")}


class ScheduleMark(NamedTuple):
    """An op of a stage: a forward or a backward of ``micro_batch``, in seconds."""

    micro_batch: int
    backward: bool
    start_s: float
    stop_s: float


class Row(NamedTuple):
    """A stage: its label, and its ops in order."""

    label: str
    marks: Sequence[ScheduleMark]


def draw(rows: Sequence[Row], width: int, max_lines: int) -> list[Line]:
    """``rows`` in lines of at most ``width`` cells; of more than ``max_lines`` the first and the
    last ones.
    """
    label = max((len(row.label) for row in rows), default=0) + 2
    until_s = max((mark.stop_s for row in rows for mark in row.marks), default=0.0) or 1.0
    lines = [
        ((row.label.ljust(label), ""), *_cells(row.marks, until_s, max(1, width - label))) for row in rows
    ]
    if len(lines) <= max_lines:
        return lines
    head, tail = max_lines // 2, max_lines - max_lines // 2 - 1
    return [*lines[:head], more("stage", len(lines) - head - tail), *lines[len(lines) - tail :]]


def _cells(marks: Iterable[ScheduleMark], until_s: float, width: int) -> list[Span]:
    spans: list[Span] = []
    at = 0
    for mark in marks:
        first = min(max(at, round(mark.start_s / until_s * width)), width - 1)
        last = max(first + 1, round(mark.stop_s / until_s * width))
        if first > at:
            spans.append((WAITING * (first - at), "dim"))
        glyph, role = _LOOKS[mark.backward]
        number = str(mark.micro_batch)
        shown = number if len(number) < last - first else ""
        spans.append((shown.ljust(last - first, glyph), role))
        at = last
    if at < width:
        spans.append((WAITING * (width - at), "dim"))
    return spans
