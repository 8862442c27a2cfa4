"""No false deaths on a bad network: two namespaces, one packet in ten lost each way, and 20 ms on the way.
Needs root.

python benchmarks/lossy.py --minutes 10

Two nodes and the daemon live in one network namespace, two nodes in the other. Between them lies a TUN device
each and a forwarder of our own, which drops and delays packets: it needs no kernel module (netem and nftables
are missing in some). Ends with 1 if any node was lost.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.launch import endable
from benchmarks.quiet import evictions, train
from oobleckd.client import Client
from oobleckd.ctl.local import program
from tests.helpers.cluster import Cluster

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 65536
SIDES = ("a", "b")
NODES = {"node-1": "a", "node-2": "a", "node-3": "b", "node-4": "b"}
ADDRESS = {"a": "10.213.77.1", "b": "10.213.77.2"}


class Tunnels(threading.Thread):
    """Carries packets between two TUN devices, drops each with probability ``loss``, and takes
    ``delay_s``.
    """

    def __init__(self, ends: tuple[int, int], loss: float, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.num_passed = self.num_lost = 0
        self._ends, self._loss, self._delay_s = ends, loss, delay_s
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._dice = random.Random(0)

    def run(self) -> None:
        """Until the devices are gone with their namespaces."""
        a, b = self._ends
        other = {a: b, b: a}
        with suppress(OSError):
            while True:
                self._turn(other)

    def _turn(self, other: dict[int, int]) -> None:
        due = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else 1.0
        ready, _, _ = select.select(self._ends, [], [], max(0.0, due))
        for fd in ready:
            self._take(fd, other[fd])
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(self._on_the_way)
            os.write(fd, packet)

    def _take(self, fd: int, to: int) -> None:
        packet = os.read(fd, _PACKET_BYTES)
        if self._dice.random() < self._loss:
            self.num_lost += 1
            return
        self.num_passed += 1
        heapq.heappush(self._on_the_way, (time.monotonic() + self._delay_s, self.num_passed, to, packet))


def main() -> int:
    """Train for the time asked for; 0 if nobody was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--loss", type=float, default=0.1, help="share of packets that are lost")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds on the way, one way")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print(
            "error: network namespaces need root\nhint: sudo .venv/bin/python benchmarks/lossy.py",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="oobleck-lossy-") as folder, ExitStack() as stack:
        spaces = {side: stack.enter_context(namespace(side)) for side in SIDES}
        tunnels = Tunnels((tunnel(spaces["a"], "a"), tunnel(spaces["b"], "b")), args.loss, args.delay)
        tunnels.start()
        cluster = stack.enter_context(started(Path(folder), spaces))
        rounds, jobs = train(cluster, 60 * args.minutes)
        lost = evictions(cluster)
    packets = f"{tunnels.num_lost} of {tunnels.num_lost + tunnels.num_passed} packets lost"
    print(f"{args.minutes:g} min, {packets}: {jobs} jobs, {rounds} steps, {len(lost)} nodes lost")
    for text in lost:
        print(f"  {text}")
    return 1 if lost else 0


@contextmanager
def namespace(side: str) -> Iterator[str]:
    """A network namespace with a loopback, removed at the end."""
    name = f"oobleck-{os.getpid()}-{side}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


def tunnel(space: str, side: str) -> int:
    """A TUN device in ``space``; what the kernel sends there is read from the descriptor."""
    fd, device = os.open("/dev/net/tun", os.O_RDWR), f"oob{os.getpid() % 100000}{side}"
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    ip("link", "set", device, "netns", space)
    other = ADDRESS["b" if side == "a" else "a"]
    ip("-n", space, "address", "add", ADDRESS[side], "peer", other, "dev", device)
    ip("-n", space, "link", "set", device, "up")
    return fd


def ip(*words: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def started(state: Path, spaces: dict[str, str]) -> Iterator[Cluster]:
    """Daemon and nodes, each in its namespace, until the end."""
    keys, socket, endpoint = state / "keys", state / "api.sock", f"tcp://{ADDRESS['a']}:7077"
    subprocess.run(
        [program("oobleckctl"), "keygen", *NODES, "--dir", str(keys)], check=True, capture_output=True
    )
    daemon = ["oobleckd", "--state-dir", str(state), "--socket", str(socket), "--endpoint", endpoint]
    commands = [("a", [*daemon, "--keys-dir", str(keys)])]
    for node, side in NODES.items():
        command = [
            "oobleck-worker",
            "--node",
            node,
            "--daemon",
            endpoint,
            "--bind",
            ADDRESS[side],
            "--host",
            side,
        ]
        command += [
            "--key",
            str(keys / "nodes" / f"{node}.key_secret"),
            "--server-key",
            str(keys / "server.key"),
        ]
        commands.append((side, [*command, "--run-dir", str(state / node)]))
    cluster = Cluster(state, len(NODES))
    cluster.client = Client(socket)
    with (state / "log").open("wb") as log:
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", spaces[side], program(name), *rest], stdout=log, stderr=log
            )
            for side, (name, *rest) in commands
        ]
        try:
            cluster.usable(len(NODES))
            yield cluster
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait(30)


if __name__ == "__main__":
    sys.exit(endable(main))
