"""A whole cluster on this machine: where its files lie, what its programs are called with.

Owns the folder of such a cluster (``cluster.json``, keys, run, log, state of daemon and nodes). Does not own
the processes (``processes``), nor what is said to the user (``cluster``).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from oobleckd.client import socket_of
from oobleckd.ctl import base, processes
from oobleckd.ctl.base import Base
from oobleckd.ctl.output import FAILED, USAGE, fail
from oobleckd.ctl.processes import ClusterProcess
from oobleckd.host.durable import write_whole
from oobleckd.host.ports import free_port
from oobleckd.protocol.unreadable import UNREADABLE, problem_of

DAEMON = "oobleckd"
_END_S = 5.0
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108, with the terminating zero
_PROCESS_BYTES = 400 * 2**20  # a device process without layers: Python, torch and transformers, measured
_FORK_BYTES = 40 * 2**20  # one that shares them with the base, and its share of agent and forker
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Cluster(msgspec.Struct, frozen=True):
    """What ``up`` was asked for; ``start-node`` and ``down`` go by it."""

    nodes: tuple[str, ...]
    devices: int
    endpoint: str
    allow_injection: bool
    kind: str = "cpu"
    spares: bool = False


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a local cluster."""

    state: Path

    @property
    def run(self) -> Path:
        """Pid files and the daemon's socket."""
        return self.state / "run"

    @property
    def logs(self) -> Path:
        """One log for each program."""
        return self.state / "log"

    @property
    def keys(self) -> Path:
        """CURVE keys."""
        return self.state / "keys"

    @property
    def socket(self) -> Path:
        """The daemon's socket."""
        return socket_of(self.state)

    @property
    def base(self) -> Base:
        """What forks the nodes' agents."""
        return Base(self.run / base.NAME)

    def log(self, name: str) -> Path:
        """The log of the daemon or of a node."""
        return self.logs / f"{name}.log"

    def check(self) -> None:
        """Whether a cluster can live here. Ends the command if not."""
        if len(str(self.socket)) > _MAX_SOCKET_PATH:
            fail(f"{self.socket} is too long for a socket", "choose a shorter --state folder", USAGE)
        try:
            self.run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"{self.state}: cannot be made: {error.strerror}", "choose another --state folder", USAGE)

    def load(self) -> Cluster | None:
        """The cluster that was started here; None when there was none."""
        try:
            return msgspec.json.decode((self.state / "cluster.json").read_bytes(), type=Cluster)
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            fail(
                f"{self.state / 'cluster.json'}: cannot be read: {problem_of(error)}",
                "remove it after `oobleckctl down`",
            )

    def save(self, cluster: Cluster) -> None:
        """Write down what was started."""
        write_whole(self.state / "cluster.json", msgspec.json.encode(cluster))

    def alive(self) -> dict[str, ClusterProcess]:
        """The programs of the cluster that run."""
        known = processes.recall(self.run)
        return {name: process for name, process in known.items() if processes.is_alive(process)}

    def start_daemon(self, cluster: Cluster, *, adopt: bool = False) -> ClusterProcess:
        """Start the daemon; ``adopt``: also where its state is a copy."""
        allow = "--allow-injection" if cluster.allow_injection else "--no-allow-injection"
        command = [
            program("oobleckd"), "--state-dir", str(self.state / "daemon"), "--socket", str(self.socket),
            "--endpoint", cluster.endpoint, "--keys-dir", str(self.keys), allow,
            *(["--adopt"] if adopt else []),
        ]  # fmt: skip
        return self._start(DAEMON, command)

    def start_node(self, cluster: Cluster, node: str) -> ClusterProcess:
        """Start the worker of a node."""
        command = [
            program("oobleck-worker"), "--node", node, "--daemon", cluster.endpoint,
            "--key", str(self.keys / "nodes" / f"{node}.key_secret"),
            "--server-key", str(self.keys / "server.key"),
            "--devices", str(cluster.devices), "--kind", cluster.kind,
            "--spare" if cluster.spares else "--no-spare", "--run-dir", str(self.run / node),
        ]  # fmt: skip
        if base.is_wanted():
            started = self.base.start(node, command, self.run, self.logs, ONE_THREAD)
            if started is not None:
                return started
        return self._start(node, command)

    def begin_base(self) -> None:
        """Have a new base, with this environment and this code, in a while."""
        self.base.end(_END_S)
        if base.is_wanted():
            with suppress(OSError):  # whoever wants an agent of it says so
                self.base.begin(ONE_THREAD)

    def _start(self, name: str, command: list[str]) -> ClusterProcess:
        try:
            return processes.start(name, command, self.run, self.logs, ONE_THREAD)
        except OSError as error:
            fail(f"{name} cannot be started: {error}", "is the installation complete? `make setup`", FAILED)


def program(name: str) -> str:
    """A command of our own environment, whatever PATH says."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def free_endpoint() -> str:
    """A loopback endpoint for the daemon, kept for its restarts."""
    return f"tcp://127.0.0.1:{free_port()}"


def free_memory_bytes() -> int:
    """Memory that the kernel could give to new programs without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def spares_fit(num_nodes: int, devices: int, free_bytes: int) -> bool:
    """Whether a spare for each node fits into half of what the device processes leave, before any layers."""
    each, shared = (_FORK_BYTES, _PROCESS_BYTES) if base.is_wanted() else (_PROCESS_BYTES, 0)
    return num_nodes * each <= (free_bytes - shared - num_nodes * devices * each) / 2
