"""Letters for signs, for terminals that have no others. Pure, and without Textual: ``--once`` needs them,
too.
"""

from __future__ import annotations

from oobleckd.draw.lines import Line

_LETTERS = {
    "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "|", "▍": "|", "▎": "|", "▏": "|", "▀": '"', "▄": "_",
    "▁": "_",
    "▂": "_", "▃": "-", "▅": "=", "▆": "=", "▇": "#", "▓": "%", "▒": "%", "░": ":", "■": "#", "□": "o",
    "●": "*",
    "○": "o", "◌": "?", "✗": "x", "✖": "x", "✓": "+", "·": ".", "↓": "v", "↑": "^", "→": ">", "←": "<",
    "↪": ">", "↔": "-", "▸": ">", "▾": "v", "▲": "^", "◀": "<", "▶": ">", "│": "|", "─": "-", "┊": ":",
    "…": "~",
    "»": ">", "⇧": "^", "◆": "*", "±": "~", "┤": "+", "└": "+", "┴": "+", "▕": "|", "≤": "<", "°": " ",
    "\u00d7": "x",
}  # fmt: skip
_BRAILLE = range(0x2800, 0x2900)
# Of a cell's four rows of dots, from the top down: by which of them has any.
_HEIGHTS = (0x09, 0x12, 0x24, 0xC0)
_STROKES = {(True, False): "'", (False, True): ".", (True, True): ":", (False, False): "-"}


def _stroke(dots: int) -> str:
    """A letter whose ink is about where that of a braille sign is."""
    if not dots:
        return " "
    upper, _, _, lower = (bool(dots & row) for row in _HEIGHTS)
    return _STROKES[upper, lower]


_TABLE = str.maketrans(_LETTERS | {chr(sign): _stroke(sign - _BRAILLE[0]) for sign in _BRAILLE})


def ascii_text(text: str) -> str:
    """Text in ASCII, as wide as it was."""
    return text if text.isascii() else _ascii(text)


def ascii_line(line: Line) -> Line:
    """A line in ASCII, as wide as it was."""
    return tuple((ascii_text(text), role) for text, role in line)


def _ascii(text: str) -> str:
    return text.translate(_TABLE).encode("ascii", "replace").decode()
