"""What a terminal would show of a running application: text and styles of every cell, as a text file and as a
picture.

Owns both formats. The application is asked for its compositor's strips, which is what Textual itself prints;
pictures are drawn cell by cell with a monospaced font that matplotlib brings along, so that they need no
browser and are the same everywhere.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont
from rich.segment import Segment
from rich.style import Style
from textual.app import App

Rgb = tuple[int, int, int]
_FONTS = Path(mpl.__file__).parent / "mpl-data/fonts/ttf"
_POINTS = 14
_WIDTH, _HEIGHT = 8, 17
_INK, _GROUND = "#d3dae3", "#141a22"  # of a terminal, where an application names no colour


class Look(NamedTuple):
    """How a cell looks: colours as ``#rrggbb`` ("" is the terminal's), and what else."""

    ink: str
    ground: str
    bold: bool = False
    dim: bool = False
    underline: bool = False
    reverse: bool = False

    @property
    def words(self) -> str:
        """For people: ``bold #ffffff on #000000``."""
        more = [name for name in ("bold", "dim", "underline", "reverse") if getattr(self, name)]
        return " ".join((*more, self.ink or "ink", "on", self.ground or "ground"))


Row = tuple[tuple[str, Look], ...]


class Drawing(NamedTuple):
    """A screen of ``width`` cells a row."""

    width: int
    rows: tuple[Row, ...]

    def text(self) -> str:
        """All rows, then the styles that occur, each with a letter, then for every row how many cells have
        which.
        """
        letters: dict[Look, str] = {}
        names = _letters()
        for _, look in itertools.chain.from_iterable(self.rows):
            if look not in letters:
                letters[look] = next(names)
        lines = ["".join(text for text, _ in row).rstrip() for row in self.rows]
        lines += ["", *(f"{letter} = {look.words}" for look, letter in letters.items()), ""]
        lines += [" ".join(f"{len(text)}{letters[look]}" for text, look in row) for row in self.rows]
        return "\n".join(lines) + "\n"


def _letters() -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_letters, repeat=length))


def drawn(app: App[Any]) -> Drawing:
    """What is on the screen now."""
    return Drawing(
        app.size.width, tuple(_row(list(strip)) for strip in app.screen._compositor.render_strips())
    )


def _row(segments: list[Segment]) -> Row:
    """Neighbours that look the same in one run."""
    runs: list[tuple[str, Look]] = []
    for segment in segments:
        if not segment.text:
            continue
        look = _look(segment.style or Style.null())
        if runs and runs[-1][1] == look:
            runs[-1] = (runs[-1][0] + segment.text, look)
        else:
            runs.append((segment.text, look))
    return tuple(runs)


@lru_cache(4096)
def _look(style: Style) -> Look:
    return Look(
        style.color.get_truecolor().hex if style.color and not style.color.is_default else "",
        style.bgcolor.get_truecolor().hex if style.bgcolor and not style.bgcolor.is_default else "",
        bool(style.bold), bool(style.dim), bool(style.underline), bool(style.reverse),
    )  # fmt: skip


# --------------------------------------------------------------------------- pictures


@lru_cache(2)
def _font(bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_FONTS / f"DejaVuSansMono{'-Bold' * bold}.ttf", _POINTS)


def picture(drawing: Drawing, share: float = 1.0) -> Image.Image:
    """The screen as an image with 256 colours; ``share``: of its full size."""
    image = Image.new("RGB", (drawing.width * _WIDTH, len(drawing.rows) * _HEIGHT), _GROUND)
    brush = ImageDraw.Draw(image)
    for y, row in enumerate(drawing.rows):
        x = 0
        for text, look in row:
            _paint_run(brush, x, y, text, look)
            x += len(text)
    if share != 1.0:
        size = (round(image.width * share), round(image.height * share))
        image = image.resize(size, Image.Resampling.LANCZOS)
    # The rare colours are the ones that matter here: they must not become what is near.
    colours = 256 if share == 1.0 else 48
    return image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def _paint_run(brush: ImageDraw.ImageDraw, x: int, y: int, text: str, look: Look) -> None:
    ink, ground = look.ink or _INK, look.ground or _GROUND
    if look.reverse:
        ink, ground = ground, ink
    if look.dim:
        ink = _between(ink, ground)
    box = (x * _WIDTH, y * _HEIGHT, (x + len(text)) * _WIDTH - 1, (y + 1) * _HEIGHT - 1)
    brush.rectangle(box, ground)
    for index, sign in enumerate(text):
        if sign != " ":
            _paint_sign(brush, (x + index) * _WIDTH, y * _HEIGHT, sign, ink, bold=look.bold)
    if look.underline:
        brush.line((box[0], box[3] - 1, box[2], box[3] - 1), ink)


def _between(ink: str, ground: str) -> str:
    parts = [(int(ink[at : at + 2], 16) + int(ground[at : at + 2], 16)) // 2 for at in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _paint_sign(brush: ImageDraw.ImageDraw, x: int, y: int, sign: str, ink: str, *, bold: bool) -> None:
    """Blocks and frames fill their cells to the edge, which no font does at every size."""
    if "\u2800" <= sign <= "\u28ff":  # the font has none
        for bit, (across, down) in enumerate(_DOTS):
            if ord(sign) >> bit & 1:
                left, top = x + 1 + 4 * across, y + 1 + round(down * _HEIGHT / 4)
                brush.rectangle((left, top, left + 1, top + 1), ink)
    elif sign in _BLOCKS:
        left, top, right, bottom = _BLOCKS[sign]
        box = (x + left * _WIDTH, y + top * _HEIGHT, x + right * _WIDTH - 1, y + bottom * _HEIGHT - 1)
        brush.rectangle(tuple(map(round, box)), ink)
    elif sign in _STROKES:
        middle_x, middle_y = x + _WIDTH // 2, y + _HEIGHT // 2
        ends = {
            "l": (x, middle_y),
            "r": (x + _WIDTH - 1, middle_y),
            "t": (middle_x, y),
            "b": (middle_x, y + _HEIGHT - 1),
        }
        for end in _STROKES[sign]:
            brush.line((middle_x, middle_y, *ends[end]), ink)
    else:
        brush.text((x, y), sign, ink, _font(bold))


_EIGHTHS = [number / 8 for number in range(1, 9)]
# Left, top, right and bottom edge as shares of the cell.
_BLOCKS: dict[str, tuple[float, float, float, float]] = {
    "▀": (0, 0, 1, 0.5),
    **{sign: (0, 1 - share, 1, 1) for sign, share in zip("▁▂▃▄▅▆▇█", _EIGHTHS, strict=True)},
    **{sign: (0, 0, share, 1) for sign, share in zip("▏▎▍▌▋▊▉", _EIGHTHS, strict=False)},
}
# Column and row of a braille sign's dots, in the order of their bits.
_DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
_STROKES = {
    "┤": "ltb",
    "└": "tr",
    "┴": "lrt",
    "─": "lr",
    "│": "tb",
    "╭": "rb",
    "╮": "lb",
    "╰": "rt",
    "╯": "lt",
}
