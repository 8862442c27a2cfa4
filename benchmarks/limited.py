"""Nodes between which a link limits what each sends and receives: network namespaces, a bridge, and the
kernel's token buckets (``ip`` and ``tc`` of iproute2).

Owns namespaces and links, and a cluster whose daemon and nodes each live in one. What a node sends and
receives passes its own two token buckets (tbf of tc(8)), whoever the other end is, as at the port of a
switch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from benchmarks.cluster import Cluster, ClusterFailed
from oobleckd.client import Client
from oobleckd.unixhttp import ClientError

HUB = "hub"
_PREFIX = "10.213.79"
_BRIDGE, _DEVICE, _PORT = "bridge", "eth0", 7077
_ENTERED = "OOBLECK_BENCH_LINKS"
# Not the switch of tests/host: it would be the limit itself, and take the cores. (D-testing-019)
_BURST_BYTES = 2**17  # a packet that the kernel has not cut yet is half as large
_QUEUE_BYTES = 2**21
_UP_S, _GRACE_S, _LOOK_EVERY_S = 120.0, 20.0, 0.1


class NoNamespaces(Exception):
    """The system does not let this user have namespaces; the message says what it said."""


def enter() -> None:
    """Start this program again where it may have ``Links``, unless it was: as root of a network that is its
    own, of which nothing is left when it ends, however it does. Raises NoNamespaces.
    """
    if os.environ.get(_ENTERED):
        return
    command = within(sys.executable, *sys.argv)
    tried = subprocess.run(within("true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        raise NoNamespaces(tried.stderr.strip())
    os.environ[_ENTERED] = "1"
    os.execvp(command[0], command)


def within(*command: str) -> list[str]:
    """``command`` where it may have ``Links``."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    # ip(8) keeps the names of namespaces in /run.
    script = 'mount -t tmpfs none /run && ip link set lo up && exec "$0" "$@"'
    return ["unshare", "--net", "--mount", *root, "sh", "-c", script, *command]


class Links:
    """``nodes`` namespaces on a bridge in one more, ``HUB``. Each may send ``bytes_per_s``, and receive as
    much. ``name`` tells them from others' of this program. Only after ``enter``; raises ClusterFailed.
    """

    def __init__(self, name: str, nodes: Sequence[str], bytes_per_s: float) -> None:
        self.nodes, self._name, self._bytes_per_s = tuple(nodes), name, bytes_per_s
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for place in (HUB, *self.nodes):
                stack.enter_context(_namespace(self._space(place)))
            hub = self._space(HUB)
            _ip("-n", hub, "link", "add", _BRIDGE, "type", "bridge")
            _ip("-n", hub, "address", "add", f"{self.address(HUB)}/24", "dev", _BRIDGE)
            _ip("-n", hub, "link", "set", _BRIDGE, "up")
            for node in self.nodes:
                self._plug(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def address(self, place: str) -> str:
        """Of a node, or of ``HUB``."""
        return f"{_PREFIX}.{1 + (HUB, *self.nodes).index(place)}"

    def inside(self, place: str) -> list[str]:
        """What a command begins with that is to run there."""
        return ["ip", "netns", "exec", self._space(place)]

    def sent(self) -> dict[str, int]:
        """Bytes that each node has sent so far, with all that the network puts around them."""
        found = json.loads(_ip("-n", self._space(HUB), "-s", "-j", "link", "show", "type", "veth"))
        ports = {link["ifname"]: int(link["stats64"]["rx"]["bytes"]) for link in found}
        return {node: ports[_port(number)] for number, node in enumerate(self.nodes)}

    def _space(self, place: str) -> str:
        return f"oobleck-{self._name}-{place}"

    def _plug(self, node: str) -> None:
        hub, space, port = self._space(HUB), self._space(node), _port(self.nodes.index(node))
        _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", _DEVICE, "netns", space)
        _ip("-n", hub, "link", "set", port, "master", _BRIDGE, "up")
        _ip("-n", space, "address", "add", f"{self.address(node)}/24", "dev", _DEVICE)
        _ip("-n", space, "link", "set", "dev", _DEVICE, "up")
        rate, queue = f"{8 * self._bytes_per_s:.0f}bit", str(_QUEUE_BYTES)
        for where, device in ((space, _DEVICE), (hub, port)):  # what it sends, what it receives
            bucket = ["tbf", "rate", rate, "burst", str(_BURST_BYTES), "limit", queue]
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *bucket)


class LimitedCluster(Cluster):
    """The daemon in ``HUB`` and a node of one device in each other namespace of ``links``, of the programs in
    ``programs``; nodes do not share sockets, as if they were hosts. ``environment`` is set for all.
    """

    def __init__(self, state: Path, links: Links, programs: Path, environment: Mapping[str, str]) -> None:
        super().__init__(state, len(links.nodes))
        self.links, self._state, self._programs = links, state, programs
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.resume()
        self._end()

    def _begin(self) -> None:
        keys, socket = self._state / "keys", self._state / "api.sock"
        keygen = [str(self._programs / "oobleckctl"), "keygen", *self.links.nodes, "--dir", str(keys)]
        subprocess.run(keygen, check=True, capture_output=True, env=self._env)
        endpoint = f"tcp://{self.links.address(HUB)}:{_PORT}"
        with (self._state / "log").open("wb") as log:
            daemon = ["--state-dir", str(self._state), "--socket", str(socket)]
            self._start(log, HUB, "oobleckd", *daemon, "--endpoint", endpoint, "--keys-dir", str(keys))
            for node in self.links.nodes:
                self._start(
                    log, node, "oobleck-worker", "--node", node, "--daemon", endpoint, "--no-spare",
                    "--bind", self.links.address(node), "--host", node, "--run-dir", str(self._state / node),
                    "--key", str(keys / "nodes" / f"{node}.key_secret"),
                    "--server-key", str(keys / "server.key"),
                )  # fmt: skip
        self._pids, self.client = tuple(program.pid for program in self._running), Client(socket)
        self._wait()

    def _start(self, log: IO[bytes], place: str, program: str, *options: str) -> None:
        command = [*self.links.inside(place), str(self._programs / program), *options]
        self._running.append(subprocess.Popen(command, stdout=log, stderr=log, env=self._env))

    def _wait(self) -> None:
        """Until all nodes can be used. Looked at and not listened for: the daemon is not there yet."""
        deadline = time.monotonic() + _UP_S
        while not self._are_usable():
            if ended := [program for program in self._running if program.poll() is not None]:
                raise ClusterFailed(f"a program ended with {ended[0].returncode}: {self._last_line()}")
            if time.monotonic() > deadline:
                raise ClusterFailed(f"not {self.nodes} nodes within {_UP_S:g} s: {self._last_line()}")
            time.sleep(_LOOK_EVERY_S)

    def _are_usable(self) -> bool:
        with contextlib.suppress(ClientError):
            nodes = [node for node in self.client.nodes() if node.state in {"active", "standby"}]
            return len(nodes) == self.nodes
        return False

    def _last_line(self) -> str:
        lines = (self._state / "log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"

    def _end(self) -> None:
        for program in reversed(self._running):
            program.terminate()
        for program in self._running:
            try:
                program.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        self._running.clear()


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        with contextlib.suppress(ClusterFailed):
            _ip("netns", "del", name)


def _port(number: int) -> str:
    return f"port{number}"


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
