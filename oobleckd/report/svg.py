"""Pictures of a report, as SVG inside a page: a panel over steps, bars of parts, and rows of shaded cells.

Owns where things lie. Colours are classes that the page's style gives, so that a picture is legible on a dark
page and on paper. All text is escaped, whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
from markupsafe import Markup, escape

from oobleckd.protocol.watch import CurveMark
from oobleckd.report.axes import Axis, exact
from oobleckd.report.panels import CurvePanel
from oobleckd.words import seconds

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 26, 12, 44
MANY = 16
"""Marks: of more the lines are faint, or a curve could not be seen for them."""
_WIDE, _ROW, _BAR = 760, 26, 16
_CELL_ROW, _CELL = 20, 16
_SHADES = 8  # of a cell


class BarPart(msgspec.Struct, frozen=True):
    """Of a bar: ``kind`` is its class, from ``start`` to ``stop`` in the bar's unit."""

    kind: str
    start: float
    stop: float
    told: str


class Bar(msgspec.Struct, frozen=True):
    """A line of a picture of bars. ``after``: written behind it."""

    name: str
    parts: tuple[BarPart, ...]
    after: str


def curve_svg(panel: CurvePanel, first: int, last: int, marks: Sequence[CurveMark], *, log: bool) -> Markup:
    """``panel`` from step ``first`` to ``last``, with ``marks``; ``log``: steps are on a logarithmic axis."""
    x = Axis(max(first, 1) if log else first, max(last, first + 1), _LEFT, _WIDTH - _RIGHT, log)
    y = Axis(panel.bottom, panel.top, _HEIGHT - _BOTTOM, _TOP, panel.log)
    inside = [
        *_grid(x, y, panel.label),
        *_band(panel, x, y),
        *(_mark(mark, x, many=len(marks) > MANY) for mark in marks),
        *_line(panel, x, y),
        *(_tag("circle", cx=x.at(at), cy=y.at(value), r=3.2, class_="point") for at, value in panel.points),
    ]
    return _picture(f"curve-{panel.key}", panel.title, _told(panel, marks), (_WIDTH, _HEIGHT), inside)


def bars_svg(key: str, title: str, told: str, bars: Sequence[Bar], written: Callable[[float], str]) -> Markup:
    """``bars`` over one axis from 0, whose ticks are ``written`` so."""
    longest = max((part.stop for bar in bars for part in bar.parts), default=0.0) or 1.0
    axis = Axis(0.0, longest, 96, _WIDE - 84)
    height = _ROW * len(bars) + _BOTTOM - 12
    inside = []
    for value, _ in axis.ticks(4):
        at = axis.at(value)
        inside += [
            _tag("line", x1=at, x2=at, y1=2, y2=height - 26, class_="grid"),
            _text(written(value), at, height - 10, "tick middle"),
        ]
    for number, bar in enumerate(bars):
        top = number * _ROW + 5
        inside.append(_text(bar.name, 90, top + 12, "tick end"))
        for part in bar.parts:
            width = max(0.75, axis.at(part.stop) - axis.at(part.start))
            inside.append(
                _tag("rect", _titled(part.told), x=axis.at(part.start), y=top, width=width, height=_BAR,
                     class_=f"part {part.kind}")
            )  # fmt: skip
        end = max((part.stop for part in bar.parts), default=0.0)
        inside.append(_text(bar.after, axis.at(end) + 6, top + 12, "tick"))
    return _picture(key, title, told, (_WIDE, height), inside)


class Cell(msgspec.Struct, frozen=True):
    """``share`` is from 0 to 1: how much of its colour it has. ``kind`` is its class."""

    kind: str
    share: float
    told: str


class CellRow(msgspec.Struct, frozen=True):
    """Cells side by side. ``after``: written behind them."""

    name: str
    cells: tuple[Cell, ...]
    after: str


def cells_svg(key: str, title: str, told: str, rows: Sequence[CellRow], name: str) -> Markup:
    """``rows`` of cells, all rows as wide; ``name`` is of what lies side by side."""
    left, width = 96, _WIDE - 96 - 84
    inside = []
    for number, row in enumerate(rows):
        top = number * _CELL_ROW + 2
        inside.append(_text(row.name, left - 6, top + 12, "tick end"))
        each = width / max(1, len(row.cells))
        for at, cell in enumerate(row.cells):
            shade = math.ceil(min(1.0, cell.share) * _SHADES) / _SHADES
            inside.append(
                _tag("rect", _titled(cell.told), x=left + at * each, y=top, width=max(0.75, each * 0.94),
                     height=_CELL, class_=f"cell {cell.kind}", **{"fill-opacity": shade})
            )  # fmt: skip
        inside.append(_text(row.after, left + width + 6, top + 12, "tick"))
    bottom = len(rows) * _CELL_ROW + 16
    inside.append(_text(name, left + width / 2, bottom, "name middle"))
    return _picture(key, title, told, (_WIDE, bottom + 8), inside)


# ---------------------------------------------------------------------- parts of a curve


