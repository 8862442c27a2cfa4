"""Lines of text as console and oobleckctl draw them: spans with a role. Pure. Words for numbers are
``oobleckd.words``'.

A role says what a text means ("bad", "dim"); which colour that is belongs to who shows it
(``oobleckd.console.widgets.panel``). Whatever a role says, the text or its glyph says as well, so that a
picture without colours tells the same.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

from oobleckd.words import noun

# Here and not in the console: that must not be imported by oobleckctl, nor the planner by the console. What
# both draw with knows neither. (D-console-001)
Role = Literal[
    "", "dim", "strong", "good", "warn", "bad", "note",
    "detect", "plan", "reconfigure", "copy", "resume", "bar", "banner-bad", "banner-warn", "banner-dim",
    "op-F", "op-B", "op-I", "op-W", "op-U", "op-S", "op-moved", "op-again", "bubble", "cursor",
    "op-F odd", "op-B odd", "op-I odd", "op-W odd", "op-moved odd",
    "good/warn", "good/bad", "good/note", "good/dim", "warn/bad", "warn/note", "warn/dim",
    "bad/note", "bad/dim", "note/dim",
]  # fmt: skip
"""Two words with a stroke between them: a half block, whose ink is the first and whose ground is the second.

``odd``: another shade of the same, so that of neighbours each is seen.
"""
Span = tuple[str, Role]
Line = tuple[Span, ...]

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = " ▁▂▃▄▅▆▇█"


# --------------------------------------------------------------------------- text


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """``text`` without what a terminal would obey: control characters are written as escapes, wide ones
    become ``?``. Kept: most of a picture stays.
    """
    return "".join(map(_clean, text)) if not text.isascii() or not text.isprintable() else text


def _clean(char: str) -> str:
    if not char.isprintable():
        return " " if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
    wide = unicodedata.east_asian_width(char) in "WF" or unicodedata.category(char).startswith("M")
    return "?" if wide else char


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells; an ellipsis stands for the rest."""
    text = clean(text)
    if len(text) <= width:
        return text
    return text[: width - 1] + "…" if width > 0 else ""


def cell(text: str, width: int, *, right: bool = False) -> str:
    """``text`` in exactly ``width`` cells, so that rows stay aligned whatever they say."""
    text = cut(text, width)
    return text.rjust(width) if right else text.ljust(width)


def wrapped(text: str, width: int, max_lines: int) -> list[str]:
    """``text`` in at most ``max_lines`` lines of ``width`` cells, broken between words."""
    lines: list[str] = []
    rest = clean(text).strip()
    while rest and len(lines) < max_lines and width > 0:
        if len(lines) == max_lines - 1 or len(rest) <= width:
            lines.append(cut(rest, width))
            break
        at = rest.rfind(" ", 0, width + 1)
        at = at if at > 0 else width
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return lines


def length(line: Line) -> int:
    """Cells of a line."""
    return sum(len(text) for text, _ in line)


def clipped(line: Line, width: int) -> Line:
    """A line in at most ``width`` cells."""
    spans, left = [], width
    for text, role in line:
        if left <= 0:
            break
        spans.append((cut(text, left), role))
        left -= len(spans[-1][0])
    return tuple(spans)


def framed(lines: Iterable[Line], width: int, height: int) -> list[Line]:
    """What of ``lines`` has room in a frame."""
    return [clipped(line, width) for line in lines][: max(0, height)]


def plain(line: Line) -> str:
    """The text alone."""
    return "".join(text for text, _ in line).rstrip()


def flow(fields: Iterable[Line], width: int, gap: str = "   ") -> list[Line]:
    """Fields side by side, a new line where one does not fit any more."""
    lines: list[Line] = []
    for field in fields:
        if lines and length(lines[-1]) + len(gap) + length(field) <= width:
            lines[-1] = (*lines[-1], (gap, ""), *field)
        else:
            lines.append(clipped(field, width))
    return lines


def as_fits(fields: Iterable[Line], width: int, gap: str = "   ") -> Line:
    """Fields side by side, as many as have room: a number or a word that is cut off says something else. Only
    the first one is cut where it has no room itself.
    """
    line: Line = ()
    for field in fields:
        if not line:
            line = clipped(field, width)
        elif length(line) + len(gap) + length(field) <= width:
            line = (*line, (gap, ""), *field)
        else:
            break
    return line


def more(what: str, number: int) -> Line:
    """The line that stands for what has no room: so many more of ``what``, which is one."""
    return ((f"… {number:,} more {noun(number, what)}", "dim"),)


# --------------------------------------------------------------------------- bars


def bar(start: float, stop: float, width: int) -> str:
    """A bar over the part ``[start, stop]`` of ``width`` cells (what is outside of 0 to 1 is cut off); never
    without a mark.
    """
    first, last = _share(start) * width, _share(stop) * width
    lead = int(min(first, width - 1))
    eighths = round((last - lead) * 8)
    full, part = divmod(max(1, min(eighths, (width - lead) * 8)), 8)
    return " " * lead + "█" * full + (EIGHTHS[part] if part else "")


def _share(value: float) -> float:
    """``value`` between 0 and 1; what is no number is 0."""
    return min(1.0, value) if value > 0.0 else 0.0


def curve(values: Sequence[float | None], low: float, high: float, height: int) -> list[str]:
    """A curve of one column a value in ``height`` rows, the top one first; None leaves its column empty."""
    span = (high - low) or 1.0
    steps = [
        None if value is None else max(1, min(8 * height, round((value - low) / span * 8 * height)))
        for value in values
    ]
    return [
        "".join(" " if step is None else LEVELS[max(0, min(8, step - 8 * row))] for step in steps)
        for row in reversed(range(height))
    ]
