"""What the keys do here and what the signs mean, from the registry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from oobleckd.console import keys
from oobleckd.console.keys import Key, ScreenName
from oobleckd.console.screens.modal import Modal
from oobleckd.console.widgets.nodes import STATES

LINKS = (
    ("● live", "the daemon answers"),
    (
        "◌ STALE",
        (
            "the daemon is away, and training does not need it; shown is what was last known, greyed, "
            "with its age"
        ),
    ),
    ("○ no daemon", "none has answered yet; it is looked for until there is one"),
    ("◀ PAST", "a moment of the daemon's history, or of a file"),
)
SIGNS: dict[str, tuple[tuple[str, str], ...]] = {
    "overview": (("▸", "a template in use"), ("✗ ! ?", "lost, warning, silent")),
    "nodes": (
        ("█ ▓ ▒ ✗ ·", "both nodes of a cell: at work, waiting, in trouble, lost, gone"),
        ("▀ ▄", "one of the two is not at work"),
        ("◆", "marked for the what-if screen"),
        ("█·┊", "memory used, free, and where what was planned ends"),
    ),
    "pipelines": (
        ("F B I W", "forward, backward, input gradients, weight gradients; then the micro-batch"),
        ("U »", "update; » before all votes are in"),
        ("S", "a forward pass run ahead for another device"),
        ("·", "waiting"),
        ("✗", "not done any more: the device is lost"),
        ("↪", "runs what another device was meant to run"),
        ("▂ ▄ ▆ █", "a pipeline that waits little, …, much"),
        ("─", "in the difference: as modelled"),
    ),
    "templates": (
        ("modelled", "a step of such a pipeline, with the share of the micro-batches that they have now"),
        ("measured", "how long such pipelines worked at the newest step with known op times"),
        ("first", "modelled: one micro-batch through all stages, and back"),
        ("further", "modelled: each one more"),
    ),
    "job": (
        ("▲ ◀ ✗", "on an axis: an incident began, it went back to a checkpoint, a step made no update"),
        ("░", "between the least and the most of a curve's steps"),
        ("●", "what an evaluation found"),
        ("✓", "no step was given up"),
    ),
    "jobs": (("▸", "the job that all screens show"),),
    "incidents": (("✓ ! ✗", "over, over with steps lost, open"),),
    "events": (("! ✗", "a warning, an error"),),
}  # fmt: skip
_WIDTH = 12


def text(screen: ScreenName = "overview") -> str:
    """The help of a screen, a line for each thing."""
    lines = [f"{keys.TITLES[screen]}: {keys.SUBJECTS[screen]}", ""]
    lines += _keys(keys.of(screen))
    if screen in keys.LISTS:
        lines += _keys(keys.of("list"))
    lines += _signs(SIGNS.get(screen, ()))
    lines += ["", "Everywhere", *_keys(keys.everywhere(screen)), "", "The picture", *_signs(LINKS)]
    lines += ["", "Nodes", *(f"  {glyph:<{_WIDTH}} {state}" for state, (glyph, _) in STATES.items())]
    return "\n".join(lines)


def _keys(found: Iterable[Key]) -> list[str]:
    lines = []
    for key in found:
        lines.append(f"  {key.shown:<{_WIDTH}} {key.help}")
        if key.command:
            lines.append(f"  {'':<{_WIDTH}} = {key.command}")
    return lines


def _signs(found: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {sign:<{_WIDTH}} {what}" for sign, what in found]


class Help(Modal[None]):
    """Over the picture, which goes on behind it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "dismiss", "Close")]
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help VerticalScroll { width: 96%; max-width: 120; height: auto; max-height: 96%; border: round $accent;
                          padding: 0 2; background: $surface; }
    Help Static { width: 1fr; height: auto; }
    """

    def __init__(self, screen: ScreenName = "overview") -> None:
        super().__init__()
        self._of = screen

    def compose(self) -> ComposeResult:
        """One text, that scrolls where it has no room."""
        with VerticalScroll() as box:
            box.border_title = "Help"
            yield Static(self.legible(text(self._of)), markup=False)
