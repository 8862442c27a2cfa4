"""``debug dump``: one file with everything, also where the daemon is dead."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from oobleckd.protocol.changes import Change
from oobleckd.protocol.watch import DebugView
from tests.helpers.api_server import job_view, node_view
from tests.unit.ctl.conftest import Ctl

DEBUG = DebugView(
    "0.1.0", "3.11", 12.0, {"MainThread": ("a frame",)}, {"loop": ("another",)}, {"events": 7}, "/journal", ""
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path / "cluster"))
    logs = tmp_path / "cluster" / "log"
    logs.mkdir(parents=True)
    (logs / "node-1.log").write_text("it said something\n")
    monkeypatch.chdir(tmp_path)


def contents(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


def document(found: dict[str, bytes], name: str) -> Any:
    return json.loads(found[name])


def test_all_that_there_is(ctl: Ctl, tmp_path: Path) -> None:
    ctl.api.jobs, ctl.api.nodes = [job_view()], [node_view("node-1")]
    ctl.api.changes = [Change(number, 100.0, "node", "info", "x", ()) for number in (1, 2)]
    ctl.api.watched["debug"] = DEBUG
    result = ctl("debug", "dump", "--to", "here.tar.gz")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "here.tar.gz\n"
    file = tmp_path / "here.tar.gz"
    assert file.stat().st_mode & 0o777 == 0o600
    found = contents(file)
    assert [node["name"] for node in document(found, "nodes.json")] == ["node-1"]
    assert [json.loads(line)["seq"] for line in found["events.jsonl"].splitlines()] == [1, 2]
    assert document(found, "daemon.json")["tasks"] == {"loop": ["another"]}
    assert {check["name"] for check in document(found, "doctor.json")} >= {"python"}
    assert {item["program"] for item in document(found, "settings.json")} == {"ctl", "daemon"}
    assert "look before you send it" in result.stderr


def test_of_a_dead_daemon_there_is_the_rest(tmp_path: Path, ctl: Ctl) -> None:
    result = ctl("--socket", str(tmp_path / "nobody"), "debug", "dump", "--to", "here.tar.gz")
    assert result.exit_code == 0, result.stderr
    assert "without status.json: no daemon" in result.stderr
    found = contents(tmp_path / "here.tar.gz")
    assert {"about.json", "settings.json", "doctor.json"} <= found.keys()
    assert "status.json" in document(found, "about.json")["missing"]


def test_logs_of_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from oobleckd.ctl.main import main

    monkeypatch.delenv("OOBLECK_SOCKET", raising=False)
    result = CliRunner().invoke(main, ["debug", "dump"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    found = contents(tmp_path / result.stdout.strip())
    assert found["logs/node-1.log"] == b"it said something\n"


def test_no_key_is_in_it(tmp_path: Path, ctl: Ctl) -> None:
    from oobleckd.daemon.keys import make_server_keys

    pair = make_server_keys(tmp_path / "cluster" / "keys")
    ctl("debug", "dump", "--to", "here.tar.gz")
    everything = b"".join(contents(tmp_path / "here.tar.gz").values())
    assert pair.secret not in everything


def test_a_file_that_cannot_be_written(ctl: Ctl) -> None:
    result = ctl("debug", "dump", "--to", "/nowhere/x.tar.gz")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: /nowhere/x.tar.gz: No such file or directory")
