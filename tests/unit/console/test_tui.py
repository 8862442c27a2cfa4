"""The application under Textual's pilot: three sizes, three states, keys, and a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from textual.filter import NoColor
from textual.pilot import Pilot

from oobleckd.client import Client
from oobleckd.console.facts import AnyFact, Away, Wants
from oobleckd.console.feed import Feed
from oobleckd.console.model import Link, View
from oobleckd.console.screens.help import Help
from oobleckd.console.screens.overview import Overview
from oobleckd.console.themes import COLOURED
from oobleckd.console.tui import ConsoleApp
from oobleckd.console.widgets import verdict
from oobleckd.console.widgets.panel import Panel
from tests.helpers.api_server import serving
from tests.unit.console.build import NOW, change, facts, fetched, heard, incident
from tests.unit.console.test_feed import WAIT_S, api

SIZES = [(160, 46), (120, 36), (80, 24)]
STALE = Away(NOW + 2, "no daemon listens")


class Told:
    """A source that tells what the test says, when it says so."""

    def __init__(self) -> None:
        self.threads: tuple[Callable[[], None], ...] = ()
        self.closed = False
        self.wanted = Wants()
        self.deliver: Callable[[AnyFact], None] = lambda _fact: None

    def open(self, deliver: Callable[[AnyFact], None]) -> Told:
        self.deliver = deliver
        return self

    def want(self, wants: Wants) -> None:
        self.wanted = wants

    def close(self) -> None:
        self.closed = True


class Console:
    """The running application, its source, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = NOW
        self.source = Told()
        self.app = ConsoleApp(self.source.open, lambda: self.now)

    async def tell(self, pilot: Pilot[None], told: Iterable[AnyFact]) -> None:
        for fact in told:
            self.source.deliver(fact)
        self.app.frame()
        await pilot.pause()

    @property
    def view(self) -> View:
        """What is shown."""
        assert self.app.page is not None
        return self.app.page.view

    def panel(self, name: str) -> Panel:
        return self.app.query_one(f"#{name}", Panel)

    def drawn(self, name: str) -> str:
        """What the panel's lines come to on the screen."""
        panel = self.panel(name)
        return "\n".join(panel.render_line(y).text.rstrip() for y in range(panel.size.height))


@asynccontextmanager
async def shown(size: tuple[int, int], *told: AnyFact) -> AsyncIterator[tuple[Console, Pilot[None]]]:
    console = Console()
    async with console.app.run_test(size=size) as pilot:
        await console.tell(pilot, told)
        yield console, pilot
    assert console.source.closed


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_live_at_three_sizes(size: tuple[int, int]) -> None:
    async with shown(size, *facts()) as (console, _):
        assert console.view.link == "live"
        for panel, parts in {
            "verdict": ("20/500", "oobleck"), "nodes": ("node-4",), "pipelines": ("6", "node-5"),
            "training": ("24.0", "2.5000"), "recovery": ("inc-1", "detect", "resume"),
        }.items():  # fmt: skip
            assert all(part in console.drawn(panel) for part in parts), panel
        assert console.drawn("events").strip()
        assert console.panel("templates").display == (size != (80, 24))


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_every_panel_is_on_the_screen_and_none_over_another(size: tuple[int, int]) -> None:
    async with shown(size, *facts()) as (console, _):
        regions = [panel.region for panel in console.app.query(Panel) if panel.display]
        assert sum(region.area for region in regions) == size[0] * size[1]
        assert all(console.app.screen.region.contains_region(region) for region in regions)
        assert not any(a.overlaps(b) for a in regions for b in regions if a is not b)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_a_lost_daemon_greys_the_last_state_and_says_its_age(size: tuple[int, int]) -> None:
    async with shown(size, *facts(), STALE) as (console, pilot):
        console.now = NOW + 12
        await console.tell(pilot, [])
        assert console.view.link == "stale"
        assert console.drawn("verdict").count("12 s") == 2, "how old it is, and since when nobody answers"
        assert verdict.NEEDS_NONE in console.drawn("verdict")
        assert "node-4" in console.drawn("nodes")
        grey = COLOURED["dark"]["dim"].color
        for name in ("nodes", "pipelines", "recovery", "events"):
            styles = [s.style for s in console.panel(name).render_line(0) if s.text.strip() and s.style]
            assert {style.color for style in styles} == {grey}
        await console.tell(pilot, [fetched(at=NOW + 13)])
        assert console.view.link == "live"
        assert verdict.AWAY not in console.drawn("verdict")


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_no_daemon_yet(size: tuple[int, int]) -> None:
    async with shown(size) as (console, pilot):
        assert (console.view.link, console.view.problem) == ("waiting", "")
        looking = console.drawn("verdict")
        await console.tell(pilot, [Away(NOW, "no daemon: it does not exist", "start it")])
        assert console.view.problem in console.drawn("verdict") != looking
        assert console.drawn("nodes").strip()


