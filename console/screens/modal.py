"""What lies over a screen, which goes on behind it: its words and scroll bars in ASCII where the console was
started with --ascii.

Frames are the application's.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual.screen import ModalScreen
from textual.scrollbar import ScrollBarRender

from oobleckd.console.letters import ascii_text

Answer = TypeVar("Answer")


class _WholeCells(ScrollBarRender):
    """A scroll bar whose ends are no parts of blocks."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "]


class Modal(ModalScreen[Answer]):
    """A screen over the picture."""

    def on_mount(self) -> None:
        """What scrolls shows where it is in ASCII, too."""
        if self._ascii_only:
            for box in self.children:
                box.vertical_scrollbar.renderer = _WholeCells  # type: ignore[misc]  # Textual says so

    def legible(self, text: str) -> str:
        """``text`` as this terminal can show it."""
        return ascii_text(text) if self._ascii_only else text

    @property
    def _ascii_only(self) -> bool:
        return bool(getattr(self.app, "ascii_only", False))
