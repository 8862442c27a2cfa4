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

from oobleckd.client import Client
from oobleckd.ctl import processes
from oobleckd.ctl.local import DAEMON, Home
from oobleckd.ctl.processes import ClusterProcess
from oobleckd.host import urgency
from oobleckd.host.needs import ClusterSize
from oobleckd.host.starts import failed_starts
from oobleckd.protocol.changes import JobWentBack
from tests.helpers.cluster import tiny_job, with_base
from tests.helpers.family import members
from tests.helpers.nvidia import Machine, needs_cc

OOBLECKCTL = Path(sys.executable).with_name("oobleckctl")
WORKER = Path(sys.executable).with_name("oobleck-worker")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A folder for a cluster, and the command line on it. ``based``: on the tests' base, which has torch
    loaded; else on one of its own.
    """

    home: Home
    based: bool = True

    def ctl(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [OOBLECKCTL, *words], capture_output=True, text=True, check=False, env={**self.environ, **environ}
        )

    @property
    def environ(self) -> dict[str, str]:
        more = with_base() if self.based else {}
        return {**os.environ, **more, "OOBLECK_STATE": str(self.home.state)}


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(Home(tmp_path / "c"), getattr(request, "param", True))
    yield cluster
    cluster.ctl("down", "--grace", "5")


@pytest.mark.parametrize("cluster", [False], indirect=True)
def test_a_cluster_from_up_to_down(cluster: Cluster) -> None:
    up = cluster.ctl("up", "--nodes", "2", "--no-spare")
    assert up.returncode == 0, up.stderr
    assert [line.split()[0] for line in up.stdout.splitlines()] == [DAEMON, "node-1", "node-2"]

    nodes = json.loads(cluster.ctl("get", "nodes", "-o", "json").stdout)["items"]
    assert [(node["name"], node["state"]) for node in nodes] == [("node-1", "standby"), ("node-2", "standby")]
    assert cluster.ctl("up", "--nodes", "2", "--no-spare").returncode == 5

    # What doctor believes that this takes of a machine (two processes of a node: its agent and its device).
    taken = ClusterSize(2, 2, 2, 2)
    family = members(cluster.home.state)
    assert max(num_entries(process, "fd") for process in family) <= taken.files(least=True)
    assert sum(num_entries(process, "task") for process in family) <= taken.tasks()

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


def num_entries(process: ClusterProcess, of: str) -> int:
    return len(list(Path(f"/proc/{process.pid}/{of}").iterdir()))


def is_urgent(thread: int) -> bool:
    return os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR


def test_down_with_a_job_is_no_incident(cluster: Cluster) -> None:
    """What `up` finds is the job, which trains on; nobody had a loss."""
    assert cluster.ctl("up", "--nodes", "2", "--no-spare").returncode == 0
    client = Client(cluster.home.socket)
    job = client.submit(tiny_job("down", train={"steps": 100_000}, fault_tolerance={"f": 0})).id
    assert cluster.ctl("wait", job, "--for", "step=2", "--timeout", "60").returncode == 0
    down = cluster.ctl("down")
    assert "SIGKILL" not in down.stderr
    # Of nodes that a busy machine starts later than that it would be one.
    assert cluster.ctl("up", "--nodes", "2", "--no-spare", OOBLECK_GRACE_S="60").returncode == 0
    assert cluster.ctl("wait", job, "--for", "state=running", "--timeout", "60").returncode == 0
    assert client.incidents() == ()
    (back,) = [c.data for c in client.events(0, follow=False) if isinstance(c.data, JobWentBack)]
    assert back.job == job


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


KILLED = """
import os, signal, sys
from pathlib import Path
if "oobleckd.worker.device.process" in sys.orig_argv:
    Path({folder!r}).mkdir(exist_ok={again})
    print("the stand-in has enough", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def dying(folder: Path, *, again: bool) -> dict[str, str]:
    """An environment in which the first device dies at its start, or each one does."""
    died = str(folder / "died")
    (folder / "sitecustomize.py").write_text(KILLED.format(folder=died, again=again))
    return {"PYTHONPATH": str(folder), "OOBLECK_FORK": "0"}


def test_up_gives_up_when_devices_die_alike(cluster: Cluster, tmp_path: Path) -> None:
    cluster.home.logs.mkdir(parents=True)
    cluster.home.log("node-1").write_text("error: of another day\n")
    up = cluster.ctl("up", "--nodes", "1", "--no-spare", "--timeout", "90", **dying(tmp_path, again=True))
    assert up.returncode == 1
    assert up.stderr.count("signal 9") == up.stderr.count("the stand-in has enough") == 1
    assert "error: node-1/0 cannot start" in up.stderr
    assert "of another day" not in up.stderr
    assert "within 90 s" not in up.stderr
    assert not cluster.home.alive()
    assert not members(cluster.home.state)


def test_a_device_that_dies_once_at_its_start_is_no_reason_to_give_up(
    cluster: Cluster, tmp_path: Path
) -> None:
    up = cluster.ctl("up", "--nodes", "1", "--no-spare", **dying(tmp_path, again=False))
    assert up.returncode == 0, up.stderr
    assert (tmp_path / "died").exists()
    assert failed_starts(cluster.home.run / "node-1") == []


def test_up_without_the_gpus_that_it_is_to_use_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """And says so in one sentence; an agent that is started by itself does the same."""
    no_cuda = Machine(torch="2.13.0+cpu", cuda=None, library=False).environ(tmp_path)
    up = cluster.ctl("up", "--nodes", "2", "--kind", "cuda", **no_cuda)
    assert up.returncode == 2
    assert [line.partition(": ")[0] for line in up.stderr.splitlines()] == ["error", "hint"]
    assert "2.13.0+cpu" in up.stderr
    assert not cluster.home.logs.exists()
    words = [WORKER, "--node", "n", "--kind", "cuda", "--run-dir", str(tmp_path / "n")]
    agent = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**cluster.environ, **no_cuda}
    )
    assert (agent.returncode, agent.stderr) == (2, up.stderr)
    assert not (tmp_path / "n").exists()


