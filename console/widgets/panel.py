"""The one Textual widget of the overview: a frame with the lines of a painter (Line API), and what roles look like.

Owns styles and repainting. What is in a panel belongs to its painter.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from console.model import View
from oobleckd.draw.lines import Line, Role, framed

Painter = Callable[[View, float, int, int], list[Line]]

# Colours that differ in lightness too, so that they stay apart for most colour-blind eyes and in greyscale.
COLOURED: dict[Role, Style] = {
    "": Style.parse("#d3dae3"),
    "dim": Style.parse("#7d8896"),
    "strong": Style.parse("bold #f2f5f9"),
    "good": Style.parse("#4cc38a"),
    "warn": Style.parse("bold #e5b13a"),
    "bad": Style.parse("bold #ff6b6b"),
    "note": Style.parse("#74b3f0"),
    "bar": Style.parse("#4a86c5"),
    "detect": Style.parse("#e5b13a"),
    "plan": Style.parse("#4a90e2"),
    "reconfigure": Style.parse("#9a6ddb"),
    "copy": Style.parse("#3aa974"),
    "resume": Style.parse("#5bc0d0"),
    "banner-bad": Style.parse("bold #14181f on #ff6b6b"),
    "banner-warn": Style.parse("bold #14181f on #e5b13a"),
    "banner-dim": Style.parse("bold #d3dae3 on #39434f"),
}
PLAIN: dict[Role, Style] = {role: Style(bold=style.bold) for role, style in COLOURED.items()} | {
    role: Style(bold=True, reverse=True) for role in ("banner-bad", "banner-warn", "banner-dim")
}
_KEPT_WHEN_STALE = frozenset({"banner-bad", "banner-warn", "banner-dim", "warn"})


class Panel(Widget):
    """Shows what ``painter`` makes of the view.

    ``depends``: the fields of the view that the painter looks at, where it does not look at the time; it is not
    called while they are what they were. ``keeps_warnings``: they stay bright when all else is greyed.
    """

    DEFAULT_CSS = """
    Panel { border: round $panel-lighten-1; border-title-color: $text-muted; padding: 0 1; }
    Panel.bare { border: none; }
    """

    def __init__(
        self,
        painter: Painter,
        title: str = "",
        *,
        id: str,  # noqa: A002 - Textual's name
        depends: tuple[str, ...] = (),
        keeps_warnings: bool = False,
    ) -> None:
        super().__init__(id=id, classes="" if title else "bare")
        self.border_title = title or None
        self._painter = painter
        self._depends = depends
        self._keeps_warnings = keeps_warnings
        self._view = View()
        self._now = 0.0
        self._lines: list[Line] = []
        self._painted_for: Size | None = None

    def show(self, view: View, now: float) -> None:
        """Paint anew, and refresh if anything looks different."""
        same = bool(self._depends) and self._painted_for == self.size and self._looks_same(view)
        self._view, self._now, self._painted_for = view, now, self.size
        if same:
            return
        width, height = self.size
        lines = framed(self._painter(view, now, width, height), width, height)
        if view.link == "stale":
            lines = [self._greyed(line) for line in lines]
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def _looks_same(self, view: View) -> bool:
        before = self._view
        return view.link == before.link and all(
            getattr(view, name) is getattr(before, name) for name in self._depends
        )

    def on_resize(self, _event: events.Resize) -> None:
        """Another size shows other things."""
        self.show(self._view, self._now)

    def render_line(self, y: int) -> Strip:
        """Line ``y`` of the content."""
        line = self._lines[y] if y < len(self._lines) else ()
        styles = PLAIN if self.app.no_color else COLOURED
        base = self.rich_style
        strip = Strip([Segment(text, base + styles[role]) for text, role in line])
        return strip.adjust_cell_length(self.size.width, base)

    def text(self) -> str:
        """What is shown, without styles."""
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._lines)

    def _greyed(self, line: Line) -> Line:
        if self._keeps_warnings and any(role.startswith("banner") for _, role in line):
            return line
        kept = _KEPT_WHEN_STALE if self._keeps_warnings else frozenset()
        return tuple((text, role if role in kept else "dim") for text, role in line)
