"""What the daemon costs with many nodes: agents that send heartbeats once a second as idle nodes do, beside a
real training job; then kill -9 of the daemon.

    python benchmarks/fleet.py [--nodes 1000] [--seconds 30] [--minutes 0]

The daemon is the real program with a probe of its loop (``probed.py``); the agents are ``idle_agents.py``'s,
which do nothing but live, four processes of them; the job runs on two real workers. They send heartbeats for
so many ``--minutes`` (ten where there are more than 1,000 of them), and what is measured are the last
``--seconds`` of it, so that memory is what it stays: libzmq's queues fill for ten minutes where heartbeats go
through them. Processor time is the daemon's own, of all its threads, as the scheduler has it. *Back*: from
the start of a new daemon until it has welcomed everybody again. Ends with 1 where a goal is missed: with up
to 1,000 nodes 10 % of a core and 5 ms (p99) of lag; with more 35 %, 512 MB, and all back within 30 s. Nobody
may be lost. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import table
from oobleckd.client import Client
from oobleckd.daemon import keys
from oobleckd.protocol.job import parse_job
from oobleckd.unixhttp import ClientError

_ROOT = Path(__file__).resolve().parents[1]
FEW = 1000
GOAL_LAG_S = 0.005
GOAL_BYTES = 512 * 10**6
GOAL_BACK_S = 30.0
SETTLING_MINUTES = 10.0  # of more than a few
_PROCESSES = 4  # of agents
_WORKERS = ("worker-1", "worker-2")
_SCHEDULED = 2  # the clock of a process that the scheduler keeps: clock_getcpuclockid(3)
_PATIENCE_S = 300.0
_JOB: dict[str, Any] = {
    "name": "beside",
    "model": {"config": {"n_layer": 8, "n_embd": 256, "n_head": 8, "n_positions": 64, "vocab_size": 256}},
    "train": {"steps": 1_000_000, "global_batch": 8, "micro_batch": 2, "sequence": 64},
    "fault_tolerance": {"f": 1},
}


class FleetFailed(Exception):
    """Something did not come about; the message says what."""


def goal_share(num_nodes: int) -> float:
    """Of a core."""
    return 0.10 if num_nodes <= FEW else 0.35


@dataclass
class Daemon:
    """The real one, on ``folder``; it may be started anew."""

    folder: Path
    lags: Path = field(init=False)
    client: Client = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    endpoint: str = "tcp://127.0.0.1:0"

    def __post_init__(self) -> None:
        self.lags, self.client = self.folder / "lags", Client(self.folder / "d.sock")

    def start(self) -> None:
        """Until it answers."""
        command = [
            sys.executable, "-m", "benchmarks.probed", str(self.lags), "--state-dir",
            str(self.folder / "state"), "--keys-dir",
            str(self.folder / "keys"), "--socket", str(self.folder / "d.sock"), "--endpoint", self.endpoint,
            "--heartbeat-s", "1", "--lease-s", "10",
        ]  # fmt: skip
        with (self.folder / "d.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, cwd=_ROOT)
        until(self.client.healthy, "the daemon answers", self)
        self.endpoint = self.client.status().endpoint

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        """Processor time so far."""
        assert self.process is not None
        return time.clock_gettime(~self.process.pid << 3 | _SCHEDULED)

    def resident_bytes(self) -> int:
        """Of the host's memory."""
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def until(check: Any, what: str, daemon: Daemon) -> None:
    """Ask until it is so; the daemon may be away meanwhile. Raises FleetFailed."""
    pause, deadline = threading.Event(), time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError):
            if check():
                return
        if daemon.process is not None and daemon.process.poll() is not None:
            break
        pause.wait(0.05)
    raise FleetFailed(f"{what}: not so\n{(daemon.folder / 'd.log').read_text()[-2000:]}")


