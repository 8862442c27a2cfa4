"""``doctor``: each check on a machine made for it, and the verb as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from oobleckd.ctl import checkup, clustercheck
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.ctl.main import main
from oobleckd.daemon import keys
from oobleckd.protocol.api import LostRecords, Problem
from tests.helpers.api_server import node_view
from tests.unit.ctl.conftest import Ctl


def levels(checks: Sequence[CheckupItem]) -> list[str]:
    return [check.level for check in checks]


# --------------------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cpu", ">=2.11,<3", True),
        ("2.13.0", "<3,>=2.14", False),
        ("3.0", ">=2.11,<3", False),
        ("8.2.8", "==8.2.8", True),
        ("1", "", True),
    ],
)
def test_ranges(version: str, wanted: str, expected: bool) -> None:
    assert checkup.within(version, wanted) is expected


def test_versions() -> None:
    assert checkup.python().level == "ok"
    old = checkup.python("3.9.2", ">=3.11")
    assert (old.level, old.code, old.about) == ("fail", "wrong-version", ("3.9.2",))
    assert levels(checkup.packages()) == ["ok"]
    missing, wrong = checkup.packages(["nobody-wrote-this>=1", "click (<1)", "msgspec>=0.1"])
    assert (missing.code, missing.about) == ("missing-package", ("nobody-wrote-this",))
    assert missing.hint == "pip install 'nobody-wrote-this>=1'"
    assert (wrong.code, wrong.about) == ("wrong-version", ("click",))


def test_the_compiler() -> None:
    found = checkup.compiler(lambda: "", lambda: "g++ 12.2.0")
    assert (found.level, found.code) == ("ok", "")
    found = checkup.compiler(lambda: "there is no C++ compiler (g++)", lambda: "")
    assert (found.level, found.code) == ("ok", "no-compiler")


def test_limits() -> None:
    assert checkup.clock(now=1.0, installed_at=2.0, synchronized=True).level == "fail"
    assert checkup.clock(now=3.0, installed_at=2.0, synchronized=False).level == "warn"
    assert checkup.clock(now=3.0, installed_at=2.0, synchronized=True).level == "ok"
    assert checkup.clock().name == "clock"
    assert checkup.socket_folder(Path("/" + "x" * 200)).level == "fail"


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(num_bytes: int) -> None:
        monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))

    free(1 << 40)
    assert checkup.disk(tmp_path / "not" / "there" / "yet", "checkpoints").level == "ok"
    free(5 << 30)
    assert checkup.disk(tmp_path, "checkpoints").level == "warn"
    free(1 << 20)
    assert checkup.disk(tmp_path, "checkpoints").level == "fail"


@pytest.mark.parametrize(
    ("kind", "level", "code"),
    [
        ("ext4", "ok", ""),
        ("lustre", "ok", ""),
        ("nfs4", "fail", "network-file-system"),
        ("cifs", "fail", "network-file-system"),
        ("fuse.sshfs", "fail", "network-file-system"),
        ("fuse.something", "warn", "unknown-file-system"),
        ("tmpfs", "warn", "memory-file-system"),
        ("overlay", "warn", "container-file-system"),
    ],
)
def test_what_the_state_folder_lies_on(kind: str, level: str, code: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /home rw - {kind} a:/home rw\n")
    found = checkup.state_folder(Path("/home/you/oobleck"), mounts)
    assert (found.level, found.code) == (level, code)
    assert found.about == (("/home/you/oobleck", kind) if code else ())


# --------------------------------------------------------------------------- the cluster


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "oobleck.toml"
    assert clustercheck.settings({}, [file])[1].level == "ok"
    file.write_text("[daemon]\nheartbeats_s = 1\n")
    config, check = clustercheck.settings({}, [file])
    assert (config, check.level, check.hint) == (None, "fail", "did you mean 'heartbeat_s'?")


def test_keys(tmp_path: Path) -> None:
    assert clustercheck.key_folder(tmp_path).level == "warn"
    keys.make_server_keys(tmp_path)
    assert clustercheck.key_folder(tmp_path).code == "no-node-keys"
    keys.make_node_keys(tmp_path, "n1")
    assert clustercheck.key_folder(tmp_path).about == ("n1",)
    secret = keys.node_secret_path(tmp_path, "n1")
    secret.chmod(0o640)
    opened = clustercheck.key_folder(tmp_path)
    assert (opened.code, opened.about, opened.hint) == ("keys-open", (str(secret),), f"chmod 600 {secret}")
    secret.chmod(0o600)
    keys.server_public_path(tmp_path).write_bytes(keys.authorized_path(tmp_path, "n1").read_bytes())
    assert clustercheck.key_folder(tmp_path).code == "keys-unlike"
    secret.write_text("x")
    assert clustercheck.key_folder(tmp_path).code == "keys-invalid"


def test_lost_records(ctl: Ctl) -> None:
    lost = LostRecords(1.8e9, "the file was gone", "/s/journal.copy.damaged-1")
    ctl.api.status = msgspec.structs.replace(ctl.api.status, lost_records=(lost,))
    said = ctl("status").stdout
    assert "records lost" in said
    assert "2027-01-15 08:00Z: the file was gone (/s/journal.copy.damaged-1 is what was left)" in said
    found = [check for check in ctl.json("doctor")["checks"] if check["code"] == "records-lost"]
    assert [check["about"] for check in found] == [["/s/journal.copy.damaged-1"]]


def test_nodes() -> None:
    found = [
        node_view("node-1"),
        node_view("node-2", state="lost", reason="signal 9", host="h2"),
        node_view("node-3", state="drained"),
        node_view("node-4", state="joining"),
    ]
    usable, lost, drained, joining = clustercheck.nodes(found)
    assert (usable.level, usable.about) == ("ok", ("node-1",))
    assert (lost.code, lost.about) == ("not-usable", ("node-2",))
    assert "oobleckctl forget-node node-2" in lost.hint
    assert "undrain node-3" in drained.hint
    assert "oobleckctl" not in joining.hint
    assert [check.code for check in clustercheck.nodes([])] == ["none-usable"]


def test_exactness() -> None:
    def found(**of_the_first: Any) -> list[CheckupItem]:
        return clustercheck.exactness([node_view("node-1", **of_the_first), node_view("far")])

    assert levels(found()) == ["ok"]
    assert found(kinds=("cuda",))[0].about == ("cpu", "cuda")
    (threads,) = found(bits=("cpu, torch 2.13.0, 4 threads",))
    assert threads.level == "warn"
    assert (threads.code, threads.about) == ("unlike-kinds", ("cpu", "cpu, torch 2.13.0, 4 threads"))
    assert "OMP_NUM_THREADS" in threads.hint
    assert levels(found(state="lost", kinds=("cuda",))) == ["ok"]


def test_exactness_names_who_differs_and_in_what() -> None:
    usual = {"device": "NVIDIA H200", "transformers": "5.23.0", "driver": "580.65"}
    nodes = [node_view(f"node-{index}", traits=(usual,)) for index in range(1, 4)]
    assert levels(clustercheck.exactness(nodes)) == ["ok"]
    nodes.append(node_view("node-0", traits=(usual | {"transformers": "5.24.1"},)))
    (check,) = clustercheck.exactness(nodes)
    assert check.level == "warn"
    assert (check.code, check.about) == ("unlike-devices", ("node-0/0",))
    assert "5.24.1" in check.text


def test_the_verb(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OOBLECK_KEYS_DIR", str(tmp_path / "keys"))
    ctl.api.nodes = [node_view("node-1"), node_view("node-2", state="lost", reason="signal 9")]
    found = ctl.json("doctor")
    assert found["kind"] == "Checkup"
    assert found["failed"] == 0
    of_nodes = [
        (check["level"], check["code"], check["about"])
        for check in found["checks"]
        if check["name"] == "nodes"
    ]
    assert of_nodes == [("ok", "", ["node-1"]), ("warn", "not-usable", ["node-2"])]
    text = ctl("doctor")
    assert text.exit_code == 0
    for check in found["checks"]:
        assert check["text"] in text.stdout
        assert (f"-> {check['hint']}\n" in text.stdout) == (check["hint"] != "" and check["level"] != "ok")


def test_what_fails_is_exit_code_1(ctl: Ctl) -> None:
    ctl.api.problem = Problem("no", 503, "the journal cannot be written", "make room")
    result = ctl("doctor")
    assert result.exit_code == 1
    assert "fail  daemon" in result.stdout
    assert "-> make room" in result.stdout
    nobody = ctl("doctor", "--socket", "/nowhere/s", "-o", "json")
    assert nobody.exit_code == 1
    assert "no-answer" in [check["code"] for check in json.loads(nobody.stdout)["checks"]]


def test_a_machine_without_a_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may be one that only trains: all else is looked at, and nothing has failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OOBLECK_SOCKET", raising=False)
    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path / "s"))
    done = CliRunner().invoke(main, ["doctor", "--kind", "cpu", "-o", "json"])
    found = {check["name"]: check["code"] for check in json.loads(done.stdout)["checks"]}
    assert found["daemon"] == "no-daemon"
    assert {"open files", "tasks", "shared memory", "state folder"} <= found.keys()
    assert "gpu" not in found
    assert done.exit_code == 0


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, oobleckd.ctl.doctor; print([m for m in ('torch', 'zmq', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
