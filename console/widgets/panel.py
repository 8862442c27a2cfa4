"""The one Textual widget of all screens: a frame with the lines of a painter (Line API).

Owns repainting: nothing is painted that is not seen, and no line that looks as before is drawn again. What is
in a panel belongs to its painter, what roles look like to ``themes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Self

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from oobleckd.console import letters, themes
from oobleckd.console.model import View
from oobleckd.draw.lines import Line, Role, framed

Painter = Callable[[View, float, int, int], list[Line]]
_KEPT_WHEN_STALE = frozenset({"banner-bad", "banner-warn", "banner-dim", "warn"})


class Panel(Widget):
    """Shows what ``painter`` makes of the view.

    ``depends``: the fields of the view that the painter looks at, where it does not look at the time; it is
    not called while they are what they were, unless ``forget`` says that something else has changed.
    ``keeps_warnings``: they stay bright when all else is greyed; ``greys``: whether an old picture greys it
    at all. ``opens``: the screen that has more of it.
    """

    DEFAULT_CSS = """
    Panel { border: round $edge; border-title-color: $text-muted; border-subtitle-color: $text-muted;
            padding: 0 1; }
    Panel.bare { border: none; }
    Panel.marked { border: heavy $accent; border-title-color: $accent; }
    Panel.ascii { border: ascii $edge; }
    Panel.ascii.bare { border: none; }
    Panel.ascii.marked { border: ascii $accent; border-title-style: reverse; }
    """

    def __init__(
        self,
        painter: Painter,
        title: str = "",
        *,
        id: str,  # noqa: A002 - Textual's name
        depends: tuple[str, ...] = (),
        keeps_warnings: bool = False,
        greys: bool = True,
        opens: str = "",
    ) -> None:
        super().__init__(id=id, classes="" if title else "bare")
        self._titles = (title, "")
        self.border_title = Content(title) if title else None
        self.opens = opens
        self._painter = painter
        self._depends = depends
        self._keeps_warnings = keeps_warnings
        self._greys = greys
        self._view = View()
        self._now = 0.0
        self._lines: list[Line] = []
        self._painted_for: Size | None = None
        self._ascii = False
        self._looks: dict[Role, Style] = {}
        self._looks_of: tuple[object, ...] = ()
        self._kept: tuple[object, list[Strip]] = (None, [])

    def show(self, view: View, now: float) -> None:
        """Paint anew, and refresh if anything looks different."""
        size = self.size
        same = bool(self._depends) and self._painted_for == size and self._looks_same(view)
        self._view, self._now, self._painted_for = view, now, size
        if same:
            return
        width, height = size
        lines = framed(self._painter(view, now, width, height), width, height) if width and height else []
        if view.link == "stale" and self._greys:
            lines = [self._greyed(line) for line in lines]
        if self._ascii:
            lines = [letters.ascii_line(line) for line in lines]
        changed = list(_changed(self._lines, lines, width))
        if changed:
            self._lines = lines
            self.refresh(*changed)

    def entitle(self, title: str, subtitle: str) -> None:
        """Give it titles, if they are others. What looks like markup in them is none."""
        if self._titles != (title, subtitle):
            self._titles = title, subtitle
            self.border_title, self.border_subtitle = Content(title), Content(subtitle)

    def forget(self) -> None:
        """What is shown may look different though the view is the same."""
        self._painted_for = None

    def _looks_same(self, view: View) -> bool:
        before = self._view
        return view.link == before.link and all(
            getattr(view, name) is getattr(before, name) for name in self._depends
        )

    def on_mount(self) -> None:
        """Frames are made of letters where nothing else is."""
        self._ascii = bool(getattr(self.app, "ascii_only", False))
        self.set_class(self._ascii, "ascii")

    def on_resize(self, _event: events.Resize) -> None:
        """Another size shows other things."""
        self.show(self._view, self._now)

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        """Something looks different."""
        self._kept = (None, [])
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def render_lines(self, crop: Region) -> list[Strip]:
        """All of it. Textual asks every widget whenever one of them has changed; what is as before is there
        already.
        """
        asked = crop, self.app.theme, self.app.no_color
        if self._kept[0] != asked:
            self._kept = asked, super().render_lines(crop)
        return self._kept[1]

    def render_line(self, y: int) -> Strip:
        """Line ``y`` of the content."""
        line = self._lines[y] if y < len(self._lines) else ()
        looks = self._styles()
        strip = Strip([Segment(text, looks[role]) for text, role in line])
        return strip.adjust_cell_length(self.size.width, looks[""])

    def notify_style_update(self) -> None:
        """Grounds may be others now."""
        self._looks_of, self._kept = (), (None, [])
        super().notify_style_update()

    def _styles(self) -> dict[Role, Style]:
        """Role -> style on this panel's ground, made once for all lines."""
        app = self.app
        if self._looks_of != (app.theme, app.no_color):
            base = self.rich_style
            self._looks = {
                role: base + style for role, style in themes.styles(app.theme, app.no_color).items()
            }
            self._looks_of = (app.theme, app.no_color)
        return self._looks

    def text(self) -> str:
        """What is shown, without styles."""
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._lines)

    def _greyed(self, line: Line) -> Line:
        if self._keeps_warnings and any(role.startswith("banner") for _, role in line):
            return line
        kept = _KEPT_WHEN_STALE if self._keeps_warnings else frozenset()
        return tuple((text, role if role in kept else "dim") for text, role in line)


def _changed(before: list[Line], after: list[Line], width: int) -> Iterator[Region]:
    """Where the two differ: neighbouring lines in one region."""
    first = -1
    for y, (one, other) in enumerate(zip_longest(before, after, fillvalue=())):
        if one != other and first < 0:
            first = y
        elif one == other and first >= 0:
            yield Region(0, first, width, y - first)
            first = -1
    if first >= 0:
        yield Region(0, first, width, max(len(before), len(after)) - first)
