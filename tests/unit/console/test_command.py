"""The command: text once, words instead of tracebacks, exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from console import app
from tests.helpers.api_server import Api, serving, status_view
from tests.unit.console import build
from tests.unit.console.test_feed import api


def run(*words: str) -> Result:
    return CliRunner().invoke(app.main, words, catch_exceptions=False)


def test_once_prints_the_overview_as_plain_text(tmp_path: Path) -> None:
    with serving(tmp_path / "s", api(tmp_path)):
        result = run("--once", "--socket", str(tmp_path / "s"))
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "can still lose 1 of 1 nodes",
        "NODES",
        "s1  node-5/0",
        "reconfigure",
        build.REASON,
        "EVENTS",
    ):
        assert part in result.stdout
    assert "\x1b" not in result.stdout


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
    monkeypatch.setitem(sys.modules, "console.tui", None)
    result = run()
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: Textual cannot be loaded: ")
    assert "Traceback" not in result.stderr


def test_help_and_version() -> None:
    assert "--once" in run("--help").stdout
    assert run("--version").stdout.startswith("oobleck-console")
