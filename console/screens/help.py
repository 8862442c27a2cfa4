"""What the keys do and what the signs mean."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

from console.widgets.nodes import STATES

_KEYS = (
    ("q", "quit"),
    ("space", "freeze the picture, and let it go on"),
    ("?", "this help; any of ? q esc closes it"),
)
_LINKS = (
    ("● live", "the daemon answers"),
    (
        "◌ STALE",
        "the daemon is away and training goes on; shown is what was last known, greyed, with its age",
    ),
    ("○ no daemon", "none has answered yet; it is looked for until there is one"),
)


def text() -> str:
    """The help, a line for each thing."""
    lines = ["Keys", *(f"  {key:<12} {what}" for key, what in _KEYS), "", "The picture"]
    lines += [f"  {sign:<12} {what}" for sign, what in _LINKS]
    lines += ["", "Nodes", *(f"  {glyph:<12} {state}" for state, (glyph, _) in STATES.items())]
    return "\n".join(lines)


class Help(ModalScreen[None]):
    """Over the picture, which goes on behind it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "dismiss", "Close")]
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help Static { width: auto; max-width: 90%; height: auto; border: round $accent; padding: 0 2; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        """One text."""
        box = Static(text(), markup=False)
        box.border_title = "Help"
        yield box
