"""One line that is asked for: a command, a filter, a time; and the confirmation of an act."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.events import Key
from textual.widgets import Input, Static

from oobleckd.console.acts import ConsoleAct
from oobleckd.console.model import View
from oobleckd.console.screens.modal import Answer, Modal
from oobleckd.console.widgets import impact
from oobleckd.draw.lines import plain

_PREVIEW_WIDTH, _PREVIEW_ROWS = 72, 8


class _Asking(Modal[Answer]):
    """A screen with one line to write in. Keys that come before that line has the focus are for it, too: who
    types fast loses none.
    """

    def on_key(self, event: Key) -> None:
        """One that nobody had the focus for."""
        if self.focused is not None:
            return
        line = self.query_one(Input)
        if event.key == "enter":
            event.stop()
            self.call_later(line.action_submit)
        elif event.is_printable and event.character is not None:
            event.stop()
            line.insert_text_at_cursor(event.character)


class Prompt(_Asking[str | None]):
    """Asks for a line at the bottom of the screen; None where nobody wants to say one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Cancel", show=False)]
    DEFAULT_CSS = """
    Prompt { align: left bottom; background: $background 0%; }
    Prompt Container { height: 3; width: 1fr; background: $surface; border: round $accent; }
    Prompt Input { padding: 0 1; background: $surface; }
    """

    def __init__(self, title: str, text: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._placeholder = placeholder

    def compose(self) -> ComposeResult:
        """The line."""
        with Container() as box:
            box.border_title = Content(self.legible(self._title))
            yield Input(self._text, placeholder=self.legible(self._placeholder), compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """It is said."""
        self.dismiss(event.value)


class Confirm(_Asking[bool]):
    """Shows what an act would do, and what follows from it, and wants a word for it where that
    stops the job.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "give_up", "Cancel", show=False),
        Binding("ctrl+y", "copy", "Copy", show=False),
    ]
    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm Container { width: 80; overflow-y: auto; max-width: 100%; height: auto; max-height: 100%;
                        background: $surface; border: round $accent; padding: 0 2; }
    Confirm Static { width: 1fr; height: auto; }
    Confirm Input { background: $panel; }
    """

    def __init__(
        self,
        act: ConsoleAct,
        command: str,
        newest: Callable[[], View],
        nodes: tuple[str, ...],
        copy: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.act = act
        self._command = command
        self._newest = newest
        self._about = nodes
        self._copy = copy
        self._shown = ""
        # Asked for where a loss stops the job or takes it back, and where the daemon has not said what
        # follows: not to know is no permission. (D-console-007)
        self.wanted = word(act, newest())

    def compose(self) -> ComposeResult:
        """The act, its command, what follows, and the line."""
        self._shown = self._text(self._newest())
        with Container() as box:
            box.border_title = Content(self.legible(self.act.question))
            yield Static(self._shown, id="preview", markup=False)
            yield Static("", id="wrong", markup=False)
            yield Input(placeholder=self._asked, compact=True)

    def show(self, view: View) -> None:
        """What follows may have become known meanwhile, or worse; what is asked for only ever gets more."""
        self.wanted = word(self.act, view) or self.wanted
        text = self._text(view)
        if text != self._shown and self.is_mounted:
            self._shown = text
            self.query_one("#preview", Static).update(text)
            self.query_one(Input).placeholder = self._asked

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Do it, if the word is right by what is known now."""
        self.show(self._newest())
        if event.value.strip() == self.wanted:
            self.dismiss(True)
        else:
            wrong = f"that is not {self.wanted or 'empty'}; esc leaves everything as it is"
            self.query_one("#wrong", Static).update(self.legible(wrong))

    def on_input_changed(self, event: Input.Changed) -> None:
        """In a terminal of a few lines the one that is written into may be out of sight."""
        event.input.scroll_visible(animate=False)

    def action_give_up(self) -> None:
        """Leave everything as it is."""
        self.dismiss(False)

    def action_copy(self) -> None:
        """The act as a command."""
        self._copy(self._command)

    @property
    def _asked(self) -> str:
        asked = f"type {self.wanted} and enter" if self.wanted else "enter does it, esc does not"
        return self.legible(asked)

    def _text(self, view: View) -> str:
        lines = [self._command, ""]
        if self._about:
            painted = impact.paint(view, 0.0, _PREVIEW_WIDTH, _PREVIEW_ROWS, self._about)
            lines += [*map(plain, painted), ""]
        if self.act.verb == "cancel":
            lines += ["the job ends with a checkpoint of its last step, and nobody can let it go on", ""]
        if self.wanted:
            lines += [f"this may stop the job or take it back: type its name, {self.wanted}"]
        return self.legible("\n".join(lines))


def word(act: ConsoleAct, view: View) -> str:
    """What has to be typed: the job's name where the act stops it, takes it back, or may; else nothing. Of a
    job that is not the one in ``view``, its id.
    """
    name = view.job.name if view.job is not None else ""
    if act.verb == "cancel":
        return name if view.job is not None and view.job.id in act.names else " ".join(act.names)
    if act.verb in {"kill", "drain"} and impact.harmful(view.impact(act.names)):
        return name
    return ""
