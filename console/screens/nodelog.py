"""l on a node: what it wrote last, over the picture, which goes on behind it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from oobleckd.console.model import View
from oobleckd.console.screens.modal import Modal
from oobleckd.console.screens.page import bindings
from oobleckd.console.screens.prompt import Prompt
from oobleckd.console.widgets import nodelog
from oobleckd.console.widgets.listing import clamped
from oobleckd.console.widgets.nodelog import NodeLogLook
from oobleckd.console.widgets.panel import Panel
from oobleckd.draw.lines import Line
from oobleckd.words import count


class NodeLog(Modal[None]):
    """The lines of one ``node``, its newest at the bottom."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("log")
    DEFAULT_CSS = """
    NodeLog { align: center middle; }
    NodeLog Panel { width: 100%; height: 100%; background: $surface; border: round $accent; }
    NodeLog Panel.ascii { border: ascii $accent; }
    """

    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node
        self.words = ""
        self.cursor = 0
        self.follow = True
        self._view, self._now = View(), 0.0
        self._panel = Panel(self._paint, f"Log of {node}", id="log", greys=False)

    def compose(self) -> ComposeResult:
        """One panel."""
        yield self._panel

    @property
    def look(self) -> NodeLogLook:
        """What of it one looks at."""
        return NodeLogLook(self.node, self.words, self.cursor, self.follow)

    def show(self, view: View, now: float) -> None:
        """Paint what is known by now."""
        self._view, self._now = view, now
        title, keys = f"Log of {self.node}", "f follow  / search  n N next  esc close"
        if self.words:
            title += f': {count(len(nodelog.found(view, self.look)), "line")} with "{self.words}"'
        if self._view.log is not None and not self._view.log.complete and self._view.log.node == self.node:
            title += " (of its agent alone)"
        said = f"{'following' if self.follow else 'standing still'}   {keys}"
        self._panel.entitle(self.legible(title), said)
        self._panel.show(view, now)

    def _paint(self, view: View, now: float, width: int, height: int) -> list[Line]:
        return nodelog.paint(view, now, width, height, self.look)

    # ------------------------------------------------------------------ keys

    @property
    def _here(self) -> int:
        """The line that one is at."""
        count = len(nodelog.lines_of(self._view, self.node))
        return count - 1 if self.follow else clamped(self.cursor, count)

    def _go(self, line: int) -> None:
        count = len(nodelog.lines_of(self._view, self.node))
        self.cursor = clamped(line, count)
        self.follow = self.cursor >= count - 1
        self.show(self._view, self._now)

    def action_move(self, by: int) -> None:
        """So many lines down, or up; at the newest one it follows."""
        self._go(self._here + by)

    def action_follow(self) -> None:
        """Stay with the newest line, or stop there."""
        self.cursor, self.follow = self._here, not self.follow
        self.show(self._view, self._now)

    def action_search(self) -> None:
        """Ask for words."""
        self.app.push_screen(Prompt("/ search", self.words, "words that a line must have"), self._search)

    def _search(self, words: str | None) -> None:
        if words is None:
            return
        self.words = words.strip()
        places = nodelog.found(self._view, self.look)
        self._go(places[-1] if places else self._here)

    def action_next(self, by: int) -> None:
        """Another line that has the words."""
        self._go(nodelog.following(nodelog.found(self._view, self.look), self._here, by))
