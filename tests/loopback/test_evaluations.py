"""Evaluations on a real cluster: a node that dies in one changes no bit of it, nor of what is trained; and
what steps and evaluations come to is once in each sink, whatever dies.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.client import Client
from oobleckd.planner.plan import node_of
from oobleckd.protocol.job import parse_job, table_of
from oobleckd.protocol.jobviews import StepView
from oobleckd.sinks import wandbfiles
from oobleckd.sinks.writer import read_note
from oobleckd.unixhttp import ApiProblem
from tests.helpers import stuck_sink
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.committed import read_evaluations, read_steps
from tests.helpers.matrix import rounds_of_evaluation
from tests.helpers.procs import await_end, child_with, handle_of
from tests.helpers.tfevents import texts
from tests.helpers.webhook import Receiver, receiving

BEGIN, EVERY = 4, 8
KINDS = ("csv", "jsonl", "tensorboard", "wandb", "stuck")
STEPS = 30
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluations")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(folder: Path, receiver: Receiver) -> Iterator[Cluster]:
    """Its daemon, and the one that follows it, offer all sinks, and have a rule of events."""
    config = folder / ".config/oobleck/config.toml"
    config.parent.mkdir(parents=True)
    rule = f'[[daemon.on_event]]\nevents = ["job-went-back", "job-done"]\nurl = "{receiver.url}"\n'
    config.write_text(rule, encoding="utf-8")
    (folder / "held.txt").write_bytes(bytes(range(32, 127)) * 20)
    env = {"HOME": str(folder), "OOBLECK_SINKS": ",".join(KINDS), "WANDB_MODE": "offline"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (env | stuck_sink.install(folder / "package")).items():
            patched.setenv(name, value)
        with Cluster(folder / "state", 4) as running:
            yield running


def test_a_death_in_an_evaluation_does_not_show(cluster: Cluster, folder: Path) -> None:
    """The head dies with losses that nobody has heard."""
    source = {"name": "held", "kind": "text", "path": str(folder / "held.txt")}
    table = {"every": EVERY, "sequences": 20, "at_start": True, "source": [source]}
    spec = tiny_job("evaluated", train={"steps": 24, "global_batch": 12}, eval=table)
    job = cluster.client.submit(spec).id
    view = cluster.at_step(job, BEGIN)
    victim = view.pipelines[0].nodes[-1]
    first, second = rounds_of_evaluation(spec, view.step + EVERY // 2)
    cluster.client.kill(victim, "device", at="forward", round=second)
    done = cluster.job_in(job, "done")
    assert [(node_of(hit["device"]), hit["round"]) for hit in cluster.fired()] == [(victim, first + 1)]
    assert (done.step, done.steps_lost) == (24, 0)
    (incident,) = [each for each in cluster.client.incidents() if each.job == job]
    assert incident.layer_gradients == 0
    assert "4 of 4 evaluations" in cluster.verify(job)


def test_each_committed_step_is_once_in_each_sink_whatever_dies(
    cluster: Cluster, folder: Path, receiver: Receiver
) -> None:
    """The policy goes back to the last checkpoint at every loss. One sink hangs all the time."""
    cluster.heal()
    while not receiver.got.empty():
        receiver.got.get()
    source = {"name": "held", "kind": "text", "path": str(folder / "held.txt")}
    table = table_of(
        tiny_job(
            "sunk",
            train={"steps": STEPS},
            fault_tolerance={"policy": "varuna"},
            checkpoint={"every": 0},
            resources={"device_memory": "12MiB", "max_nodes": 3},
            eval={"every": 5, "sequences": 20, "at_start": True, "source": [source]},
        )
    )
    with pytest.raises(ApiProblem, match=r"no sink 'nowhere': it offers csv, jsonl") as refused:
        cluster.client.submit(parse_job(table | {"sink": [{"kind": "nowhere"}]}))
    assert refused.value.status == 422
    job = cluster.client.submit(parse_job(table | {"sink": [{"kind": kind} for kind in KINDS]})).id
    home = Path(cluster.client.status().state_dir) / "sinks"
    csv = home / "csv" / job
    cluster.at_step(job, 3)
    cluster.client.control(job, "pause")
    view = cluster.job_in(job, "paused")
    cluster.until(lambda: len(_steps_of(csv)) == view.step or None, "all steps so far in CSV")
    _kill_the_process(cluster, receiver)
    cluster.kill(view.pipelines[0].nodes[0], "device")
    lost = cluster.until(lambda: cluster.client.job(job).steps_lost or None, "a rollback")
    assert lost == view.step, "to where it began: it has written no checkpoint"
    handle = handle_of(_process(cluster))
    cluster.kill_daemon()
    await_end(handle, PATIENCE_S)  # with its daemon
    cluster.start_daemon()
    cluster.until(lambda: cluster.client.control(job, "resume"), "the daemon to be back")
    cluster.kill(cluster.at_step(job, 3).nodes[0], "device")
    done = cluster.job_in(job, "done")
    assert done.steps_lost > lost
    package = folder / "package"
    assert (package / "hangs").exists(), "it has hung since the first step, and the job is done"
    others = [home / kind / job for kind in KINDS[:-1]]
    cluster.until(lambda: all(map(_complete, others)) or None, "all others to be complete")
    stuck_sink.free(package)
    cluster.until(lambda: _complete(home / "stuck" / job) or None, "what hung to catch up")
    _check(cluster.client, job, home)
    told = [receiver.got.get(timeout=PATIENCE_S)]
    while told[-1]["event"] != "job-done":
        told.append(receiver.got.get(timeout=PATIENCE_S))
    assert {each["data"]["job"] for each in told} == {job}
    back = {each["seq"]: each["data"]["steps_lost"] for each in told if each["event"] == "job-went-back"}
    assert sum(back.values()) == done.steps_lost, "each of them, and whatever was told twice has its number"


def _kill_the_process(cluster: Cluster, receiver: Receiver) -> None:
    pid = _process(cluster)
    assert os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "0\n"
    assert receiver.url not in Path(f"/proc/{pid}/cmdline").read_text(), "everybody reads that"
    handle = handle_of(pid)
    os.kill(pid, signal.SIGKILL)
    await_end(handle, PATIENCE_S)


def _check(client: Client, job: str, home: Path) -> None:
    steps = client.steps(job)
    evaluations = [(each.step, each.losses[0].loss or 0.0) for each in client.evaluations(job)]
    wanted = [(each.step, each.loss) for each in steps]
    assert [step for step, _ in wanted] == list(range(1, STEPS + 1))
    assert len(evaluations) == 1 + STEPS // 5
    for kind, folder in (("csv", "csv"), ("jsonl", "jsonl"), ("jsonl", "stuck")):
        assert read_steps(kind, home / folder / job) == wanted, folder
        assert read_evaluations(kind, home / folder / job) == evaluations, folder
    board = home / "tensorboard" / job
    assert read_steps("tensorboard", board) == [(step, _single(loss)) for step, loss in wanted]
    assert read_evaluations("tensorboard", board) == [(step, _single(loss)) for step, loss in evaluations]
    over = [each for each in client.incidents() if each.job == job and not each.open]
    assert all(len(texts(board, f"incidents/{each.id}")) == 1 for each in over)
    _check_wandb(home / "wandb" / job, steps, evaluations)


def _check_wandb(folder: Path, steps: tuple[StepView, ...], evaluations: list[tuple[int, float]]) -> None:
    rows = [
        wandbfiles.row_of(record.history)
        for each in wandbfiles.folders_of(folder)
        for file in each.glob("*.wandb")
        for record in wandbfiles.records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    trained = [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert trained == [(each.step, each.loss) for each in steps]
    assert [row["_timestamp"] for row in rows if "train/loss" in row] == [each.at for each in steps]
    assert [(row["_step"], row["eval/held/loss"]) for row in rows if "eval/held/loss" in row] == evaluations


def _single(value: float) -> float:
    """As a 32-bit float, which TensorBoard keeps."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _steps_of(folder: Path) -> list[tuple[int, float]]:
    return read_steps("csv", folder) if (folder / "steps.csv").exists() else []


def _complete(folder: Path) -> bool:
    note = read_note(folder)
    return note is not None and note.complete


def _process(cluster: Cluster) -> int:
    """The process of sinks, once there is one."""
    daemon = cluster.home.alive()["oobleckd"].pid
    return cluster.until(lambda: child_with(daemon, "oobleckd.sinks.program"), "a process of sinks")