@pytest.mark.asyncio
async def test_an_incident_opens_grows_and_closes_before_ones_eyes() -> None:
    is_open = incident(open=True, at=NOW, total_s=0.0, phases=incident().phases[:1])
    async with shown((120, 36), *facts(), fetched(incidents=(is_open,))) as (console, pilot):
        console.now = NOW + 0.4
        await console.tell(pilot, [])
        assert "inc-1" in console.drawn("verdict")
        assert "400 ms" in console.drawn("recovery")
        await console.tell(pilot, [heard(change(9, "incident", "recovered", view=incident()))])
        assert "inc-1" not in console.drawn("verdict")
        assert "2,000 ms" in console.drawn("recovery")


@pytest.mark.asyncio
async def test_space_holds_the_picture_and_loses_nothing() -> None:
    async with shown((120, 36), *facts()) as (console, pilot):
        await pilot.press("space")
        await console.tell(pilot, [heard(change(9, "node", "node-9 is here"))])
        assert console.app.frozen_at == NOW
        assert "node-9" not in console.drawn("events")
        await pilot.press("space")
        await pilot.pause()
        assert console.app.frozen_at is None
        assert "node-9" in console.drawn("events")


@pytest.mark.asyncio
async def test_help_opens_and_closes_and_q_quits() -> None:
    async with shown((80, 24), *facts()) as (console, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(console.app.screen, Help)
        await console.tell(pilot, [heard(change(9, "node", "behind the help"))])
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(console.app.screen, Overview)
        await pilot.press("q")
        await pilot.pause()
        assert not console.app.is_running
        assert console.app.return_code == 0


@pytest.mark.asyncio
async def test_another_size_is_another_arrangement() -> None:
    async with shown((160, 46), *facts()) as (console, pilot):
        assert console.panel("templates").display
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert not console.panel("templates").display
        assert console.panel("recovery").region.bottom == 23
        assert "inc-1" in console.drawn("recovery")


@pytest.mark.asyncio
async def test_without_colours_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with shown((80, 24), *facts(), STALE) as (console, _):
        assert any(isinstance(line_filter, NoColor) for line_filter in console.app.get_line_filters())
        assert console.view.link == "stale"
        segments = list(console.panel("verdict").render_line(2))
        assert any(segment.style and segment.style.reverse for segment in segments)


@pytest.mark.asyncio
async def test_nothing_new_paints_nothing() -> None:
    async with shown((120, 36), *facts()) as (console, pilot):
        painted = [panel.render_line(0) for panel in console.app.query(Panel)]
        before = [id(panel._lines) for panel in console.app.query(Panel)]
        await console.tell(pilot, [])
        assert [id(panel._lines) for panel in console.app.query(Panel)] == before
        assert [panel.render_line(0) for panel in console.app.query(Panel)] == painted


@pytest.mark.asyncio
async def test_over_a_real_socket_from_nothing_to_live_to_stale(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    app = ConsoleApp(lambda deliver: Feed(Client(socket, timeout_s=2.0), deliver))

    async def until(link: Link, pilot: Pilot[None], problem: str = "") -> None:
        async with asyncio.timeout(WAIT_S):
            while app.view.link != link or problem not in app.view.problem:
                await pilot.pause(0.02)

    with ExitStack() as daemon:
        async with app.run_test(size=(120, 36)) as pilot:
            await until("waiting", pilot, problem="no daemon")
            daemon.enter_context(serving(socket, api(tmp_path)))
            await until("live", pilot)
            async with asyncio.timeout(WAIT_S):
                while "20/500" not in app.query_one("#verdict", Panel).text():
                    await pilot.pause(0.02)
            daemon.close()
            await until("stale", pilot)
