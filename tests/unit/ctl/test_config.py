"""``config show`` and oobleckctl's own settings: which value wins, where it comes from, what a wrong one
says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl.main import main


def ctl(*words: str) -> Result:
    return CliRunner().invoke(main, words, catch_exceptions=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_value_has_its_origin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "oobleck.toml"
    file.write_text('[ctl]\noutput = "table"\n[daemon]\nheartbeat_s = 2\nlease_s = 20\ncurve = false\n')
    monkeypatch.setenv("OOBLECK_LEASE_S", "30")
    lines = ctl("config", "show", "--origin", "--socket", "/x/s").stdout.splitlines()
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in lines}
    assert rows["PROGRAM", "KEY"] == ["VALUE", "ORIGIN"]
    assert rows["ctl", "socket"] == ["/x/s", "--socket"]
    assert rows["ctl", "output"] == ["table", str(file)]
    assert rows["daemon", "heartbeat_s"] == ["2.0", str(file)]
    assert rows["daemon", "lease_s"] == ["30.0", "OOBLECK_LEASE_S"]
    assert rows["daemon", "curve"] == ["false", str(file)]
    assert rows["daemon", "history"] == ["10000", "default"]
    assert "ORIGIN" not in ctl("config", "show").stdout


def test_settings_of_oobleckctl_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "oobleck.toml").write_text('[ctl]\nsocket = "/from/file"\noutput = "json"\n')
    assert "/from/file does not exist" in ctl("status").stderr
    assert ctl("config", "show").stdout.startswith('{"apiVersion"')
    assert ctl("config", "show", "-o", "table").stdout.startswith("PROGRAM")
    monkeypatch.setenv("OOBLECK_SOCKET", "/from/env")
    monkeypatch.setenv("OOBLECK_OUTPUT", "table")
    assert "/from/env does not exist" in ctl("status").stderr
    assert "/from/flag does not exist" in ctl("--socket", "/from/flag", "status").stderr


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ('[ctl]\nsokcet = "x"\n', "unknown key ctl.sokcet", "did you mean 'socket'?"),
        ('[ctl]\noutput = "xml"\n', "output is 'xml', and has to be", "mend this value"),
        ("[daemon]\nheartbeats_s = 1\n", "unknown key daemon.heartbeats_s", "did you mean 'heartbeat_s'?"),
        ("[ctl\n", "is no TOML: line 1", "mend this line"),
    ],
)
def test_what_is_wrong(folder: Path, text: str, problem: str, hint: str) -> None:
    file = folder / "oobleck.toml"
    file.write_text(text)
    result = ctl("config", "show")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {file}: {problem}")
    assert f"hint: {hint}" in result.stderr
