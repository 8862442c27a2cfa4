"""The sentences of ``doctor``: what it says in situations made for each of its checks, word for word.

``python -m tests.unit.ctl.test_doctor_page`` writes the page anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec

from oobleckd import __version__
from oobleckd.client import Client
from oobleckd.ctl import checkup, clustercheck
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.daemon import keys
from oobleckd.protocol.api import LostRecords
from oobleckd.unixhttp import Unreachable
from tests.helpers.api_server import node_view, status_view

PAGE = Path(__file__).with_name("doctor.txt")
LOST = LostRecords(1.8e9, "the file was gone", "/s/journal.copy.damaged-1")


def of_a_machine(folder: Path) -> Iterator[CheckupItem]:
    yield checkup.python("3.9.2", ">=3.11")
    yield from checkup.packages(["nobody-wrote-this>=1"])
    yield checkup.open_files(1024)
    yield checkup.clock(now=1.0, installed_at=2.0, synchronized=True)
    yield checkup.clock(now=3.0, installed_at=2.0, synchronized=False)
    yield checkup.clock(now=3.0, installed_at=2.0, synchronized=True)
    yield checkup.socket_folder(Path("/" + "x" * 107))
    yield checkup.shared_memory(folder / "none")
    for free in (1 << 40, 5 << 30, 1 << 20):
        with patch.object(checkup.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)):
            yield checkup.shared_memory(folder)
            yield checkup.disk(folder, "checkpoints")
    driver = folder / "version"
    yield checkup.gpus(driver)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\n")
    for said in ('{"count": 8, "cuda": "13.0", "nccl": [2, 29, 7]}', '{"count": 0, "cuda": "", "nccl": []}'):
        with patch.object(checkup, "_ASK_TORCH", f"print({said!r})"):
            yield checkup.gpus(driver)


def of_a_cluster(folder: Path) -> Iterator[CheckupItem]:
    file = folder / "oobleck.toml"
    yield clustercheck.settings({}, [file])[1]
    file.write_text("[daemon]\nheartbeats_s = 1\n")
    yield clustercheck.settings({}, [file])[1]
    yield from clustercheck.daemon(cast("Client", Nobody()))[1]
    yield from clustercheck.daemon(cast("Client", Old()))[1]
    yield clustercheck.key_folder(folder)
    keys.make_server_keys(folder)
    yield clustercheck.key_folder(folder)
    keys.make_node_keys(folder, "n1")
    yield clustercheck.key_folder(folder)
    secret = keys.node_secret_path(folder, "n1")
    secret.chmod(0o640)
    yield clustercheck.key_folder(folder)
    secret.chmod(0o600)
    keys.server_public_path(folder).write_bytes(keys.authorized_path(folder, "n1").read_bytes())
    yield clustercheck.key_folder(folder)


def of_nodes() -> Iterator[CheckupItem]:
    lost = node_view("node-2", state="lost", reason="signal 9", host="h2")
    drained, joining = node_view("node-3", state="drained"), node_view("node-4", state="joining")
    yield from clustercheck.nodes([node_view("node-1"), lost, drained, joining])
    yield from clustercheck.nodes([])
    yield from clustercheck.exactness([])
    yield from clustercheck.exactness([node_view("node-1")])
    yield from clustercheck.exactness([node_view("node-1", kinds=("cuda",)), node_view("node-2")])
    usual = {"device": "NVIDIA H200", "transformers": "5.23.0", "driver": "580.65"}
    alike = [node_view(f"node-{index}", traits=(usual,)) for index in (1, 2)]
    odd = node_view("node-0", traits=(usual | {"transformers": "5.24.1"},))
    yield from clustercheck.exactness([*alike, odd])


class Nobody:
    """No daemon answers."""

    def status(self) -> Any:
        raise Unreachable("no daemon: /s does not exist", "`oobleckctl up` starts one")


class Old:
    """A daemon of another version, which cannot write and has lost records."""

    def status(self) -> Any:
        return msgspec.structs.replace(
            status_view(Path()), version="0.0.9", apiVersion="v0", lost_records=(LOST,)
        )

    def healthy(self) -> bool:
        return False


def page() -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [*of_a_machine(folder), *of_a_cluster(folder), *of_nodes()]
    lines = []
    for item in found:
        lines.append(f"{item.level} {item.name} [{item.code}] {item.text}")
        lines += [f"    -> {item.hint}"] if item.hint else []
    return "\n".join(lines).replace(name, "/folder").replace(f" {__version__} ", " OURS ") + "\n"


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), f"run `python -m {__name__}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