@needs_cc
@pytest.mark.parametrize(("machine", "code"), [(Machine(), 2), (Machine(errors="46"), 1)])
def test_an_agent_with_too_few_gpus_or_busy_ones(machine: Machine, code: int, tmp_path: Path) -> None:
    """What may be over when a service tries again is 1."""
    words = [WORKER, "--node", "n", "--kind", "cuda", "--devices", "3", "--run-dir", str(tmp_path / "n")]
    environ = machine.but(gpus=3 if machine.errors else 2).environ(tmp_path)
    agent = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
    assert agent.returncode == code, agent.stderr
    assert agent.stderr.startswith("error: ")


def test_a_limit_of_open_files_that_nothing_can_begin_with(cluster: Cluster) -> None:
    """Each program says so, up before it starts anything; where a few could be short it goes on."""
    daemon = ["oobleckd", "--state-dir", str(cluster.home.state / "d"), "--socket", str(cluster.home.socket)]
    agent = ["oobleck-worker", "--node", "n", "--run-dir", str(cluster.home.state / "r")]
    for words, code in ((daemon, 2), (agent, 2), (["oobleckctl", "up", "--nodes", "2"], 1)):
        done = limited(cluster, 32, *words)
        assert (done.returncode, done.stderr.count("error: ")) == (code, 1), done.stderr
        assert "LimitNOFILE" in done.stderr
    assert not cluster.home.logs.exists()
    assert limited(cluster, 64, "oobleckctl", "up", "--nodes", "1", "--no-spare").returncode == 0


def limited(cluster: Cluster, files: int, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = f'ulimit -n {files}; exec "$@"'
    program = [str(OOBLECKCTL.with_name(name)), *words]
    return subprocess.run(
        ["sh", "-c", command, "sh", *program],
        capture_output=True,
        text=True,
        check=False,
        env=cluster.environ,
    )
