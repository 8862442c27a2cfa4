"""The Textual application: the feed's threads on one side, screens on the other, four frames a second between.

Owns the newest view, the frozen one, and the frame. Facts arrive in a queue from the feed's threads and are folded
here, so that widgets and threads never meet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.theme import Theme

from console.feed import Source
from console.model import AnyFact, View, fold
from console.screens.help import Help
from console.screens.overview import Overview

FRAME_S = 0.25
# Told where to put facts; the live feed, and whatever else will have facts to tell.
OpenSource = Callable[[Callable[[AnyFact], None]], Source]
_THEME = Theme(
    name="oobleck",
    primary="#4a86c5",
    accent="#e5b13a",
    background="#141a22",
    surface="#1a212b",
    panel="#2a3440",
    dark=True,
)


class ConsoleApp(App[None]):
    """``oobleck-console`` on a terminal."""

    TITLE = "oobleck-console"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("space", "freeze", "Freeze"),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]

    def __init__(self, open_source: OpenSource, clock: Callable[[], float] = time.time) -> None:
        # Without colours means none at all, not grey ones: Textual does that in its ANSI mode only.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.view = View()
        self._clock = clock
        self._facts: SimpleQueue[AnyFact] = SimpleQueue()
        self._source = open_source(self._facts.put)
        self._overview = Overview()
        self._frozen: tuple[View, float] | None = None

    def get_default_screen(self) -> Overview:
        """The overview lies under all other screens."""
        return self._overview

    def on_mount(self) -> None:
        """Let facts come."""
        self.register_theme(_THEME)
        self.theme = _THEME.name
        self.set_interval(FRAME_S, self.frame)
        for thread in self._source.threads:
            self.run_worker(thread, thread=True)

    def on_unmount(self) -> None:
        """The threads end with the picture."""
        self._source.close()

    def frame(self) -> None:
        """Fold what has arrived, and show it unless the picture is frozen."""
        facts = [self._facts.get_nowait() for _ in range(self._facts.qsize())]
        self.view = fold(self.view, facts)
        self._overview.show(*(self._frozen or (self.view, self._clock())))

    def action_freeze(self) -> None:
        """Hold the picture, or let it go on. What happens meanwhile is not lost."""
        now = self._clock()
        self._frozen = None if self._frozen else (self.view, now)
        self._overview.frozen_at = now if self._frozen else None
        self.frame()

    def action_help(self) -> None:
        """What the keys do."""
        self.push_screen(Help())
