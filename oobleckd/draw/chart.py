"""A curve in braille dots with a shade from its least to its most, axes with ticks, marks of what happened.
Pure.

Owns scales, ticks and dots. What the curve is of, and in which words, is the caller's; who draws it in ASCII
has other signs for its dots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from oobleckd.draw.lines import Line, Role, Span
from oobleckd.words import tick

_BRAILLE = 0x2800
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Of a cell's left and right column, each from the top down."""
_ROWS_OF_AXIS = 2  # the line with its marks, and what its ticks are
_MIN_PLOT = 2
_APART = 3  # cells from a dot to the next
_LOG_FROM = 50.0  # times the least: values that far apart have a logarithmic axis


class ChartColumn(NamedTuple):
    """What of a curve lies in one of its columns; None where nothing is known."""

    mean: float | None
    low: float | None = None
    high: float | None = None


class Chart(NamedTuple):
    """A curve of ``columns`` of equal width, however many cells they have in the end.

    ``ticks``: column -> its label; ``marks``: column, sign and role of what is shown on the axis, the least
    important first; ``dots``: column -> another value beside the curve. ``may_log``: whether values that are
    far apart may have a logarithmic axis.
    """

    columns: tuple[ChartColumn, ...]
    ticks: tuple[tuple[int, str], ...] = ()
    marks: tuple[tuple[int, str, Role], ...] = ()
    dots: tuple[tuple[int, float], ...] = ()
    role: Role = "note"
    may_log: bool = False


def paint(chart: Chart, width: int, height: int) -> list[Line]:
    """The chart in ``height`` lines of ``width`` cells; with few of them without axes."""
    plot = height - _ROWS_OF_AXIS
    if plot < _MIN_PLOT:
        return _plot(chart, scale_of(chart), width, height)
    scale = scale_of(chart)
    labels = _labels(scale, plot)
    gutter = max((len(text) for text in labels.values()), default=0) + 1
    room = width - gutter
    if room < gutter:
        return _plot(chart, scale, width, height)
    rows = _plot(chart, scale, room, plot)
    return [
        *(_with_label(labels.get(row, ""), gutter, line) for row, line in enumerate(rows)),
        _axis(chart, gutter, room),
        _tick_labels(chart, gutter, room),
    ]


# --------------------------------------------------------------------------- scales and ticks


class Scale(NamedTuple):
    """The vertical axis, from ``low`` to ``high``."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where ``value`` is: 0 at the bottom, 1 at the top."""
        if self.log:
            return _within(math.log(max(value, self.low) / self.low) / math.log(self.high / self.low))
        return _within((value - self.low) / (self.high - self.low))


def scale_of(chart: Chart) -> Scale:
    """All that is drawn has room on it."""
    values = [value for column in chart.columns for value in column if value is not None]
    values += [value for _, value in chart.dots]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if not high > low:
        pad = abs(low) / 10 or 1.0
        return Scale(low - pad, high + pad)
    return Scale(low, high, log=chart.may_log and low > 0 and high / low >= _LOG_FROM)


def _within(share: float) -> float:
    return min(1.0, max(0.0, share))


