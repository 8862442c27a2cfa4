"""The Textual application: the feed's threads on one side, screens on the other, a few frames a second
between.

Owns the newest view, the frozen one, the past that is looked at, and the frame. Facts arrive in queues from
threads and are folded here, so that widgets and threads never meet. What keys do everywhere is here; what
they do on one screen is that screen's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, ClassVar

import msgspec
from textual.app import App
from textual.binding import BindingType

from oobleckd.client import Client
from oobleckd.console import commands, letters, themes
from oobleckd.console.acts import ActOutcome, ConsoleAct, export, perform, refusal, to_socket
from oobleckd.console.facts import AnyFact, JobChosen, Wants
from oobleckd.console.feed import Source
from oobleckd.console.keys import FILTERED, SCREENS, WITH_FILTER, ScreenName
from oobleckd.console.marks import Marks
from oobleckd.console.model import View, fold
from oobleckd.console.replay import Load, Replay
from oobleckd.console.screens.events import EventsPage
from oobleckd.console.screens.help import Help
from oobleckd.console.screens.incidents import Incidents
from oobleckd.console.screens.job import JobPage
from oobleckd.console.screens.jobs import JobsPage
from oobleckd.console.screens.nodelog import NodeLog
from oobleckd.console.screens.nodes import NodesPage
from oobleckd.console.screens.overview import Overview
from oobleckd.console.screens.page import Page, bindings
from oobleckd.console.screens.palette import Finder, Keys
from oobleckd.console.screens.pipelines import Pipelines
from oobleckd.console.screens.prompt import Confirm, Prompt
from oobleckd.console.screens.templates import Templates
from oobleckd.console.screens.whatif import WhatIf
from oobleckd.console.themes import ThemeName
from oobleckd.console.times import SAYS, moment

RATE_HZ = 4.0
# Told where to put facts; the live feed, and whatever else has facts to tell.
OpenSource = Callable[[Callable[[AnyFact], None]], Source]


class Options(msgspec.Struct, frozen=True):
    """How the console was started.

    ``client``: for acts and exports (None: a file is shown); ``load``: the past; ``begin``: a time of it to
    begin with; ``socket``: the daemon's, where it was named.
    """

    read_only: bool = False
    rate_hz: float = RATE_HZ
    theme: ThemeName = "dark"
    ascii_only: bool = False
    client: Client | None = None
    load: Load | None = None
    begin: float | None = None
    socket: str = ""


class ConsoleApp(App[None]):
    """``oobleck-console`` on a terminal. It is the ``Host`` of its screens."""

    TITLE = "oobleck-console"
    COMMANDS = {Keys}  # noqa: RUF012 - Textual's own type
    BINDINGS: ClassVar[list[BindingType]] = bindings("everywhere")
    CSS = themes.IN_ASCII

    def __init__(
        self,
        open_source: OpenSource,
        clock: Callable[[], float] = time.time,
        options: Options | None = None,
    ) -> None:
        # Without colours means none at all, not grey ones: Textual does that in its ANSI mode only.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.options = options or Options()
        self.ascii_only = self.options.ascii_only
        self.view = View()
        self.marks = Marks()
        self.asked_for: tuple[str, ...] = ()
        self.chosen = ""
        self._clock = clock
        self._facts: SimpleQueue[AnyFact] = SimpleQueue()
        self._past_facts: SimpleQueue[AnyFact] = SimpleQueue()
        self._source = open_source(self._facts.put)
        self._past: Replay | None = None
        self._past_view = View()
        self._frozen: tuple[View, float] | None = None
        self._before: list[ScreenName] = []
        self.pages: dict[ScreenName, Page] = {
            page.TAG: page
            for page in (
                Overview(self), NodesPage(self), Pipelines(self), Templates(self), Incidents(self),
                JobPage(self), EventsPage(self),
                WhatIf(self), JobsPage(self),
            )
        }  # fmt: skip

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Of themes that are not ours."""
        return {themes.EDGE: themes.PALETTES["dark"].edge}

    def action_command_palette(self) -> None:
        """Ours in the place of Textual's."""
        self.push_screen(Finder())

    def get_default_screen(self) -> Page:
        """The overview comes first."""
        return self.pages["overview"]

    def on_mount(self) -> None:
        """Let facts come."""
        self.set_class(self.ascii_only, "ascii")
        for theme in themes.THEMES:
            self.register_theme(themes.textual_theme(theme))
        self.theme = themes.textual_name(self.options.theme)
        for name, page in self.pages.items():
            if name != "overview":
                self.install_screen(page, name)
        self.set_interval(1.0 / self.options.rate_hz, self.frame)
        self._run(self._source.threads)
        if self.options.begin is not None and self.options.load is not None:
            self.open_past(self.options.load, self.options.begin, playing=True)

    def on_unmount(self) -> None:
        """The threads end with the picture."""
        self._source.close()
        if self._past is not None:
            self._past.close()

    def _run(self, threads: Iterable[Callable[[], None]]) -> None:
        for thread in threads:
            self.run_worker(thread, thread=True)

    # ------------------------------------------------------------------ the frame

    @property
    def page(self) -> Page | None:
        """The screen in sight, under whatever asks for something."""
        return next((screen for screen in reversed(self.screen_stack) if isinstance(screen, Page)), None)

    @property
    def frozen_at(self) -> float | None:
        """When the picture was frozen."""
        return self._frozen[1] if self._frozen else None

    def shown(self) -> tuple[View, float]:
        """What is to be seen, and at which time."""
        if self._past is not None:
            return self._past_view, self._clock()
        return self._frozen or (self.view, self._clock())

    def newest(self) -> View:
        """The present with all that has arrived, whatever is shown."""
        self.view = fold(self.view, _taken(self._facts))
        return self.view

    def frame(self) -> None:
        """Fold what has arrived, and show it unless the picture is frozen."""
        self.newest()
        if self._past is not None:
            self._past_view = fold(self._past_view, _taken(self._past_facts))
        page = self.page
        if page is None:
            return
        view, now = self.shown()
        page.show(view, now)
        if isinstance(self.screen, Confirm):
            self.screen.show(self.view)
        if self.node_log is not None:
            self.node_log.show(view, now)
        # What the past wants is on its tape.
        self._source.want(self._wants(page) if self._past is None else Wants(job=self.chosen))

    @property
    def node_log(self) -> NodeLog | None:
        """The lines of a node that are in sight, if any are."""
        return next((screen for screen in reversed(self.screen_stack) if isinstance(screen, NodeLog)), None)

    def _wants(self, page: Page) -> Wants:
        log = self.node_log.node if self.node_log is not None else ""
        wants = msgspec.structs.replace(page.wants(), log=log, job=self.chosen)
        if self.asked_for and self.asked_for not in wants.impacts:
            wants = msgspec.structs.replace(wants, impacts=(*wants.impacts, self.asked_for))
        return wants

    # ------------------------------------------------------------------ the screens

    def goto(self, screen: ScreenName) -> None:
        """Show another screen."""
        here = self.page
        if here is None or screen == here.TAG or self.screen is not here:
            return
        self._before = [*self._before[-len(SCREENS) :], here.TAG]
        self._switch(screen)

    def _switch(self, screen: ScreenName) -> None:
        """The overview lies under all other screens, of which there is one at a time."""
        coming = self.pages[screen]
        if coming.is_mounted:  # It still has the picture that was left there, maybe of minutes ago.
            coming.forget()  # On another screen nodes may have been marked.
            coming.show(*self.shown())
        if screen == "overview":
            self.pop_screen()
        elif self.page is self.pages["overview"]:
            self.push_screen(screen)
        else:
            self.switch_screen(screen)
        self.call_after_refresh(self.frame)

    def action_goto(self, screen: ScreenName) -> None:
        """Keys 1 to 9."""
        self.goto(screen)

    async def action_back(self) -> None:
        """From the past to now, else without the filter, else the screen before."""
        page = self.page
        if self._past is not None and self.options.client is not None:
            self._come_back()
        elif page is not None and page.words:
            page.search("")
        elif self._before:
            self._switch(self._before.pop())
        elif page is not None and page.TAG != "overview":
            self._switch("overview")

    def action_help(self) -> None:
        """What the keys do here."""
        page = self.page
        self.push_screen(Help(page.TAG if page is not None else "overview"))

    def action_filter(self) -> None:
        """Ask for words."""
        page = self._filtered()
        if page is not None:
            self.push_screen(Prompt("/ filter", page.words, "words that rows must have"), self._filter)

    def _filter(self, words: str | None) -> None:
        page = self._filtered() if words is not None else None
        if words is not None and page is not None:
            page.search(words.strip())

    def _filtered(self) -> Page | None:
        """The screen in sight, if it has rows to filter; else it is said that it has none."""
        if self.page is not None and self.page.TAG in FILTERED:
            return self.page
        self.say(f"there is nothing to filter here; there is on {WITH_FILTER}")
        return None

    def action_copy(self) -> None:
        """The same as a command."""
        if self.page is not None:
            self.copy(self._here(self.page.command()))

    def _here(self, command: str) -> str:
        """A command as it reaches the daemon of this console."""
        return to_socket(command, self.options.socket)

    def copy(self, command: str) -> None:
        """Put a command where a terminal can paste it from, and say it, for terminals that cannot."""
        self.copy_to_clipboard(command)
        self.say(command)

    def say(self, text: str, *, bad: bool = False) -> None:
        """Show one sentence for a while."""
        text = letters.ascii_text(text) if self.ascii_only else text
        self.notify(text, severity="error" if bad else "information", markup=False)

    def show_log(self, node: str) -> None:
        """What a node wrote last."""
        self.push_screen(NodeLog(node))
        self.call_after_refresh(self.frame)

    def choose(self, job: str) -> None:
        """Show another job on every screen, by its id; "": whichever is at work."""
        if self._past is not None:
            self.say("the past shows the job that was at work then; esc comes back to now", bad=True)
            return
        self.chosen, self._frozen = job, None
        self._facts.put(JobChosen(self._clock(), job))
        self.frame()
        found = self.view.job
        self.say(f"now on every screen: {found.id}" if found is not None else "there is no job")

    def _choose_named(self, name: str) -> None:
        """By its id, or the newest one of that name."""
        found = [job.id for job in self.view.jobs if name in {job.id, job.name}]
        if found:
            self.choose(found[-1])
        else:
            self.say(f"there is no job {name!r}; :jobs lists them", bad=True)

    # ------------------------------------------------------------------ commands

    def action_command(self) -> None:
        """Ask for a command."""
        self.push_screen(Prompt(": go", "", "a screen's name, theme NAME, at TIME, q"), self._command)

    def _command(self, text: str | None) -> None:
        if not text or not text.strip():
            return
        try:
            said = commands.parse(text)
        except ValueError as error:
            self.say(str(error), bad=True)
            return
        if isinstance(said, commands.Goto):
            self.goto(said.screen)
            return
        doing: dict[str, Callable[[str], Any]] = {
            "q": lambda _rest: self.exit(), "quit": lambda _rest: self.exit(),
            "help": lambda _rest: self.action_help(), "theme": self._theme, "at": self._time,
            "filter": self._filter, "job": self._choose_named,
        }  # fmt: skip
        doing[said.word](said.rest)

    def _theme(self, name: str) -> None:
        if name not in themes.THEMES:
            self.say(f"there is no theme {name!r}: there are {', '.join(themes.THEMES)}", bad=True)
            return
        self.theme = next(themes.textual_name(theme) for theme in themes.THEMES if theme == name)
        for page in self.pages.values():
            page.refresh(layout=False)

    # ------------------------------------------------------------------ time

    def action_freeze(self) -> None:
        """Hold the picture, or let it go on. What happens meanwhile is not lost."""
        if self._past is not None:
            self._past.play()
            return
        now = self._clock()
        self._frozen = None if self._frozen else (self.view, now)
        self.frame()

    def action_time(self) -> None:
        """Ask for a time."""
        self.push_screen(Prompt("t time", "", SAYS), self._time)

    def _time(self, text: str | None) -> None:
        if text is None:
            return
        shown = self._past_view.heard_at if self._past is not None else None
        try:
            at = moment(text, self._clock(), shown)
        except ValueError as error:
            self.say(str(error), bad=True)
            return
        if text.strip() in {"now", ""}:
            self._come_back()
        else:
            self.visit(at)

    def action_seek(self, by: int) -> None:
        """In the past: so many seconds on, or back."""
        if self._past is None:
            self.say("this is now; t shows a moment of the past")
        else:
            self._past.move(float(by))

    def visit(self, at: float) -> None:
        """Show the past at ``at``, standing still."""
        if self._past is not None:
            self._past.seek(at)
        elif self.options.load is None:
            self.say("there is no past to show here", bad=True)
        else:
            self.open_past(self.options.load, at, playing=False)

    def open_past(self, load: Load, at: float, *, playing: bool) -> None:
        """Show the past from ``at`` on."""
        self._frozen = None
        self._past_view = View()
        self._past = Replay(load, self._past_facts.put, at, playing=playing)
        self._run(self._past.threads)

    def _come_back(self) -> None:
        if self.options.client is None:
            self.say("a file has no now", bad=True)
            return
        if self._past is not None:
            self._past.close()
        self._past = None
        self._past_facts = SimpleQueue()
        self.frame()

    # ------------------------------------------------------------------ acts

    def ask(self, act: ConsoleAct, preview: tuple[str, ...] = ()) -> None:
        """Do ``act`` if it is allowed and confirmed."""
        view = self._past_view if self._past is not None else self.newest()
        command = self._here(act.command)
        if problem := refusal(act, view, read_only=self.options.read_only):
            self.say(f"not done: {problem}. The same as a command: {command}", bad=True)
            return
        self.asked_for = preview

        def answered(sure: bool | None) -> None:
            self.asked_for = ()
            if sure:
                self._ask_daemon(lambda client: perform(client, act), "not done: ")

        self.push_screen(Confirm(act, command, self.newest, preview, self.copy), answered)
        self.frame()

    def export(self, incident: str) -> None:
        """Write an incident into the current folder."""
        if self.is_web:
            command = self._here(f"oobleckctl export-incident {incident} -o {incident}.json")
            self.say(f"through a browser no file is written. The same as a command: {command}", bad=True)
            return
        self._ask_daemon(lambda client: export(client, incident))

    def _ask_daemon(self, work: Callable[[Client], ActOutcome], without: str = "") -> None:
        """Do it in a thread, and say what came of it."""
        client = self.options.client
        if client is None:
            self.say(f"{without}there is no daemon to ask", bad=True)
            return

        def run() -> None:
            said, bad = work(client)
            self.call_from_thread(self.say, said, bad=bad)

        self.run_worker(run, thread=True)


def _taken(queue: SimpleQueue[AnyFact]) -> list[AnyFact]:
    return [queue.get_nowait() for _ in range(queue.qsize())]
