"""The past and acts, under Textual's pilot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.widgets import Input, Static

from oobleckd.console import bundle
from oobleckd.console.replay import of_file
from oobleckd.console.screens.prompt import Confirm
from oobleckd.console.start import Silence
from oobleckd.console.tui import ConsoleApp, Options
from oobleckd.protocol.watch import Past
from oobleckd.unixhttp import ApiProblem
from tests.unit.console import watching
from tests.unit.console.build import NOW, change, heard
from tests.unit.console.piloted import Asker, Console, shown
from tests.unit.console.test_feed import WAIT_S
from tests.unit.console.test_tui import Told

# --------------------------------------------------------------------------- the past


@pytest.mark.asyncio
async def test_a_time_shows_the_past_and_escape_comes_back() -> None:
    async with shown() as console:
        await console.press("t")
        await console.write("-39s")
        await console.until_past()
        assert console.open_incidents == ["inc-2"]
        assert [node.name for node in console.view.nodes if node.state == "lost"] == ["node-5", "node-4"]
        meanwhile = change(50, "node", "meanwhile")
        await console.tell(heard(meanwhile))
        assert meanwhile not in console.view.events
        for _ in range(3):
            await console.press("full_stop")
        async with asyncio.timeout(WAIT_S):
            while console.open_incidents:
                await console.settle()
        await console.press("escape")
        assert console.view.link == "live"
        assert meanwhile in console.view.events


@pytest.mark.asyncio
async def test_an_event_leads_to_its_moment() -> None:
    async with shown() as console:
        await console.press("5", "enter")
        await console.until_past()
        assert console.here == "incidents"
        await console.press("t")
        await console.write("now")
        assert console.view.link == "live"
        await console.press("t")
        await console.write("soon")
        assert "is no time" in console.said()
        await console.press("comma")
        assert "this is now" in console.said()


@pytest.mark.asyncio
async def test_a_file_needs_no_daemon(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    bundle.write(path, watching.bundle())
    load, began = of_file(path)
    options = Options(load=load, begin=began)
    app = ConsoleApp(lambda _deliver: Silence(), lambda: NOW, options)
    async with app.run_test(size=(120, 36)) as pilot:
        console = Console(pilot, app, Told(), Asker())
        await console.until_past()
        await console.press("escape")
        assert console.view.link == "replay"
        await console.press("5")
        assert "inc-1" in console.text()
        await console.press("e")
        assert "no daemon to ask" in console.said()


@pytest.mark.asyncio
async def test_a_past_that_cannot_be_loaded_is_said() -> None:

    def none(_at: float) -> Past:
        raise ApiProblem(404, "not found", "nothing is kept of that time")

    async with shown(load=none) as console:
        await console.press("t")
        await console.write("-5m")
        await console.until("nothing is kept of that time")  # the server's own words
        await console.press("escape")
        assert console.view.link == "live"


# --------------------------------------------------------------------------- acts


@pytest.mark.asyncio
async def test_an_injection_shows_what_follows_and_is_done_after_enter() -> None:
    async with shown() as console:
        await console.press("8", "down", "m")
        assert console.source.wanted.impacts[0] == ("node-2",)
        (impact,) = [found for found in console.view.impacts if found.nodes == ("node-2",)]
        assert (impact.steps_back, impact.stops) == (0, False)
        assert "node-2" in console.panel("impact").text()
        await console.press("h", "i")
        confirm = console.app.screen
        assert isinstance(confirm, Confirm)
        assert confirm.wanted == ""
        assert "oobleckctl kill-node node-2 --how sigterm" in str(
            confirm.query_one("#preview", Static).render()
        )
        await console.press("ctrl+y")
        assert console.app.clipboard == "oobleckctl kill-node node-2 --how sigterm"
        await console.press("enter")
        async with asyncio.timeout(WAIT_S):
            while not console.client.done:
                await console.settle()
        assert console.client.done == ["/v1/nodes/node-2/kill sigterm"]


@pytest.mark.asyncio
async def test_an_act_that_stops_the_job_wants_its_name() -> None:
    async with shown() as console:
        await console.press("8", "m", "i")
        assert isinstance(console.app.screen, Confirm)
        await console.press("enter")
        assert isinstance(console.app.screen, Confirm)
        assert not console.client.done
        await console.press("escape", "6", "X")
        assert isinstance(console.app.screen, Confirm)
        await console.write("small")
        async with asyncio.timeout(WAIT_S):
            while not console.client.done:
                await console.settle()
        assert console.client.done == ["/v1/jobs/job-1/cancel"]


@pytest.mark.asyncio
async def test_read_only_refuses_and_says_the_command() -> None:
    async with shown(read_only=True) as console:
        for keys in (("2", "d"), ("6", "p"), ("6", "c"), ("8", "m", "i")):
            await console.press(*keys)
            assert "--read-only" in console.said()
            assert "oobleckctl" in console.said()
        assert not console.client.done


@pytest.mark.asyncio
async def test_the_rest_of_the_acts() -> None:
    async with shown() as console:
        for keys, done in (
            (("2", "down", "d"), "/v1/nodes/node-2/drain"), (("2", "u"), "/v1/nodes/node-2/undrain"),
            (("6", "p"), "/v1/jobs/job-1/pause"), (("6", "c"), "/v1/jobs/job-1/checkpoint"),
        ):  # fmt: skip
            console.client.done.clear()
            await console.press(*keys, "enter")
            async with asyncio.timeout(WAIT_S):
                while not console.client.done:
                    await console.settle()
            assert console.client.done == [done]


@pytest.mark.asyncio
async def test_an_incident_is_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with shown() as console:
        await console.press("5", "e")
        async with asyncio.timeout(WAIT_S):
            while not (tmp_path / "inc-1.json").exists():
                await console.settle()
    assert bundle.read(tmp_path / "inc-1.json").incident.id == "inc-2"


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [(120, 36), (80, 24), (20, 5)])
async def test_what_is_typed_can_be_seen(size: tuple[int, int]) -> None:
    async with shown(size) as console:
        for keys in (("colon",), ("8", "m", "i")):
            await console.press(*keys)
            line = console.app.screen.query_one(Input)
            line.value = "small"
            await console.settle()
            assert "small" in console.drawn().split("\n")[line.region.y], (size, keys)
            await console.press("escape")
