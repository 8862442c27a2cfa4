"""Every act has its oobleckctl command and ``y`` copies what is shown as one: each of them is run, against
the same answers.

An act and its command must ask the daemon for the same; a command that shows must succeed, and its JSON be
the daemon's.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from oobleckd.client import Client
from oobleckd.console import bundle
from oobleckd.console.acts import HOWS
from oobleckd.console.screens.prompt import Confirm
from oobleckd.console.tui import ConsoleApp, Options
from oobleckd.ctl.main import main
from tests.helpers.api_server import Api, serving
from tests.unit.console import build, watching
from tests.unit.console.piloted import Asker, Console
from tests.unit.console.test_feed import WAIT_S, api
from tests.unit.console.test_tui import Told

BIN = Path(sys.executable).parent


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Api]:
    answers = api(tmp_path)
    answers.layers = list(watching.layers())
    answers.watched |= {
        "schedule": watching.schedule(), "goodput": watching.goodput(),
        "impact": watching.impact("node-1", "node-2"),
        "bundle": watching.bundle(),
    }  # fmt: skip
    answers.changes[0] = msgspec.structs.replace(answers.changes[0], story=("node:node-1",))
    with serving(tmp_path / "s", answers):
        yield answers


@asynccontextmanager
async def shown(tmp_path: Path, **options: Any) -> AsyncIterator[Console]:
    source = Told()
    app = ConsoleApp(source.open, lambda: build.NOW, Options(client=Client(tmp_path / "s"), **options))
    async with app.run_test(size=(120, 36)) as pilot:
        console = Console(pilot, app, source, Asker())
        await console.tell(*watching.facts())
        yield console


def run(tmp_path: Path, command: str) -> Result:
    program, *words = shlex.split(command)
    assert program == "oobleckctl"
    return CliRunner().invoke(main, ["--socket", str(tmp_path / "s"), *words], catch_exceptions=False)


def asked(daemon: Api) -> list[tuple[str, dict[str, Any]]]:
    """What it was asked to do, and forget it."""
    found, daemon.asked = daemon.asked, []
    return found


ACTS: tuple[tuple[str, ...], ...] = (
    ("2", "d"), ("2", "u"), ("6", "p"), ("6", "c"), ("6", "X"), ("8", "m", "i"), ("8", "m", "down", "m", "i"),
    *(("8", "m", *(("h",) * number), "i") for number in range(1, len(HOWS))),
)  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("keys", ACTS, ids="-".join)
async def test_an_act_and_its_command_ask_for_the_same(
    daemon: Api, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    async with shown(tmp_path) as console:
        await console.press(*keys)
        confirm = console.app.screen
        assert isinstance(confirm, Confirm)
        await console.press("ctrl+y")
        command = console.app.clipboard
        await console.write(confirm.wanted)
        acts = len(confirm.act.names)
        async with asyncio.timeout(WAIT_S):
            while len(daemon.asked) < acts:
                await console.settle()
        by_console = asked(daemon)
        for each in command.split("; "):
            result = run(tmp_path, each)
            assert result.exit_code == 0, result.stderr
        assert asked(daemon) == by_console


@pytest.mark.asyncio
async def test_what_is_paused_goes_on_by_either(daemon: Api, tmp_path: Path) -> None:
    async with shown(tmp_path) as console:
        await console.tell(build.fetched(jobs=(build.job(state="paused"),)))
        await console.press("6", "p", "ctrl+y", "enter")
        async with asyncio.timeout(WAIT_S):
            while not daemon.asked:
                await console.settle()
        by_console = asked(daemon)
        assert run(tmp_path, console.app.clipboard).exit_code == 0
        assert [path for path, _ in by_console] == ["/v1/jobs/job-1/resume"]
        assert asked(daemon) == by_console


@pytest.mark.asyncio
async def test_an_incident_is_written_the_same_by_either(
    daemon: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with shown(tmp_path) as console:
        await console.press("5", "e")
        async with asyncio.timeout(WAIT_S):
            while not (tmp_path / "inc-1.json").exists():
                await console.settle()
    assert run(tmp_path, "oobleckctl export-incident inc-1 -o other.json").exit_code == 0
    assert bundle.read(tmp_path / "inc-1.json") == bundle.read(tmp_path / "other.json") == watching.bundle()


# Keys, and what is copied then.
SHOWN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("1",), "oobleckctl describe job job-1"),
    (("2", "down"), "oobleckctl describe node node-2"),
    (("3",), "oobleckctl describe schedule job-1"),
    (("3", "left"), "oobleckctl describe schedule job-1 --step 15"),
    (("3", "m"), "oobleckctl describe schedule job-1 --modelled"),
    (("4",), "oobleckctl get templates"),
    (("5",), "oobleckctl describe incident inc-1"),
    (("6",), "oobleckctl describe job job-1"),
    (("7",), "oobleckctl story node:node-1"),
    (("8",), "oobleckctl get nodes"),
    (("8", "m", "down", "m"), "oobleckctl what-if --without node-1,node-2"),
)


@pytest.mark.asyncio
@pytest.mark.parametrize(("keys", "command"), SHOWN, ids=[command for _, command in SHOWN])
async def test_what_is_copied_runs(daemon: Api, tmp_path: Path, keys: tuple[str, ...], command: str) -> None:
    async with shown(tmp_path) as console:
        newest = build.change(99, "node", "node-1 is here")
        await console.tell(build.heard(msgspec.structs.replace(newest, story=("node:node-1",))))
        await console.press(*keys, "y")
        assert console.app.clipboard == command
    for words in (command, f"{command} -o json"):
        result = run(tmp_path, words)
        assert result.exit_code == 0, result.stderr
        assert result.stdout


@pytest.mark.asyncio
async def test_without_anything_to_name_the_copied_command_runs_too(daemon: Api, tmp_path: Path) -> None:
    copied = set()
    source = Told()
    app = ConsoleApp(source.open, lambda: build.NOW, Options(client=Client(tmp_path / "s")))
    async with app.run_test(size=(120, 36)) as pilot:
        console = Console(pilot, app, source, Asker())
        for key in "12456":
            await console.press(key, "y")
            copied.add(app.clipboard)
    assert copied == {"oobleckctl status", "oobleckctl get nodes", "oobleckctl get templates",
        "oobleckctl get incidents", "oobleckctl get jobs"}  # fmt: skip
    for command in copied:
        assert run(tmp_path, command).exit_code == 0


async def _copied(tmp_path: Path, *keys: str) -> str:
    async with shown(tmp_path) as console:
        await console.press(*keys, "y")
        return console.app.clipboard


def test_the_stream_that_is_copied_is_a_stream(daemon: Api, tmp_path: Path) -> None:
    command = asyncio.run(_copied(tmp_path, "7", "home"))
    assert command == "oobleckctl events -f"
    words = [str(BIN / "oobleckctl"), "--socket", str(tmp_path / "s"), *shlex.split(command)[1:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as streaming:
        assert streaming.stdout is not None
        assert "node-1 is here" in streaming.stdout.readline()
        streaming.terminate()
