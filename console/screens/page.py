"""What all screens have in common: a verdict on top, panels in places, the keys at the bottom.

A screen owns what one looks at (a cursor, a filter, a mode) and hands it to pure painters. What is shown
belongs to the application, which also does what lasts longer than a screen: the ``Host``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Protocol

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen

from oobleckd.console import keys, letters
from oobleckd.console.acts import ConsoleAct
from oobleckd.console.facts import Wants
from oobleckd.console.keys import Scope, ScreenName
from oobleckd.console.marks import Marks
from oobleckd.console.model import View
from oobleckd.console.screens.places import PagePlace, Places
from oobleckd.console.widgets import footer, verdict
from oobleckd.console.widgets.listing import clamped, place
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line


class Host(Protocol):
    """What a screen may ask of the application."""

    marks: Marks
    ascii_only: bool

    @property
    def frozen_at(self) -> float | None:
        """When the picture was frozen; None while it is not."""

    def goto(self, screen: ScreenName) -> None:
        """Show another screen."""

    def visit(self, at: float) -> None:
        """Show the past, at this time."""

    def ask(self, act: ConsoleAct, preview: tuple[str, ...] = ()) -> None:
        """Do ``act`` if it is confirmed. ``preview``: nodes of which what follows is shown first."""

    def choose(self, job: str) -> None:
        """Show another job on every screen, by its id; "": whichever is at work."""

    def show_log(self, node: str) -> None:
        """Show what a node wrote last."""

    def export(self, incident: str) -> None:
        """Write an incident into a file of the current folder."""

    def say(self, text: str, *, bad: bool = False) -> None:
        """Show one sentence for a while."""


def bindings(*scopes: Scope) -> list[BindingType]:
    """The keys of some scopes, as Textual wants them. None is shown: the footer is a panel of ours."""
    found = [binding for scope in scopes for binding in keys.bound(keys.of(scope))]
    return [Binding(key, action, label, show=False) for key, action, label in found]


class Page(Screen[None]):
    """A screen of the console. ``main`` is its panel that is left in a tiny terminal."""

    TAG: ClassVar[ScreenName]
    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    Page { layout: vertical; overflow: hidden; }
    #body { height: 1fr; width: 1fr; overflow: hidden; }
    #body Panel { position: absolute; }
    """

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self.view = View()
        self.now = 0.0
        self.words = ""
        self._shape: object = None
        self._panels: dict[str, Panel] = {}

    # ------------------------------------------------------------------ what a screen says of itself

    @abstractmethod
    def body(self) -> Iterable[Panel]:
        """Its panels."""

    @abstractmethod
    def places(self, width: int, height: int) -> Places:
        """Where they lie in a terminal of that size."""

    def shape(self) -> object:
        """What of the view decides where panels lie; they are put there anew with another one."""
        return None

    def wants(self) -> Wants:
        """What it wants to know beyond the lists."""
        return Wants()

    def command(self) -> str:
        """What it shows, or would do, as an oobleckctl command."""
        return "oobleckctl status"

    def titles(self) -> None:
        """Set titles that depend on the view."""

    # ------------------------------------------------------------------ what it shows

    def compose(self) -> ComposeResult:
        """The panels; where they lie is decided when the size is known."""
        panels = (
            Panel(self._verdict, id="verdict", keeps_warnings=True),
            *self.body(),
            Panel(self._footer, id="footer", greys=False),
        )
        self._panels = {panel.id or "": panel for panel in panels}
        with Container(id="body"):
            yield from panels

    def panels(self) -> Iterator[Panel]:
        """All panels; they stay the same as long as the screen, so that no frame has to look for them."""
        yield from self._panels.values()

    def show(self, view: View, now: float) -> None:
        """Paint ``view`` as it is at ``now``."""
        self.view, self.now = view, now
        if (shape := self.shape()) != self._shape:
            self._shape = shape
            self._put_panels(self.size.width, self.size.height)
        self.titles()
        for panel in self.panels():
            if panel.display:
                panel.show(view, now)

    def forget(self) -> None:
        """What is shown may look different though the view is the same."""
        for panel in self.panels():
            panel.forget()

    def changed(self) -> None:
        """One looks at something else now."""
        self.forget()
        self.show(self.view, self.now)

    def entitle(self, panel: str, title: str, subtitle: str = "") -> None:
        """Give a panel its title, if it is another one."""
        if self.host.ascii_only:
            title, subtitle = letters.ascii_text(title), letters.ascii_text(subtitle)
        found = self._panels.get(panel)
        if found is not None:
            found.entitle(title, subtitle)

    def search(self, words: str) -> None:
        """Show what has ``words`` alone."""
        self.words = words
        self.changed()

    def on_resize(self, event: events.Resize) -> None:
        """Put every panel in its place; one without a place is not shown."""
        self._put_panels(event.size.width, event.size.height)

    def _put_panels(self, width: int, height: int) -> None:
        where = self.places(width, height)
        for panel in self.panels():
            place = where.get(panel.id or "")
            panel.display = place is not None
            if place is not None:
                _put(panel, place)

    def _verdict(self, view: View, now: float, width: int, height: int) -> list[Line]:
        lines = verdict.paint(view, now, width, height)
        frozen_at = self.host.frozen_at
        return lines if frozen_at is None else [*lines[:-1], verdict.frozen(frozen_at)]

    def _footer(self, _view: View, _now: float, width: int, _height: int) -> list[Line]:
        return [footer.paint(self.TAG, keys.footer(self.TAG), width)]


class ListPage(Page):
    """A screen with a list and a cursor. Where rows have names the cursor stays with its row, whatever comes
    before it.

    ``ROWS``: the field of the view that such rows are made of.
    """

    ROWS: ClassVar[str] = ""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.cursor = 0
        self._row: object = None

    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the list, as it is filtered."""

    def names(self) -> Sequence[object]:
        """What each row is known by; nothing where the cursor is a place."""
        return ()

    def show(self, view: View, now: float) -> None:
        """Paint ``view``, the cursor where its row is now."""
        before, self.view = self.view, view
        if self.ROWS and getattr(view, self.ROWS) is not getattr(before, self.ROWS):
            self.stay()
        super().show(view, now)

    def stay(self) -> None:
        """Rows may be elsewhere now, the cursor goes with its own."""
        names = self.names()
        if names:
            self.cursor = place(names, self._row, self.cursor)
            self._row = names[self.cursor]

    def changed(self) -> None:
        """The cursor may be on another row."""
        names = self.names()
        self._row = names[clamped(self.cursor, len(names))] if names else None
        super().changed()

    def action_move(self, by: int) -> None:
        """Move the cursor, to the ends at most."""
        rows = self.num_rows()
        self.cursor = clamped(clamped(self.cursor, rows) + by, rows)
        self.changed()

    def search(self, words: str) -> None:
        """The list begins anew."""
        self.cursor = 0
        super().search(words)


def _put(panel: Panel, place: PagePlace) -> None:
    panel.styles.offset = (place.x, place.y)
    panel.styles.width = place.width
    panel.styles.height = place.height
