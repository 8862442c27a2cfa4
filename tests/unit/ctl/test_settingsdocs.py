"""The reference of settings is the programs'."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from oobleckd.ctl.options import CtlConfig
from oobleckd.ctl.settingsdocs import RELOADED, page
from oobleckd.daemon import service as daemon_service
from oobleckd.daemon.config import Config
from oobleckd.daemon.service import open_service
from oobleckd.protocol.sinks import EventRule
from oobleckd.worker.agent import main as agent
from oobleckd.worker.tools import docs

ROOT = Path(__file__).resolve().parents[3]


def tables() -> dict[str, list[list[str]]]:
    """Cells of the page's tables, by the table of the settings files."""
    found = {}
    for name in ("ctl", "daemon", "worker"):
        text = page(docs.rows()).partition(f"\n## `[{name}]`\n")[2].partition("\n## ")[0]
        rows = [line.strip("| ") for line in text.splitlines() if line.startswith("| `")]
        found[name] = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    return found


def test_settings_are_up_to_date() -> None:
    written = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert written == page(docs.rows()), "run `make docs`"


def test_every_key_is_on_the_page_with_a_meaning() -> None:
    found = {name: [row[0].strip("`") for row in rows] for name, rows in tables().items()}
    assert found == {
        "ctl": list(CtlConfig.__struct_fields__),
        "daemon": list(Config.__struct_fields__),
        "worker": [parameter.name for parameter in agent.main.params],
    }
    assert all(len(row) == 6 and row[-1] for rows in tables().values() for row in rows)


def test_the_example_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes its table."""
    from oobleckd.ctl.main import main as ctl

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = page(docs.rows()).partition("```toml\n")[2].partition("```")[0]
    Path("oobleck.toml").write_text(text, encoding="utf-8")
    shown = CliRunner().invoke(ctl, ["config", "show"], catch_exceptions=False)
    values = {
        (each["program"], each["key"]): each["value"] for each in msgspec.json.decode(shown.stdout)["items"]
    }
    parsed = tomllib.loads(text)
    assert values["daemon", "endpoint"] == parsed["daemon"]["endpoint"]
    assert parsed["worker"].keys() <= {parameter.name for parameter in agent.main.params}


@pytest.mark.asyncio
async def test_a_reload_takes_over_what_the_page_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # and the root's level is what it was after the test
    config = Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    service = open_service(config)
    try:
        for name in Config.__struct_fields__:
            caplog.clear()
            service.reload(
                msgspec.structs.replace(config, **{name: other(name, getattr(config, name), tmp_path)})
            )
            said = [record.args for record in caplog.records if record.name == daemon_service.__name__]
            assert said == ([] if name in RELOADED else [(name,)]), name
    finally:
        await service.close()


def other(name: str, value: Any, folder: Path) -> Any:
    """A value that the setting does not have yet."""
    if name == "log_level":
        return "warning"
    if name == "on_event":
        return (EventRule(events=("job-done",), command=("true",)),)
    if isinstance(value, tuple):
        return value[1:]
    if isinstance(value, bool):
        return not value
    return str(folder / "other") if isinstance(value, str) else value + 1
