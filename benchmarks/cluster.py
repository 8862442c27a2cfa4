"""oobleckd for the benchmarks: a local cluster by ``oobleckctl up``, the benchmarks' job in a wanted shape,
waits.

Owns what it starts and ends it. Drives the service as a user does, through its commands and its API.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from benchmarks.peers import shape
from benchmarks.peers.launch import family_of, send, stop
from oobleckd.client import Client
from oobleckd.ctl.local import Home
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobviews import JobView
from oobleckd.unixhttp import ClientError

T = TypeVar("T")
_CTL = Path(sys.executable).parent / "oobleckctl"
_TIMEOUT_S = 180.0


class ClusterFailed(Exception):
    """The service did not do what the benchmark needs; the message says what."""


class Cluster:
    """``nodes`` nodes of so many ``devices`` of ``kind`` each, with a warm spare or without, and their state
    under ``state``.

    ``environment`` is set for its programs besides this one's.
    """

    def __init__(
        self,
        state: Path,
        nodes: int = shape.NUM_PROCESSES,
        *,
        devices: int = 1,
        spare: bool = False,
        kind: str = "cpu",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes, self.devices, self.spare, self.kind = nodes, devices, spare, kind
        self._home = Home(state)
        self._environment = {**os.environ, **(environment or {}), "OOBLECK_STATE": str(state)}
        self._pids: tuple[int, ...] = ()
        self.client = Client("")

    def __enter__(self) -> Self:
        spare = "--spare" if self.spare else "--no-spare"
        try:
            size = ("--nodes", str(self.nodes), "--devices", str(self.devices), "--kind", self.kind)
            said = self._ctl("up", *size, spare, "--allow-injection", "--output", "json")
        except KeyboardInterrupt:  # it ended the command, too, but not what that had started
            with contextlib.suppress(ClusterFailed):
                self._ctl("down")
            raise
        up = json.loads(said)
        self._pids, self.client = tuple(up["pids"].values()), Client(up["socket"])
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.resume()
        with contextlib.suppress(*([ClusterFailed] if error else [])):
            try:
                self._ctl("down")
            except KeyboardInterrupt:
                self._ctl("down")
                raise

    def pause(self) -> None:
        """Stop daemon and nodes where they are. Only for a cluster without a job: it misses nothing."""
        stop(family_of(self._pids))

    def resume(self) -> None:
        """Go on."""
        send(signal.SIGCONT, family_of(self._pids))

    def kill(self, program: str) -> None:
        """kill -9 of the daemon (``DAEMON``) or of a node's agent."""
        os.kill(self._home.alive()[program].pid, signal.SIGKILL)

    def fired(self) -> list[dict[str, Any]]:
        """Fault points at which a device died, oldest first."""
        lines = [
            line for file in self._home.state.rglob("faults.jsonl") for line in file.read_text().splitlines()
        ]
        return sorted(map(json.loads, lines), key=lambda hit: float(hit["at"]))

    def start(self, program: str) -> None:
        """Start the daemon or a node's agent again, and wait until it takes part."""
        self._ctl("start-node", program)

    def submit(self, job: Job) -> str:
        """Submit; returns the job's id."""
        return self.client.submit(job).id

    def end(self, job: str) -> None:
        """Cancel a job and wait for its end."""
        self.client.control(job, "cancel", discard=True)
        self.in_state(job, "cancelled")

    def in_state(self, job: str, *states: str) -> JobView:
        """Wait until the job is in one of ``states``. Raises ClusterFailed at any other end of it."""

        def check() -> JobView | None:
            view = self.client.job(job)
            if view.state in {"done", "failed", "cancelled"} - set(states):
                raise ClusterFailed(f"{view.name} is {view.state}: {view.reason}")
            return view if view.state in states else None

        return self.until(check, f"{job} to be {' or '.join(states)}")

    def until(self, check: Callable[[], T | None], what: str) -> T:
        """The first result of ``check`` that is not None, asked anew at every event of the daemon."""
        with self.client.events() as events:
            timer = threading.Timer(_TIMEOUT_S, events.close)
            timer.start()
            try:
                while True:
                    with contextlib.suppress(ClientError):
                        if (found := check()) is not None:
                            return found
                    if next(events, None) is None:
                        raise ClusterFailed(f"waited {_TIMEOUT_S:g} s for {what}; {self._story()}")
            finally:
                timer.cancel()

    def _story(self) -> str:
        """Where jobs and nodes stand, for a message."""
        try:
            jobs, nodes = self.client.jobs(), self.client.nodes()
        except ClientError as error:
            return str(error)
        lines = [f"{j.name} is {j.state} at step {j.step} with stages {depths(j)} {j.reason}" for j in jobs]
        return "; ".join([*lines, *(f"{node.name} is {node.state} {node.reason}" for node in nodes)])

    def _ctl(self, *args: str) -> str:
        done = subprocess.run(
            [_CTL, *args], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ClusterFailed(f"oobleckctl {args[0]}: {(done.stderr or done.stdout).strip()}")
        return done.stdout


def job_of(
    name: str,
    *,
    steps: int,
    f: int,
    depth: int,
    exact: bool = True,
    max_nodes: int = 0,
    policy: str = "oobleck",
    schedule: Mapping[str, object] | None = None,
    micro_batch: shape.MicroBatch = shape.HERE,
) -> Job:
    """The benchmarks' model and batch as a job: constant work a step, no clipping, as the peers have none.

    Pipelines have ``depth`` nodes at least; with ``max_nodes`` further nodes stand by.
    """
    raw: dict[str, Any] = {
        "name": name,
        "model": {"family": "gpt2", "config": shape.gpt2_config(micro_batch.sequence)},
        "train": {
            "steps": steps, "global_batch": micro_batch.global_batch, "micro_batch": micro_batch.num,
            "sequence": micro_batch.sequence, "exact": exact,
        },
        "optimizer": {"lr": shape.LEARNING_RATE, "clip_norm": 0.0},
        "fault_tolerance": {"f": f, "policy": policy},
        "schedule": {**(schedule or {})},
        "resources": {"min_pipeline_nodes": depth, "max_nodes": max_nodes},
        "checkpoint": {"every": 0},  # steps are measured, not a checkpoint now and then
    }  # fmt: skip
    return parse_job(raw)


def depths(view: JobView) -> list[int]:
    """Devices of every pipeline of a deployed job, without vacant places."""
    return sorted(
        len({stage.device for stage in pipeline.stages} - {*pipeline.vacant}) for pipeline in view.pipelines
    )
