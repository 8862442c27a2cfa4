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
    "»": ">", "⇧": "^", "◆": "*", "±": "~",
}  # fmt: skip
_TABLE = str.maketrans(_LETTERS)


def ascii_text(text: str) -> str:
    """Text in ASCII, as wide as it was."""
    return text if text.isascii() else _ascii(text)


def ascii_line(line: Line) -> Line:
    """A line in ASCII, as wide as it was."""
    return tuple((ascii_text(text), role) for text, role in line)


def _ascii(text: str) -> str:
    return text.translate(_TABLE).encode("ascii", "replace").decode()
