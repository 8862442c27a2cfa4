"""The command: text once, words instead of tracebacks, exit codes."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oobleckd.console import app, bundle, themes
from tests.helpers.api_server import Api, serving, status_view
from tests.unit.console import build, watching
from tests.unit.console.test_feed import api
from tests.unit.test_imports import loaded_by


def run(*words: str) -> Result:
    return CliRunner().invoke(app.main, words, catch_exceptions=False)


def test_once_prints_the_overview_as_plain_text(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        result = run("--once", "--socket", str(tmp_path / "s"))
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "can still lose 1 of 1 node",
        "NODES",
        "s1  node-5/0",
        "reconfigure",
        build.REASON,
        "EVENTS",
    ):
        assert part in result.stdout
    assert "\x1b" not in result.stdout


def test_once_in_ascii_is_ascii_and_needs_no_textual(tmp_path: Path) -> None:
    words = ("--once", "--socket", str(tmp_path / "s"))
    with serving(tmp_path / "s", api(tmp_path)):
        signs, letters = run(*words).stdout, run(*words, "--ascii").stdout
    assert not signs.isascii()
    assert letters.isascii()
    assert "* live" in letters
    assert loaded_by("oobleckd.console.letters").isdisjoint({"textual", "rich"})


def test_once_with_nothing_there_yet(tmp_path: Path) -> None:
    with serving(tmp_path / "s", Api(status_view(tmp_path))):
        result = run("--once", "--socket", str(tmp_path / "s"))
    assert result.exit_code == 0
    assert "no job" in result.stdout


def test_once_without_a_daemon_is_exit_code_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_SOCKET", str(tmp_path / "none"))
    result = run("--once")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith(f"error: no daemon: {tmp_path}/none does not exist\nhint: ")


def test_the_socket_is_looked_for_where_oobleckctl_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path))
    assert f"{tmp_path}/run/oobleckd.sock" in run("--once").stderr


def test_no_terminal_is_said_in_one_line(tmp_path: Path) -> None:
    result = run("--socket", str(tmp_path / "s"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the console needs a terminal")


def test_no_textual_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "on_terminal", lambda: True)
    monkeypatch.setitem(sys.modules, "oobleckd.console.start", None)
    result = run()
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: Textual cannot be loaded: ")
    assert "Traceback" not in result.stderr


def test_the_console_hears_which_socket_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from oobleckd.console import start

    told: list[dict[str, object]] = []

    def ran(*_words: object, **more: object) -> int:
        told.append(more)
        return 0

    monkeypatch.setattr(app, "on_terminal", lambda: True)
    monkeypatch.setattr(start, "run", ran)
    monkeypatch.setenv("OOBLECK_SOCKET", "/from/the/environment")
    assert run().exit_code == run("--socket", "a b").exit_code == 0
    assert [more["socket"] for more in told] == ["", "a b"]


def test_help_and_version() -> None:
    assert "--once" in run("--help").stdout
    assert run("--version").stdout.startswith("oobleck-console")


def test_a_bundle_as_text(tmp_path: Path) -> None:
    path = tmp_path / "inc-2.json"
    bundle.write(path, watching.bundle())
    result = run("--once", "--bundle", str(path), "--socket", str(tmp_path / "none"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "◀ PAST" in result.stdout
    assert "inc-2 node-5 (node-4: signal 9) total 2,000 ms" in result.stdout


def test_a_time_of_day_in_a_bundle_is_one_of_its_incident_s_day(tmp_path: Path) -> None:
    path, made = tmp_path / "inc-2.json", watching.bundle()
    bundle.write(path, made)
    told = datetime.fromtimestamp(made.incident.at).astimezone().strftime("%H:%M:%S")
    shown = [run("--once", "--bundle", str(path), "--at", at).stdout for at in (told, "+0s", "now")]
    assert shown[0].startswith("◀ PAST")
    assert told in shown[0].splitlines()[0]
    assert shown[0] == shown[1] != shown[2]


def test_a_bundle_that_cannot_be_shown_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes(b'{"version": 1, "made_by"')
    for words in (("--once", "--bundle", str(path)), ("--bundle", str(path))):
        monkeypatch.setattr(app, "on_terminal", lambda: True)
        result = run(*words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: {path} is cut off: ")
        assert "hint: export it anew" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_time_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    result = run("--at", "yesterday", "--socket", str(tmp_path / "s"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: 'yesterday' is no time: say 12:04")


def test_the_past_of_a_daemon_that_keeps_none(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        result = run("--once", "--at", "-5m", "--socket", str(tmp_path / "s"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing is at /v1/past" in result.stderr


def test_no_server_for_browsers_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "oobleckd.console.web", raising=False)
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    result = run("--web")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: --web cannot be served: ")
    assert result.stderr.endswith("\nhint: pip install 'oobleckd[web]'\n")


def test_a_browser_gets_the_same_console_but_may_not_act(monkeypatch: pytest.MonkeyPatch) -> None:
    from oobleckd.console import web

    made: list[web.ConsoleServer] = []

    def serve(server: web.ConsoleServer) -> None:
        made.append(server)

    monkeypatch.setattr(web.ConsoleServer, "serve", serve)
    words = (
        "--socket",
        "a b",
        "--at",
        "-5m",
        "--theme",
        "light",
        "--rate",
        "2",
        "--ascii",
        "--web-port",
        "8123",
    )
    result = run("--web", *words)
    assert (result.exit_code, result.stderr) == (0, "")
    (server,) = made
    assert (server.host, server.port) == ("localhost", 8123)
    program, *rest = shlex.split(server.command)
    assert (program, rest[:4]) == (sys.executable, ["-P", "-m", "oobleckd.console.app", "--read-only"])
    assert rest[4:] == ["--socket=a b", "--at=-5m", "--theme=light", "--rate=2.0", "--ascii"]


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    command = [sys.executable, "-m", "oobleckd.console.app", "--web", "--web-port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run([*command, port], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "cannot be used: " in result.stderr
    assert result.stderr.endswith("\nhint: choose another: --web-port PORT\n")
    assert "Traceback" not in result.stderr


def test_a_driver_of_textual_stands_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not app.on_terminal()
    monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")
    assert app.on_terminal()


def test_the_options_name_the_themes_there_are() -> None:
    assert app.THEMES == themes.THEMES
