"""A real cluster on this machine for tests and chaos runs: the daemon, agents and device processes of ``up``.

Owns a state directory, the jobs that it submits, and the reference run (one process, no failures) that every
job is compared with, bit by bit. Ends only what its own ``up`` started.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from unittest import mock

from oobleckd.client import Client, socket_of
from oobleckd.ctl import base
from oobleckd.ctl.local import DAEMON, ONE_THREAD, Home
from oobleckd.ctl.processes import ClusterProcess, is_alive
from oobleckd.ctl.verify import judge
from oobleckd.ctl.waiting import FINAL
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.unixhttp import ClientError

T = TypeVar("T")
D = TypeVar("D")
BIN = Path(sys.executable).parent


class TimedOut(AssertionError):
    """A condition did not come true in time."""


class Cluster:
    """``nodes`` nodes of ``devices`` devices of ``kind`` each, under ``state``. Spares only where a test
    needs them.
    """

    def __init__(
        self,
        state: Path,
        nodes: int,
        *,
        kind: str = "cpu",
        devices: int = 1,
        spare: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.state, self.num_nodes, self.num_devices, self.kind = state, nodes, devices, kind
        self._options = ("--kind", kind, "--devices", str(devices), "--spare" if spare else "--no-spare")
        self.env = {**os.environ, "OOBLECK_STATE": str(state), "OMP_NUM_THREADS": "1", **(env or {})}
        self.client = Client(socket_of(state))
        self.ask_every_s = 0.05  # what is waited for
        self._pause = threading.Event()

    @property
    def home(self) -> Home:
        """Its files and processes."""
        return Home(self.state)

    def __enter__(self) -> Self:
        self.env = with_base() | self.env
        try:
            self.ctl("up", "--nodes", str(self.num_nodes), "--allow-injection", *self._options)
        except BaseException:  # interrupted, too: half a cluster is not left behind
            self.ctl("down", check=False)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.ctl("down", check=False)

    def ctl(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run oobleckctl; with ``check`` a failure shows what it printed."""
        done = subprocess.run(
            [BIN / "oobleckctl", *args], env=self.env, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    # ------------------------------------------------------------------ failures and repairs

    def device_pids(self, node: str) -> tuple[int, ...]:
        """Device processes of ``node`` as the daemon knows them."""
        return next(view.pids for view in self.client.nodes() if view.name == node)

    def kill(self, node: str, how: str) -> None:
        """SIGKILL, from outside: "device": its device processes; "one-device": one of them; "agent-only";
        "sigkill": all.
        """
        agent = self.home.alive().get(node)
        pids = self.device_pids(node) if how in {"device", "one-device", "sigkill"} else []
        if how in {"agent-only", "sigkill"} and agent is not None:
            _kill(
                agent
            )  # first: it would say which device died, and join again with a spare before it dies itself
        for pid in pids[-1:] if how == "one-device" else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def slow_down(self, nodes: Iterable[str], times: float, seconds: float = 0.0) -> None:
        """Have the devices of ``nodes`` take so many ``times`` as long for their layers, nearly all of it
        asleep, for so many ``seconds`` (0.0: until told otherwise): a job then lasts without work.
        """
        for node in nodes:
            self.client.kill(node, "slow", times=times, seconds=seconds)

    def hurry(self, nodes: Iterable[str]) -> None:
        """Have them be as fast as they can again."""
        self.slow_down(nodes, 1.0)

    def terminate(self, node: str) -> None:
        """SIGTERM of an agent."""
        os.kill(self.home.alive()[node].pid, signal.SIGTERM)

    def kill_daemon(self) -> None:
        """kill -9 of the daemon."""
        _kill(self.home.alive()[DAEMON])

    def start_daemon(self) -> None:
        """Start the daemon again on the same state."""
        cluster = self.home.load()
        assert cluster is not None
        self.home.start_daemon(cluster)

    def heal(self) -> None:
        """Start the nodes whose agent is dead, lift drains, end what a test left behind, and wait until all
        can be used.
        """
        alive = self.home.alive()
        for i in range(1, self.num_nodes + 1):
            if f"node-{i}" not in alive:
                self.ctl("start-node", f"node-{i}")
        for node in self.client.nodes():
            if node.state in {"drained", "draining"}:
                self.client.undrain(node.name)
        for job in self.client.jobs():
            if job.state not in FINAL:
                self.client.control(job.id, "cancel", discard=True)
        self.usable(self.num_nodes)

    def restart(self) -> None:
        """A cluster in which something broke makes room for a new one."""
        self.ctl("down", check=False)
        shutil.move(self.state, self.state.with_name(f"{self.state.name}.broken-{time.time_ns()}"))
        self.state.mkdir()
        self.__enter__()

    # ------------------------------------------------------------------ waiting for events

    def until(self, check: Callable[[], T | None], what: str, timeout_s: float = 120.0) -> T:
        """The first result of ``check`` that is not None, asked anew every ``ask_every_s``, and less often
        the longer it takes.

        Asked and not awaited: what is checked may live in files or in a daemon that is away just now.
        """
        began = now = time.monotonic()
        while now < began + timeout_s:
            with contextlib.suppress(ClientError):  # the daemon may be away
                found = check()
                if found is not None:
                    return found
            self._pause.wait(self.ask_every_s + min((now - began) / 50, 0.15))
            now = time.monotonic()
        raise TimedOut(f"{what}: not within {timeout_s} s; jobs: {self.describe()}")

    def told(self, data: type[D], so: Callable[[D], bool], what: str, timeout_s: float = 120.0) -> D:
        """Wait until a change says what is ``so``; looked for in all that is kept."""
        seen = 0

        def check() -> D | None:
            nonlocal seen
            for change in self.client.events(seen, follow=False):
                seen = max(seen, change.seq)
                if isinstance(change.data, data) and so(change.data):
                    return change.data
            return None

        return self.until(check, what, timeout_s)

    def describe(self) -> str:
        """The jobs that are not done, and the newest, for a message."""
        try:
            jobs = self.client.jobs()
            shown = [job for job in jobs if job.state != "done" or job is jobs[-1]]
            return "; ".join(f"{j.id} {j.state} step {j.step} ({j.reason})" for j in shown)
        except ClientError as error:
            return str(error)

    def job_in(self, job: str, *states: str, timeout_s: float = 180.0) -> JobView:
        """Wait until ``job`` is in one of ``states``; any other end of the job is an error at once."""

        def check() -> JobView | None:
            view = self.client.job(job)
            if view.state in {"failed", "cancelled"} - set(states):
                raise AssertionError(f"{view.id} {view.state}: {view.reason}")
            return view if view.state in states else None

        return self.until(check, f"{job} in {states}", timeout_s)

    def at_step(self, job: str, step: int, timeout_s: float = 180.0) -> JobView:
        """Wait until ``job`` has committed ``step`` steps."""

        def check() -> JobView | None:
            view = self.client.job(job)
            assert view.state not in {"failed", "cancelled"}, view.reason
            return view if view.step >= step else None

        return self.until(check, f"{job} at step {step}", timeout_s)

    def usable(self, count: int, timeout_s: float = 120.0) -> tuple[NodeView, ...]:
        """Wait until ``count`` nodes can be used."""

        def check() -> tuple[NodeView, ...] | None:
            nodes = [n for n in self.client.nodes() if n.state in {"active", "standby"}]
            return tuple(nodes) if len(nodes) >= count else None

        return self.until(check, f"{count} usable nodes", timeout_s)

    # ------------------------------------------------------------------ results

    def verify(self, job: str) -> str:
        """Compare a finished job with its undisturbed run in one process; fails on any difference.

        As ``oobleckctl verify --single`` does, without starting it.
        """
        said = io.StringIO()  # what it says to people is in nobody's way here
        with mock.patch.dict(os.environ, self.env, clear=True), contextlib.redirect_stderr(said):
            _, verdict = judge(self.client, self.client.job(job), single=True)
        assert verdict.identical, (verdict.sentence, verdict.findings)
        return verdict.sentence

    def fired(self) -> list[dict[str, Any]]:
        """Every fault point that has fired so far, in order of time.

        Looked for where devices write them alone: checkpoints of many jobs lie beside them.
        """
        files = self.state.glob("run/*/faults.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines()]
        return sorted(map(json.loads, lines), key=lambda hit: float(hit["at"]))


def with_base() -> dict[str, str]:
    """An environment whose clusters are forks of the base of this process, which runs from now on."""
    if not base.is_wanted():
        return {}
    base.Base(base_folder()).begin(ONE_THREAD)
    return {"OOBLECK_BASE": str(base_folder())}


@functools.cache
def base_folder() -> Path:
    """Of the base that forks those of all clusters of this process: torch is loaded once for them."""
    folder = Path(tempfile.mkdtemp(prefix="oobleck-base-"))

    def end() -> None:
        base.Base(folder).end(5.0)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return folder


TINY = {
    "n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 256,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
"""Of a GPT-2."""


def tiny_job(name: str, **sections: dict[str, Any]) -> Job:
    """A GPT-2 of 6 blocks that needs two nodes because of its memory cap; a step takes tens of ms."""
    raw: dict[str, Any] = {
        "name": name,
        "model": {
            "family": "gpt2",
            "config": TINY,
        },
        "train": {"steps": 24, "global_batch": 8, "micro_batch": 2, "sequence": 32},
        "optimizer": {"lr": 0.003, "warmup_steps": 4},
        "fault_tolerance": {"f": 1},
        "resources": {"device_memory": "8MiB"},
        "checkpoint": {"every": 0},  # without a copy of the state in memory, for which there is no room
    }  # fmt: skip
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_job(raw)


def _kill(process: ClusterProcess) -> None:
    if is_alive(process):
        os.kill(process.pid, signal.SIGKILL)
