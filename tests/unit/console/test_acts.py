"""Acts on several nodes, answers that do not come, the daemon that a command names, and files that are there
already.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oobleckd.client import Client
from oobleckd.console import bundle
from oobleckd.console.acts import ConsoleAct, perform, to_socket
from oobleckd.console.tui import ConsoleApp
from oobleckd.protocol.api import Problem
from oobleckd.protocol.requests import Accepted
from oobleckd.unixhttp import ApiProblem, Unreachable
from tests.helpers.api_server import Api, serving, status_view
from tests.unit.console import watching
from tests.unit.console.piloted import Console, shown
from tests.unit.console.test_feed import WAIT_S

KILL = ConsoleAct("kill", ("node-1", "node-2", "node-3"))


def one_is_gone(path: str, _body: dict[str, Any]) -> Accepted | Problem:
    if "node-2" in path:
        return Problem("conflict", http.client.CONFLICT, "node-2 is lost", "look at it")
    return Accepted("", "it is done")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with serving(tmp_path / "s", Api(status_view(tmp_path), on_act=one_is_gone)) as found:
        yield found


def test_after_one_refusal_the_others_are_tried_and_each_is_said(api: Api, tmp_path: Path) -> None:
    said, bad = perform(Client(tmp_path / "s"), KILL)
    assert [path for path, _ in api.asked] == [f"/v1/nodes/node-{number}/kill" for number in (1, 2, 3)]
    assert said == "node-1, node-3: it is done; node-2: not done: node-2 is lost. look at it"
    assert bad


def test_what_is_the_same_for_all_is_said_once(api: Api, tmp_path: Path) -> None:
    assert perform(Client(tmp_path / "s"), ConsoleAct("kill", ("node-1", "node-3"))) == ("it is done", False)
    assert perform(Client(tmp_path / "s"), ConsoleAct("kill", ("node-2",))).said.startswith(
        "not done: node-2"
    )
    said, bad = perform(Client(tmp_path / "none"), KILL)
    assert said.startswith(f"not done: no daemon: {tmp_path}/none does not exist.")
    assert (said.count("not done"), bad) == (1, True)


@pytest.mark.parametrize("cause", [TimeoutError(), ConnectionResetError(), http.client.BadStatusLine("")])
def test_where_no_answer_came_it_may_have_been_done(cause: Exception) -> None:
    class Silent(Client):
        def _post(self, path: str, body: dict[str, Any]) -> Accepted:
            raise Unreachable("it does not answer in time") from cause

    said, bad = perform(Silent("none"), ConsoleAct("pause", ("job-1",)))
    assert said == "not known whether it was done: it does not answer in time; look before you do it again"
    assert bad


def test_acts_and_the_past_have_more_time_than_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oobleckd.console import start

    made: list[ConsoleApp] = []

    def ran(app: ConsoleApp) -> None:
        made.append(app)

    monkeypatch.setattr(ConsoleApp, "run", ran)
    monkeypatch.setattr(start.gc, "freeze", lambda: None)
    asking = Client(tmp_path / "s", timeout_s=2.0)
    start.run(
        asking, None, None, theme="dark", ascii_only=False, rate_hz=4.0, read_only=False, socket="elsewhere"
    )  # fmt: skip
    (app,) = made
    assert app.options.client is not None
    assert (app.options.client.socket_path, app.options.client._timeout_s) == (tmp_path / "s", 10.0)
    assert app.options.socket == "elsewhere"


# --------------------------------------------------------------------------- commands for the same daemon


def test_a_command_names_the_daemon_where_the_console_was_told_it() -> None:
    drain = ConsoleAct("drain", ("node-1", "node-2")).command
    assert to_socket(drain, "") == drain
    assert to_socket(drain, "/a b") == (
        "oobleckctl --socket '/a b' drain node-1; oobleckctl --socket '/a b' drain node-2"
    )


@pytest.mark.asyncio
async def test_all_that_is_copied_or_said_names_the_daemon() -> None:
    async with shown(socket="/x/s") as console:
        await console.press("2", "y")
        assert console.app.clipboard == console.said() == "oobleckctl --socket /x/s describe node node-1"
        await console.press("down", "d", "ctrl+y")
        assert console.app.clipboard == "oobleckctl --socket /x/s drain node-2"
        assert console.app.clipboard in console.modal()


@pytest.mark.asyncio
async def test_a_refused_act_is_said_as_a_command_for_the_daemon() -> None:
    async with shown(socket="/x/s", read_only=True) as console:
        await console.press("6", "c")
        assert console.said().endswith(": oobleckctl --socket /x/s checkpoint job-1")


# --------------------------------------------------------------------------- files


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def exported(console: Console, name: str) -> None:
    await console.press("5", "e")
    async with asyncio.timeout(WAIT_S):
        while not (console.app._notifications and console.said().endswith(f"/{name}")):
            await console.settle()


@pytest.mark.asyncio
async def test_a_file_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inc-1.json").write_text("mine")
    async with shown(read_only=True) as console:
        await exported(console, "inc-1-2.json")
        await exported(console, "inc-1-3.json")
    assert (tmp_path / "inc-1.json").read_text() == "mine"
    assert (
        bundle.read(tmp_path / "inc-1-2.json") == bundle.read(tmp_path / "inc-1-3.json") == watching.bundle()
    )


@pytest.mark.asyncio
async def test_an_incident_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_incident: str) -> Any:
        raise ApiProblem(404, "not found", "nothing is kept of that time")

    monkeypatch.chdir(tmp_path)
    async with shown() as console:
        monkeypatch.setattr(console.client, "bundle", gone)
        await console.press("5", "e")
        async with asyncio.timeout(WAIT_S):
            while not console.app._notifications:
                await console.settle()
        assert console.said() == "not written: nothing is kept of that time"
    assert not files(tmp_path)


@pytest.mark.asyncio
async def test_through_a_browser_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with shown(read_only=True) as console:
        monkeypatch.setattr(ConsoleApp, "is_web", True)
        await console.press("5", "e")
        assert console.said().startswith("through a browser no file is written.")
        assert console.said().endswith(": oobleckctl export-incident inc-1 -o inc-1.json")
    assert not files(tmp_path)
