"""Data that a node prepares: the agent with the program that does it, and a daemon, all of which are killed
meanwhile. (tests/sim/test_preparing.py has what the daemon decides.)
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from oobleckd.protocol.datamessages import (
    PrepareData,
    PrepareDone,
    PrepareFailed,
    Preparing,
    StopPreparing,
)
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView
from oobleckd.tokens.manifest import TOKENS, checksums, read_manifest
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.corpora import DOCUMENTS, make_tokenizer
from tests.helpers.daemons import daemon as daemon_on
from tests.helpers.stub_daemon import TIMEOUT_S, StubDaemon

T = TypeVar("T")
REPEATS = 6
FLAGS = ("--no-curve", "--lease-s", "2", "--grace-s", "1")
slow = pytest.mark.slow
PROGRAM = b"oobleckd.prepare.program"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A second of work."""
    make_tokenizer(tmp_path / "tokenizer")
    lines = "".join(
        json.dumps({"text": f"{text} {n}" * 40}) + "\n" for n, text in enumerate(DOCUMENTS * REPEATS)
    )
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text(lines)
    data = {"source": "jsonl", "path": f"{tmp_path}/*.jsonl", "tokenizer": str(tmp_path / "tokenizer")}
    config = {
        "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 300, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    return tiny_job(
        "prepared",
        data=data,
        model={"config": config},
        train={"steps": 4, "global_batch": 4},
        fault_tolerance={"f": 0},
        resources={"device_memory": 0},
    )


@pytest.fixture
def daemon() -> Iterator[StubDaemon]:
    stub = StubDaemon()
    yield stub
    stub.close()


