"""ctrl+p: every key of the screen, and every job, found by a part of their words."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider

from oobleckd.console import keys
from oobleckd.console.letters import ascii_text
from oobleckd.console.screens.page import Page
from oobleckd.words import being


class Finder(CommandPalette):
    """Textual's own; in ASCII it has other frames (``themes.IN_ASCII``)."""

    def __init__(self) -> None:
        super().__init__(placeholder="Search for keys by their words", id="--command-palette")


class Keys(Provider):
    """The registry as commands."""

    async def discover(self) -> Hits:
        """All of them, while nothing is typed."""
        for name, what, call in self._commands():
            yield DiscoveryHit(name, call, help=what)

    async def search(self, query: str) -> Hits:
        """Those that fit what is typed."""
        matcher = self.matcher(query)
        for name, what, call in self._commands():
            score = max(matcher.match(name), matcher.match(what))
            if score > 0:
                yield Hit(score, matcher.highlight(name), call, help=what)

    def _commands(self) -> Iterator[tuple[str, str, Callable[[], Coroutine[Any, Any, Any]]]]:
        screen = self.screen
        if not isinstance(screen, Page):
            return
        for key in keys.on(screen.TAG):
            if key.action == "app.command_palette" or not key.label:
                continue
            _, action, _ = next(keys.bound([key]))
            said = (f"{key.label} ({key.shown})", key.help)
            name, what = map(ascii_text, said) if screen.host.ascii_only else said
            yield name, what, partial(screen.run_action, action)
        for job in screen.view.jobs:
            said = (f"Job {job.id}", f"show it on every screen; it {being(job.state)}")
            name, what = map(ascii_text, said) if screen.host.ascii_only else said
            yield name, what, partial(_chosen, screen, job.id)


async def _chosen(page: Page, job: str) -> None:
    page.host.choose(job)