@contextlib.contextmanager
def agents(daemon: Daemon, names: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Those that send heartbeats, once all have joined."""
    groups = [names[first::_PROCESSES] for first in range(_PROCESSES)]
    found = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.idle_agents", "--starting", daemon.endpoint,
            str(daemon.folder / "keys"), *group],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
        )
        for group in groups
    ]  # fmt: skip
    try:
        joined(found)
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def joined(found: list[subprocess.Popen[str]]) -> None:
    """All of them say so. Raises FleetFailed."""
    deadline = time.monotonic() + _PATIENCE_S
    for process in found:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready or process.stdout.readline() != "joined\n":
            raise FleetFailed(f"agents did not all join within {_PATIENCE_S:g} s")


@contextlib.contextmanager
def workers(daemon: Daemon) -> Iterator[None]:
    """Real ones."""
    folder = daemon.folder
    found = []
    for name in _WORKERS:
        command = [
            Path(sys.executable).with_name("oobleck-worker"), "--node", name, "--daemon", daemon.endpoint,
            "--key",
            keys.node_secret_path(folder / "keys", name), "--server-key",
            keys.server_public_path(folder / "keys"), "--devices", "1",
            "--kind", "cpu", "--no-spare", "--run-dir", folder / name,
        ]  # fmt: skip
        (folder / name).mkdir()
        with (folder / f"{name}.log").open("wb") as log:
            found.append(
                subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=_ROOT)
            )
    try:
        yield
    finally:
        for process in found:
            process.send_signal(signal.SIGTERM)
        for process in found:
            process.wait(60)


def measure(daemon: Daemon, names: list[str], seconds: float, minutes: float) -> dict[str, float]:
    """Everything. Raises FleetFailed."""
    keys.make_server_keys(daemon.folder / "keys")
    for name in (*names, *_WORKERS):
        keys.make_node_keys(daemon.folder / "keys", name)
    daemon.start()
    with workers(daemon), agents(daemon, names) as fleet:
        job = daemon.client.submit(parse_job(_JOB)).id
        until(lambda: daemon.client.job(job).step >= 5, "the job trains", daemon)
        early = daemon.resident_bytes()
        time.sleep(max(0.0, 60.0 * minutes - seconds))
        heard = daemon.client.debug().counters
        before_s, seen, began = daemon.cpu_s(), daemon.lags.stat().st_size, time.monotonic()
        step = daemon.client.job(job).step
        time.sleep(seconds)
        found = {
            "share": (daemon.cpu_s() - before_s) / (time.monotonic() - began),
            "steps_per_s": (daemon.client.job(job).step - step) / seconds,
            "resident_early_bytes": float(early),
            "resident_bytes": float(daemon.resident_bytes()),
        }
        for name, number in daemon.client.debug().counters.items():
            found[f"{name}_per_s"] = (number - heard[name]) / seconds
        lags = np.frombuffer(daemon.lags.read_bytes()[seen:])
        found |= {f"lag_p{q}_s": float(np.quantile(lags, q / 100)) for q in (50, 99, 100)}
        daemon.kill()
        began = time.monotonic()
        daemon.start()
        for process in fleet:
            assert process.stdin is not None
            process.stdin.write(
                "again\n"
            )  # what is said before its end is seen would go down with the connection
            process.stdin.flush()
        joined(fleet)
        found["back_s"] = time.monotonic() - began
        step = daemon.client.job(job).step
        until(lambda: daemon.client.job(job).step > step, "the job goes on", daemon)
        nodes = daemon.client.nodes()
        found["lost"] = float(
            sum(node.state in {"lost", "left"} for node in nodes) + len(names) + len(_WORKERS) - len(nodes)
        )
        found["incidents"] = float(len(daemon.client.incidents()))
        found["resident_after_bytes"] = float(daemon.resident_bytes())
    daemon.kill()
    return found


def met(num_nodes: int, found: dict[str, float]) -> dict[str, bool]:
    """Goal -> whether."""
    goals = {
        f"{goal_share(num_nodes):.0%} of a core": found["share"] <= goal_share(num_nodes),
        "nobody lost": found["lost"] == found["incidents"] == 0,
        f"all back within {GOAL_BACK_S:g} s": found["back_s"] <= GOAL_BACK_S,
    }
    if num_nodes <= FEW:
        return goals | {f"lag p99 {1e3 * GOAL_LAG_S:g} ms": found["lag_p99_s"] <= GOAL_LAG_S}
    most = max(found["resident_bytes"], found["resident_after_bytes"])
    return goals | {f"{GOAL_BYTES / 1e6:g} MB": most <= GOAL_BYTES}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=FEW)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--minutes", type=float)
    args = parser.parse_args()
    if args.minutes is None:
        args.minutes = SETTLING_MINUTES if args.nodes > FEW else 0.0
    names = [f"n{number:05}" for number in range(args.nodes)]
    with tempfile.TemporaryDirectory(prefix="oobleck-fleet-") as folder:
        daemon = Daemon(Path(folder))
        try:
            found = measure(daemon, names, args.seconds, args.minutes)
        except FleetFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.kill()
    header = [
        "nodes",
        "of a core",
        "lag p50",
        "p99",
        "most",
        "resident",
        "after a restart",
        "all back",
        "lost",
        "the job's steps/s",
    ]
    lags = [f"{1e3 * found[f'lag_p{q}_s']:.2f} ms" for q in (50, 99, 100)]
    sizes = [f"{found[name] / 1e6:.0f} MB" for name in ("resident_bytes", "resident_after_bytes")]
    row = [
        f"{args.nodes:,}",
        f"{found['share']:.1%}",
        *lags,
        *sizes,
        f"{found['back_s']:.1f} s",
        f"{found['lost']:.0f}",
        f"{found['steps_per_s']:.1f}",
    ]
    print(table(header, [row]), end="\n\n")
    goals = met(args.nodes, found)
    for goal, reached in goals.items():
        print(f"goal: {goal}: {'met' if reached else 'missed'}")
    print(
        json.dumps(
            {
                "bench": "fleet",
                "nodes": args.nodes,
                "minutes": args.minutes,
                "cores": os.cpu_count(),
                "load1": os.getloadavg()[0],
                **found,
                "met": goals,
            }
        )
    )
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