@pytest.fixture
def agent(daemon: StubDaemon, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start_agent(daemon.endpoint, "n1", tmp_path / "run")
    assert daemon.ready().prepares
    yield process
    process.kill()
    process.wait()


def until(found: Callable[[], T]) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    while not (seen := found()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return seen


def programs(*agents: int) -> list[int]:
    """What prepares data for these agents."""
    children = [
        int(pid)
        for agent in agents
        if (path := Path(f"/proc/{agent}/task/{agent}/children")).exists()
        for pid in path.read_text().split()
    ]
    return [pid for pid in children if PROGRAM in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def last_word(daemon: StubDaemon) -> PrepareDone | PrepareFailed:
    """What comes of it, after how far it is."""
    while True:
        said = daemon.hear()
        if isinstance(said, PrepareDone | PrepareFailed):
            return said


def check_folder(folder: Path) -> None:
    """All is in it, and nothing is left beside it."""
    assert read_manifest(folder).documents == 3 * REPEATS * len(DOCUMENTS)
    assert read_manifest(folder).bin_sha256 == checksums(folder / TOKENS)[0]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def has_begun(job: Job) -> bool:
    cache = Path(job.data.path).parent / "prepared"
    return any(cache.glob(".*.building/*.part"))


def test_an_agent_has_a_process_prepare_data_and_says_how_far_it_is(
    daemon: StubDaemon, agent: subprocess.Popen[bytes], job: Job
) -> None:
    daemon.tell(PrepareData("job-1", job, "a"))
    assert daemon.expect(Preparing) == Preparing("job-1", "a")
    (pid,) = until(lambda: programs(agent.pid))
    assert os.sched_getscheduler(pid) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, pid) in {0, os.getpriority(os.PRIO_PROCESS, 0)}
    far = daemon.expect(Preparing)
    assert (far.phase, far.total_bytes) == ("read", sum(file.stat().st_size for file in job_files(job)))
    done = last_word(daemon)
    assert isinstance(done, PrepareDone)
    check_folder(Path(*done.folders))
    daemon.tell(PrepareData("job-1", job, "b"))  # as a daemon does that was started since
    assert daemon.expect(PrepareDone) == msgspec.structs.replace(done, order="b")
    assert "numpy" not in Path(f"/proc/{agent.pid}/maps").read_text(encoding="utf-8")


def job_files(job: Job) -> list[Path]:
    return sorted(Path(job.data.path).parent.glob("*.jsonl"))


@slow
def test_it_says_that_its_process_was_killed_and_goes_on_when_it_is_told(
    daemon: StubDaemon, agent: subprocess.Popen[bytes], job: Job
) -> None:
    daemon.tell(PrepareData("job-1", job, "a"))
    until(lambda: has_begun(job))
    (pid,) = programs(agent.pid)
    os.kill(pid, signal.SIGKILL)
    said = last_word(daemon)
    assert isinstance(said, PrepareFailed)
    assert (said.died, said.order) == (True, "a")
    daemon.tell(PrepareData("job-1", job, "b"))
    done = last_word(daemon)
    assert isinstance(done, PrepareDone)
    check_folder(Path(*done.folders))


@pytest.mark.parametrize(
    "how", ["stop", *(pytest.param(how, marks=slow) for how in ("other", "kill", "leave"))]
)
def test_its_process_ends_when_nobody_wants_it_any_more(
    daemon: StubDaemon, agent: subprocess.Popen[bytes], job: Job, how: str
) -> None:
    daemon.tell(PrepareData("job-1", job, "a"))
    until(lambda: has_begun(job))
    (pid,) = programs(agent.pid)
    pidfd = os.pidfd_open(pid)
    match how:
        case "stop":
            daemon.tell(StopPreparing("job-1"))
        case "other":
            daemon.tell(PrepareData("job-2", job, "b"))
        case "kill":
            agent.kill()
        case "leave":
            agent.terminate()
    assert select.select([pidfd], [], [], TIMEOUT_S)[0]
    os.close(pidfd)


# ---------------------------------------------------------------------- with a daemon


def start_agent(endpoint: str, name: str, folder: Path) -> subprocess.Popen[bytes]:
    """The real one, with a stand-in for its device."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.helpers.standin_agent",
            f"--node={name}",
            f"--daemon={endpoint}",
            "--devices=1",
            "--no-spare",
            f"--run-dir={folder}",
        ]
    )


def test_process_agent_and_daemon_are_killed_and_another_node_goes_on(job: Job, tmp_path: Path) -> None:
    agents: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with daemon_on(tmp_path, *FLAGS) as first:
            for name in ("n1", "n2"):
                agents[name] = start_agent(first.endpoint, name, tmp_path / name)
            until(lambda: sum(node.state == "standby" for node in first.client.nodes()) == 2)
            job_id = first.client.submit(job).id
            until(lambda: has_begun(job))
            assert until(lambda: first.client.job(job_id).preparing).node == "n1"
            (pid,) = programs(agents["n1"].pid)
            os.kill(pid, signal.SIGKILL)
            until(lambda: programs(agents["n2"].pid))
            agents["n2"].kill()
            until(lambda: programs(agents["n1"].pid))
            first.stop(signal.SIGKILL)
        with daemon_on(tmp_path, *FLAGS, "--endpoint", first.endpoint) as second:
            view = until(lambda: prepared(second.client.job(job_id)))
            check_folder(Path(view.spec.data.prepared))
            assert view.state == "profiling"
            assert (second.client.job(job_id).preparing, view.reason) == (None, "")
            until(lambda: not programs(agents["n1"].pid))
            second.client.control(job_id, "cancel")
    finally:
        for process in agents.values():
            process.kill()
            process.wait()


def prepared(view: JobView) -> JobView | None:
    return view if view.state != "preparing" else None


@slow
def test_what_a_node_has_prepared_all_train_on(job: Job, tmp_path: Path) -> None:
    """Also a second job, which finds it."""
    with Cluster(tmp_path / "state", 2) as cluster:
        done = cluster.job_in(cluster.client.submit(job).id, "done")
        folder = Path(done.spec.data.prepared)
        check_folder(folder)
        assert "4 of 4 losses" in cluster.verify(done.id)
        again = cluster.client.submit(msgspec.structs.replace(job, name="again")).id
        assert cluster.job_in(again, "done").spec.data.prepared == str(folder)