def _labels(scale: Scale, height: int) -> dict[int, str]:
    """Row -> its label: round values, in every third row at most; where that is one, the ends."""
    values = list(_decades(scale)) if scale.log else list(_round_values(scale, max(2, height // 3)))
    found: dict[int, str] = {}
    for value in values:
        row = _row(scale.share(value), height)
        if not found.keys() & {row - 1, row, row + 1}:
            found[row] = tick(value)
    return found if len(found) > 1 else {height - 1: tick(scale.low), 0: tick(scale.high)}


def _round_values(scale: Scale, count: int) -> Iterator[float]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten."""
    rough = (scale.high - scale.low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    for number in range(math.ceil(scale.low / step), math.floor(scale.high / step) + 1):
        yield number * step


def _decades(scale: Scale) -> Iterator[float]:
    for exponent in range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1):
        yield 10.0**exponent


def _row(share: float, height: int) -> int:
    """Of ``height`` rows, the top one 0."""
    return min(height - 1, int((1.0 - share) * height))


def _with_label(label: str, gutter: int, line: Line) -> Line:
    return ((label.rjust(gutter - 1) + ("┤" if label else "│"), "dim"), *line)


# --------------------------------------------------------------------------- the plot


def _plot(chart: Chart, scale: Scale, width: int, height: int) -> list[Line]:
    if width < 1 or height < 1:
        return []
    dots = _dots(chart, scale, width, height)
    shades = _shades(chart, scale, width, height)
    points = _points(chart, scale, width, height)
    return [
        _joined(_sign(dots[row][x], (x, row) in points, (x, row) in shades, chart.role) for x in range(width))
        for row in range(height)
    ]


def _points(chart: Chart, scale: Scale, width: int, height: int) -> set[tuple[int, int]]:
    """Cells of the dots, the newest first; those too near to one would hide the curve."""
    found: set[tuple[int, int]] = set()
    before = width + _APART
    for column, value in reversed(chart.dots):
        x = _cell_of(column, chart, width)
        if before - x >= _APART:
            found.add((x, _row(scale.share(value), height)))
            before = x
    return found


def _sign(dots: int, is_point: bool, is_shade: bool, role: Role) -> Span:
    if is_point:
        return ("●", "good")
    if dots:
        return (chr(_BRAILLE + dots), role)
    return ("░", "dim") if is_shade else (" ", "")


def _joined(spans: Iterable[Span]) -> Line:
    return tuple(
        ("".join(sign for sign, _ in group), role) for role, group in groupby(spans, key=lambda span: span[1])
    )


def _place(column: int, chart: Chart, last: int) -> int:
    """Of places 0 to ``last``, the one of a column: the first and the last are at the ends."""
    return round(column * last / (len(chart.columns) - 1)) if len(chart.columns) > 1 else 0


def _cell_of(column: int, chart: Chart, width: int) -> int:
    return min(width - 1, _place(column, chart, 2 * width - 1) // 2)


def _dots(chart: Chart, scale: Scale, width: int, height: int) -> list[list[int]]:
    """Rows of cells: the means, each joined with the one before it."""
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for column, (mean, _, _) in enumerate(chart.columns):
        if mean is None:
            before = None
            continue
        x = _place(column, chart, 2 * width - 1)
        y = min(4 * height - 1, int((1.0 - scale.share(mean)) * 4 * height))
        for at_x, at_y in _stroke(before or (x, y), (x, y)):
            cells[at_y // 4][at_x // 2] |= _BITS[at_x % 2][at_y % 4]
        before = (x, y)
    return cells


def _stroke(begin: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line."""
    (x, y), (to_x, to_y) = begin, end
    steps = max(abs(to_x - x), abs(to_y - y), 1)
    for number in range(steps + 1):
        yield x + round((to_x - x) * number / steps), y + round((to_y - y) * number / steps)


def _shades(chart: Chart, scale: Scale, width: int, height: int) -> set[tuple[int, int]]:
    """Cells whose middle is between the least and the most of their columns."""
    found: set[tuple[int, int]] = set()
    last = len(chart.columns) - 1
    for column, (_, low, high) in enumerate(chart.columns):
        if low is None or high is None:
            continue
        top, bottom = ((1.0 - scale.share(value)) * height for value in (high, low))
        rows = range(math.ceil(top - 0.5), math.floor(bottom - 0.5) + 1)
        first, after = (_cell_of(at, chart, width) for at in (column, min(column + 1, last)))
        found |= {(x, row) for x in range(first, max(after, first + 1)) for row in rows}
    return found


# --------------------------------------------------------------------------- the horizontal axis


def _axis(chart: Chart, gutter: int, width: int) -> Line:
    cells: list[Span] = [("─", "dim")] * width
    for column, _ in chart.ticks:
        cells[_cell_of(column, chart, width)] = ("┴", "dim")
    for column, sign, role in chart.marks:
        cells[_cell_of(column, chart, width)] = (sign, role)
    return ((" " * (gutter - 1) + "└", "dim"), *_joined(cells))


def _tick_labels(chart: Chart, gutter: int, width: int) -> Line:
    """As many as have room, the first and the last before the others."""
    cells = [" "] * width
    ticks = list(chart.ticks)
    for column, text in [*ticks[:1], *ticks[-1:], *ticks[1:-1]]:
        first = max(0, min(_cell_of(column, chart, width) - len(text) // 2, width - len(text)))
        around = cells[max(0, first - 1) : first + len(text) + 1]
        if len(text) <= width and not "".join(around).strip():
            cells[first : first + len(text)] = text
    return ((" " * gutter + "".join(cells), "dim"),)


def round_ticks(firsts: Sequence[int], last: int, *, log: bool) -> tuple[tuple[int, str], ...]:
    """Columns that begin with steps ``firsts`` (the run ends with ``last``), and labels of round steps in
    them: powers of ten on a logarithmic axis, else about five of equal distance; and the last one.
    """
    if not firsts:
        return ()
    found: dict[int, int] = {}
    for step in (*_round_steps(firsts[0], last, log=log), last):
        column = max(index for index, first in enumerate(firsts) if first <= max(step, firsts[0]))
        found[column] = step
    return tuple((column, tick(step)) for column, step in sorted(found.items()))


def _round_steps(first: int, last: int, *, log: bool) -> Iterator[int]:
    if log:
        yield first
        power = 10
        while power < last:
            if power > first:
                yield power
            power *= 10
        return
    yield first
    for value in _round_values(Scale(first, max(last, first + 1)), 5):
        if value > first:
            yield int(value)
