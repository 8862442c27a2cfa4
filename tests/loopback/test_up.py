"""``up`` and ``down`` with the real programs: a cluster stands, is used, and leaves no process behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from oobleckd.ctl import processes
from oobleckd.ctl.local import DAEMON, Home
from oobleckd.host import urgency
from tests.helpers.family import members

OOBLECKCTL = Path(sys.executable).with_name("oobleckctl")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A folder for a cluster, and the command line on it."""

    home: Home

    def ctl(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [OOBLECKCTL, *words], capture_output=True, text=True, check=False, env={**self.environ, **environ}
        )

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "OOBLECK_STATE": str(self.home.state)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(Home(tmp_path / "c"))
    yield cluster
    cluster.ctl("down", "--grace", "5")


def test_a_cluster_from_up_to_down(cluster: Cluster) -> None:
    up = cluster.ctl("up", "--nodes", "2", "--no-spare")
    assert up.returncode == 0, up.stderr
    assert [line.split()[0] for line in up.stdout.splitlines()] == [DAEMON, "node-1", "node-2"]

    nodes = json.loads(cluster.ctl("get", "nodes", "-o", "json").stdout)["items"]
    assert [(node["name"], node["state"]) for node in nodes] == [("node-1", "standby"), ("node-2", "standby")]
    assert cluster.ctl("up", "--nodes", "2", "--no-spare").returncode == 5

    # A node that dies by itself is no trouble for anybody, and comes back by its name.
    agent = processes.recall(cluster.home.run)["node-2"]
    before = members(cluster.home.state)
    os.kill(agent.pid, signal.SIGKILL)
    back = cluster.ctl("start-node", "node-2")
    assert back.returncode == 0, back.stderr
    assert processes.recall(cluster.home.run)["node-2"] != agent

    family = before | members(cluster.home.state)
    assert (
        len(family) >= 1 + 2 * 3
    )  # the daemon; an agent and its device for three incarnations of nodes, at least
    down = cluster.ctl("down")
    assert down.returncode == 0, down.stderr
    assert "node-1, node-2, oobleckd" in down.stderr
    assert "SIGKILL" not in down.stderr
    assert not processes.outlive(family, 10.0)
    assert cluster.ctl("get", "nodes").returncode == 4


@pytest.mark.parametrize("wanted", [True, False])
def test_who_is_waited_for_comes_before_who_computes(cluster: Cluster, wanted: bool) -> None:
    """The daemon, agents, and the thread of a device that answers, where the system allows it; training is
    ordinary.
    """
    with ThreadPoolExecutor(1) as other:
        urgent = wanted and other.submit(urgency.hurry).result()
    assert cluster.ctl("up", "--nodes", "1", "--no-spare", OOBLECK_REALTIME=str(int(wanted))).returncode == 0
    (node,) = json.loads(cluster.ctl("get", "nodes", "-o", "json").stdout)["items"]
    found = {name: process.pid for name, process in processes.recall(cluster.home.run).items()}
    assert is_urgent(found[DAEMON]) is is_urgent(found["node-1"]) is urgent
    (device,) = node["pids"]
    assert not is_urgent(device)
    threads = [path.name for path in Path(f"/proc/{device}/task").iterdir()]
    assert [is_urgent(int(thread)) for thread in threads].count(True) == urgent


def is_urgent(thread: int) -> bool:
    return os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR


def test_up_that_is_interrupted_leaves_nothing(cluster: Cluster) -> None:
    with subprocess.Popen(
        [OOBLECKCTL, "up", "--nodes", "2", "--no-spare", "--foreground"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=cluster.environ,
    ) as up:  # fmt: skip
        assert up.stdout
        assert up.stdout.readline().startswith(DAEMON)
        family = members(cluster.home.state)
        up.send_signal(signal.SIGTERM)
        assert up.wait() == 130
    assert not processes.outlive(family, 10.0)
    assert not cluster.home.alive()


def test_up_goes_on_when_the_terminal_and_whoever_reads_are_gone(cluster: Cluster) -> None:
    """The cluster runs, and the exit code says that nobody was told."""
    words = [OOBLECKCTL, "up", "--nodes", "1", "--no-spare"]
    with Path("/dev/full").open("w", encoding="ascii") as full:
        up = subprocess.Popen(words, stdout=full, stderr=full, env=cluster.environ)
    while DAEMON not in processes.recall(cluster.home.run):
        assert up.poll() is None
        select.select([], [], [], 0.02)
    up.send_signal(signal.SIGHUP)
    assert up.wait(120) == 1
    (node,) = json.loads(cluster.ctl("get", "nodes", "-o", "json").stdout)["items"]
    assert node["state"] == "standby"


def test_a_program_that_cannot_start_is_named_with_its_log(cluster: Cluster) -> None:
    cluster.home.run.mkdir(parents=True)
    (cluster.home.state / "daemon").write_text("a file where the daemon wants a folder")
    up = cluster.ctl("up", "--nodes", "1", "--no-spare")
    assert up.returncode == 1
    assert "error: oobleckd ended at its start: " in up.stderr
    assert f"its log: {cluster.home.log(DAEMON)}" in up.stderr
    assert not cluster.home.alive()
