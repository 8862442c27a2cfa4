"""The application under Textual's pilot, with a source that says what the test says and acts that end in a
list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from textual.command import CommandList
from textual.pilot import Pilot
from textual.widgets import Input, Static

from oobleckd.client import Client
from oobleckd.console.facts import AnyFact
from oobleckd.console.keys import ScreenName
from oobleckd.console.model import View
from oobleckd.console.tui import ConsoleApp, Options
from oobleckd.console.widgets.panel import Panel
from oobleckd.protocol.requests import Accepted
from tests.unit.console import watching
from tests.unit.console.build import NOW
from tests.unit.console.test_feed import WAIT_S
from tests.unit.console.test_tui import Told


class Asker(Client):
    """Acts end here."""

    def __init__(self) -> None:
        super().__init__("none")
        self.done: list[str] = []

    def _post(self, path: str, body: dict[str, Any]) -> Accepted:
        self.done.append(f"{path} {body.get('how', '')}".strip())
        return Accepted("", "it is done")

    def bundle(self, incident: str) -> Any:
        assert incident == "inc-1"
        return watching.bundle()


class Console:
    def __init__(self, pilot: Pilot[None], app: ConsoleApp, source: Told, client: Asker) -> None:
        self.pilot, self.app, self.source, self.client = pilot, app, source, client

    async def tell(self, *told: AnyFact) -> None:
        for fact in told:
            self.source.deliver(fact)
        await self.settle()

    async def settle(self) -> None:
        await self.pilot.pause()
        self.app.frame()
        await self.pilot.pause()

    async def press(self, *names: str) -> None:
        await self.pilot.press(*names)
        await self.settle()

    async def write(self, text: str) -> None:
        """Into whatever asks for something."""
        self.app.screen.query_one(Input).value = text
        await self.press("enter")

    async def until_past(self) -> None:
        """Until the past is shown."""
        async with asyncio.timeout(WAIT_S):
            while self.view.link != "replay":
                await self.settle()

    async def until(self, what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while what not in self.text():
                await self.settle()

    async def until_hit(self, what: str) -> None:
        """Until the palette has found it."""
        async with asyncio.timeout(WAIT_S):
            while not any(
                what in str(found.prompt) for found in self.app.screen.query_one(CommandList).options
            ):
                await self.settle()

    @property
    def here(self) -> ScreenName:
        assert self.app.page is not None
        return self.app.page.TAG

    @property
    def view(self) -> View:
        """What the screen in sight shows."""
        assert self.app.page is not None
        return self.app.page.view

    @property
    def open_incidents(self) -> list[str]:
        return [incident.id for incident in self.view.incidents if incident.open]

    def panel(self, name: str) -> Panel:
        return self.app.screen.query_one(f"#{name}", Panel)

    def text(self) -> str:
        """All that is drawn."""
        page = self.app.page
        assert page is not None
        return "\n".join(panel.text() for panel in page.panels() if panel.display)

    def modal(self) -> str:
        """What an act that is to be confirmed says."""
        return "\n".join(
            str(self.app.screen.query_one(f"#{name}", Static).render()) for name in ("preview", "wrong")
        )

    def drawn(self) -> str:
        """The terminal, sign by sign."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    def said(self) -> str:
        """The newest sentence that was shown for a while."""
        return next(iter(reversed(list(self.app._notifications)))).message


@asynccontextmanager
async def shown(
    size: tuple[int, int] = (120, 36), told: Iterable[AnyFact] | None = None, **options: Any
) -> AsyncIterator[Console]:
    source, client = Told(), Asker()
    usual: dict[str, Any] = {"client": client, "load": lambda _at: watching.past()}
    app = ConsoleApp(source.open, lambda: NOW, Options(**(usual | options)))
    async with app.run_test(size=size) as pilot:
        console = Console(pilot, app, source, client)
        await console.tell(*(watching.facts() if told is None else told))
        yield console
