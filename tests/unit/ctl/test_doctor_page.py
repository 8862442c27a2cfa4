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
from oobleckd.ctl import checkup, clustercheck, gpucheck, limitcheck
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.daemon import keys
from oobleckd.host import gpus, needs
from oobleckd.host.needs import ClusterSize
from oobleckd.protocol.api import LostRecords
from oobleckd.protocol.gpus import GpuLook, trouble
from oobleckd.unixhttp import Unreachable
from tests.helpers.api_server import node_view, status_view
from tests.unit.protocol.test_gpus import CASES, WELL

PAGE = Path(__file__).with_name("doctor.txt")
LARGE = ClusterSize(nodes=100, devices=800, nodes_here=1, devices_here=8, kind="cuda", daemon=False)
LOST = LostRecords(1.8e9, "the file was gone", "/s/journal.copy.damaged-1")


def of_a_machine(folder: Path) -> Iterator[CheckupItem]:
    yield checkup.python("3.9.2", ">=3.11")
    yield from checkup.packages(["nobody-wrote-this>=1"])
    for hard in (16, 64, 1024):
        yield limitcheck.open_files(ClusterSize(), hard)
    nobody = folder / "none"
    with patch.object(needs.os, "cpu_count", lambda: 4):
        for limit in (limitcheck.resource.RLIM_INFINITY, 4096, 20):
            yield limitcheck.tasks(ClusterSize(), user=limit, proc=nobody, cgroups=nobody)
    (folder / "mlx5_0").mkdir()
    for limit in (8 << 20, 8 << 30):
        yield from limitcheck.locked_memory(LARGE, limit, folder, nobody)
    (folder / "mlx5_0").rmdir()
    yield checkup.clock(now=1.0, installed_at=2.0, synchronized=True)
    yield checkup.clock(now=3.0, installed_at=2.0, synchronized=False)
    yield checkup.clock(now=3.0, installed_at=2.0, synchronized=True)
    yield checkup.socket_folder(Path("/" + "x" * 107))
    yield limitcheck.shared_memory(LARGE, folder / "none")
    for free in (1 << 40, 5 << 30, 1 << 20):
        with patch.object(checkup.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)):
            yield limitcheck.shared_memory(LARGE, folder)
            yield checkup.disk(folder, "checkpoints")
    mounts = folder / "mountinfo"
    for kind in ("ext4", "nfs4", "fuse.own", "tmpfs", "overlay"):
        mounts.write_text(f"1 0 0:9 / / rw - {kind} a rw\n")
        yield checkup.state_folder(Path("/home/you/oobleck/daemon"), mounts)


def of_gpus() -> Iterator[CheckupItem]:
    yield from gpucheck.check("", gpus.ALL, lambda: GpuLook("2.13.0+cpu"))[1]
    for said in (
        '{"count": 8, "cuda": "13.0", "nccl": [2, 29, 7]}',
        '{"count": 0, "cuda": "", "nccl": []}',
        '{"count": 8, "cuda": "13.0", "nccl": [], "kernels": ["sm_75", "sm_80"]}',
    ):
        with patch.object(gpucheck, "_ASK_TORCH", f"print({said!r})"):
            yield from gpucheck.check("cuda", gpus.ALL, lambda: WELL)[1]
    for code, look in CASES:
        found = trouble(look, 2)
        assert found is not None
        yield CheckupItem("gpu", "fail", found.problem, found.hint, code, found.about)
    yield from gpucheck.check("cuda", 3, lambda: WELL)[1]
    half = msgspec.structs.replace(WELL, gpus=WELL.gpus[:1], visible="0", hidden=2)
    yield from gpucheck.check("cuda", 2, lambda: half)[1]


def of_a_cluster(folder: Path) -> Iterator[CheckupItem]:
    file = folder / "oobleck.toml"
    yield clustercheck.settings({}, [file])[1]
    file.write_text("[daemon]\nheartbeats_s = 1\n")
    yield clustercheck.settings({}, [file])[1]
    for named in (True, False):
        yield from clustercheck.daemon(cast("Client", Nobody()), named=named)[1]
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

    socket_path = Path("/s")

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
        found = [*of_a_machine(folder), *of_gpus(), *of_a_cluster(folder), *of_nodes()]
    lines = []
    for item in dict.fromkeys(found):  # some cases of a kind read alike
        lines.append(f"{item.level} {item.name} [{item.code}] {item.text}")
        lines += [f"    -> {item.hint}"] if item.hint else []
    return "\n".join(lines).replace(name, "/folder").replace(f" {__version__} ", " OURS ") + "\n"


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), f"run `python -m {__name__}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