def _grid(x: Axis, y: Axis, label: str) -> Iterator[Markup]:
    for value, written in y.ticks():
        at = y.at(value)
        yield _tag("line", x1=x.begin, x2=x.end, y1=at, y2=at, class_="grid")
        yield _text(written, x.begin - 6, at + 4, "tick end")
    for value, written in x.ticks(6):
        at = x.at(value)
        yield _tag("line", x1=at, x2=at, y1=y.begin, y2=y.begin + 4, class_="axis")
        yield _text(written, at, y.begin + 18, "tick middle")
    yield _tag("line", x1=x.begin, x2=x.end, y1=y.begin, y2=y.begin, class_="axis")
    middle = (y.begin + y.end) / 2
    yield _tag("text", label, x=12, y=middle, transform=f"rotate(-90 12 {middle})", class_="name middle")
    yield _text(f"step{', log scale' if x.log else ''}", (x.begin + x.end) / 2, _HEIGHT - 6, "name middle")


def _pieces(panel: CurvePanel) -> Iterator[list[tuple[float, float, float, float]]]:
    """(step, low, line, high) of bins between such as nothing is known of."""
    piece: list[tuple[float, float, float, float]] = []
    for step, low, line, high in zip(panel.steps, panel.low, panel.line, panel.high, strict=True):
        if line is not None:
            piece.append((step, line if low is None else low, line, line if high is None else high))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _band(panel: CurvePanel, x: Axis, y: Axis) -> Iterator[Markup]:
    for piece in _pieces(panel):
        there = [(x.at(step), y.at(high)) for step, _, _, high in piece]
        back = [(x.at(step), y.at(low)) for step, low, _, _ in reversed(piece)]
        yield _tag("polygon", points=_points([*there, *back]), class_="band")


def _line(panel: CurvePanel, x: Axis, y: Axis) -> Iterator[Markup]:
    for piece in _pieces(panel):
        points = [(x.at(step), y.at(line)) for step, _, line, _ in piece]
        if len(points) == 1:  # a line to nowhere is not drawn
            yield _tag("circle", cx=points[0][0], cy=points[0][1], r=1.5, class_="dot")
        else:
            yield _tag("polyline", points=_points(points), class_="line")


def _mark(mark: CurveMark, x: Axis, *, many: bool) -> Markup:
    at = x.at(mark.step)
    line = _tag(
        "line",
        x1=at,
        x2=at,
        y1=_TOP,
        y2=_HEIGHT - _BOTTOM,
        class_=f"mark {mark.kind}{' many' if many else ''}",
    )
    sign = "M {0} {1} l -4 -8 h 8 z" if mark.kind == "incident" else "M {0} {1} l 8 -4 v 8 z"
    head = _tag("path", d=sign.format(_number(at), _TOP + 4), class_=f"sign {mark.kind}")
    return _tag("g", _titled(mark_words(mark)), line, head)


def mark_words(mark: CurveMark) -> str:
    """What happened there, in a sentence."""
    who = f" ({', '.join(mark.nodes)})" if mark.nodes else ""
    if mark.kind == "rollback":
        name = f"{mark.id}: " if mark.id else ""
        return f"{name}back to step {mark.step:,}, {mark.steps_lost:,} before where it was"
    took = f", took {seconds(mark.total_s)}" if mark.total_s else ""
    return f"{mark.id}{who} after step {mark.step:,}{took}"


def _told(panel: CurvePanel, marks: Sequence[CurveMark]) -> str:
    """A picture for who cannot see it."""
    known = [value for value in panel.line if value is not None]
    if not known:
        return f"{panel.label} over steps: nothing is known yet."
    ends = f"from {exact(known[0])} to {exact(known[-1])}"
    spread = f"between {exact(min(known))} and {exact(max(known))}"
    evaluated = f" {len(panel.points):,} evaluations are marked." if panel.points else ""
    happened = f" Marked: {'; '.join(map(mark_words, marks[-8:]))}." if marks else ""
    return f"{panel.label} over steps, {ends}, {spread}.{evaluated}{happened}"


# ---------------------------------------------------------------------- SVG


def _picture(key: str, title: str, told: str, size: tuple[int, float], inside: Sequence[Markup]) -> Markup:
    names = f"{key}-title {key}-told"
    return _tag(
        "svg", _tag("title", title, id=f"{key}-title"), _tag("desc", told, id=f"{key}-told"), *inside,
        viewBox=f"0 0 {size[0]} {_number(size[1])}", role="img", **{"aria-labelledby": names},
    )  # fmt: skip


def _text(text: str, x: float, y: float, kind: str) -> Markup:
    return _tag("text", text, x=x, y=y, class_=kind)


def _titled(text: str) -> Markup:
    return _tag("title", text)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tag(name: str, /, *inside: str, **attributes: str | float) -> Markup:
    """An element. ``class_`` is ``class``; all else is as it is called."""
    said = "".join(
        Markup(' {}="{}"').format(
            key.rstrip("_"), _number(value) if isinstance(value, int | float) else value
        )
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup(said), Markup("").join(map(escape, inside)))  # noqa: S704
