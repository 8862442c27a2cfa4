"""Limits of a machine, measured by what a cluster takes; and that, by the code that takes it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from oobleckd.ctl import limitcheck
from oobleckd.daemon import accepting, halfopen, spares
from oobleckd.host import needs
from oobleckd.host.needs import ClusterSize
from oobleckd.worker.processes import children
from oobleckd.worker.transport import transport

ONE = ClusterSize()
LARGE = ClusterSize(nodes=1000, devices=8000, nodes_here=1, devices_here=8, kind="cuda", daemon=False)


def test_the_numbers_are_those_of_the_code() -> None:
    assert accepting.MAX_EACH == needs.USER_CONNECTIONS
    assert halfopen.RESERVE == needs.RESERVE
    assert spares.NUM_SPARES == needs.SPARE_FILES
    assert children.NUM_TIES + 2 == needs.CHILD_FILES
    assert transport._MAX_STRANGERS == needs.STRANGERS


def test_reach_and_needs_agree() -> None:
    for files in (300, 1024, 65536):
        devices, nodes = needs.devices_for(files, "cpu"), needs.nodes_for(files)
        of_devices = ClusterSize(devices=devices, daemon=False)
        assert of_devices.files() <= files < ClusterSize(devices=devices + 1, daemon=False).files()
        assert ClusterSize(nodes=nodes).files() <= files < ClusterSize(nodes=nodes + 1).files()


@pytest.mark.parametrize(
    ("cluster", "hard", "level"),
    [
        (ONE, 16, "fail"),
        (ONE, 64, "warn"),
        (ONE, 1024, "ok"),
        (ONE, resource.RLIM_INFINITY, "ok"),
        (ClusterSize(nodes=2000, devices=2000), 1024, "fail"),
        (ClusterSize(nodes=200, devices=300, daemon=False), 1024, "ok"),
        (LARGE, 4096, "fail"),
        (LARGE, 65536, "ok"),
    ],
)
def test_open_files(cluster: ClusterSize, hard: int, level: str) -> None:
    found = limitcheck.open_files(cluster, hard)
    assert (found.level, found.code) == (level, "" if level == "ok" else "few-files")


def proc(folder: Path, *others: tuple[int, int], groups: str = "0::/\n", capabilities: int = 0) -> Path:
    """A /proc in which processes of these users have so many threads."""
    status = "Name:\tx\nUid:\t{0}\t{0}\t{0}\t{0}\nThreads:\t{1}\nCapEff:\t{2:016x}\n"
    for pid, (uid, threads) in enumerate(others, 1):
        (folder / str(pid)).mkdir(parents=True)
        (folder / str(pid) / "status").write_text(status.format(uid, threads, capabilities))
    (folder / "self").mkdir(parents=True)
    (folder / "self/status").write_text(status.format(os.getuid(), 1, capabilities))
    (folder / "self/cgroup").write_text(groups)
    (folder / "self/uid_map").write_text("         0          0 4294967295\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "level"), [(resource.RLIM_INFINITY, "ok"), (4096, "ok"), (120, "fail"), (90, "fail")]
)
def test_tasks_of_this_user(limit: int, level: str, tmp_path: Path) -> None:
    here = proc(tmp_path, (os.getuid(), 60), (os.getuid() + 1, 5000), (os.getuid(), 40))
    found = limitcheck.tasks(ONE, user=limit, proc=here, cgroups=tmp_path / "none")
    assert (found.level, found.code) == (level, "" if level == "ok" else "few-tasks")


def test_the_kernel_holds_root_to_no_number_of_tasks(tmp_path: Path) -> None:
    here = proc(tmp_path, (os.getuid(), 60), capabilities=1 << 24)
    assert limitcheck.tasks(ONE, user=10, proc=here, cgroups=tmp_path / "none").level == "ok"
    (here / "self/uid_map").write_text("         0       1000          1\n")  # root of a rootless container
    assert limitcheck.tasks(ONE, user=10, proc=here, cgroups=tmp_path / "none").level == "fail"


@pytest.mark.parametrize("groups", ["0::/pod/box\n", "12:cpu:/x\n5:pids:/pod/box\n0::/\n"])
@pytest.mark.parametrize(
    ("of_pod", "of_box", "running", "level"),
    [
        ("max", "max", False, "ok"),
        ("5000", "max", False, "ok"),
        ("100", "max", False, "fail"),
        ("max", "100", False, "fail"),
        ("max", "100", True, "ok"),
        ("max", "90", True, "fail"),
    ],
)
def test_tasks_of_control_groups(
    groups: str, of_pod: str, of_box: str, running: bool, level: str, tmp_path: Path
) -> None:
    """Those above count, too."""
    here = proc(tmp_path / "proc", groups=groups)
    top = tmp_path / "cgroup" / ("pids" if "pids" in groups else "")
    for folder, limit in ((top / "pod", of_pod), (top / "pod/box", of_box)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pids.max").write_text(f"{limit}\n")
        (folder / "pids.current").write_text("90\n")
    found = limitcheck.tasks(
        ONE, running=running, user=resource.RLIM_INFINITY, proc=here, cgroups=tmp_path / "cgroup"
    )
    assert (found.level, found.code) == (level, "" if level == "ok" else "few-tasks")


@pytest.mark.parametrize(
    ("cluster", "free", "level"),
    [
        (ONE, 1000, "ok"),
        (ClusterSize(devices=8, devices_here=8, kind="cuda"), 64 << 20, "fail"),  # docker's default
        (ClusterSize(devices=8, devices_here=8, kind="cuda"), 1 << 30, "ok"),
        (ClusterSize(devices=8, devices_here=1, kind="cuda"), 64 << 20, "ok"),
    ],
)
def test_shared_memory(
    cluster: ClusterSize, free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limitcheck.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = limitcheck.shared_memory(cluster, tmp_path)
    assert (found.level, found.code) == (level, "" if level == "ok" else "little-room")
    without = limitcheck.shared_memory(cluster, tmp_path / "none")
    assert (without.level, without.code) == (
        ("fail", "not-writable") if cluster.shared_bytes() else ("ok", "")
    )


def test_locked_memory_matters_where_gpus_talk_through_cards(tmp_path: Path) -> None:
    here, cards = proc(tmp_path / "proc"), tmp_path / "infiniband"
    assert limitcheck.locked_memory(LARGE, 8 << 20, cards, here) == []
    (cards / "mlx5_0").mkdir(parents=True)
    assert limitcheck.locked_memory(ONE, 8 << 20, cards, here) == []
    (little,) = limitcheck.locked_memory(LARGE, 8 << 20, cards, here)
    assert (little.level, little.code, little.about) == ("fail", "little-locked", ("mlx5_0",))
    (enough,) = limitcheck.locked_memory(LARGE, resource.RLIM_INFINITY, cards, here)
    assert enough.level == "ok"
    alone = ClusterSize(kind="cuda")
    assert [found.level for found in limitcheck.locked_memory(alone, 8 << 20, cards, here)] == ["warn"]
