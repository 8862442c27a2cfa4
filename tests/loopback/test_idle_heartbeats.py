"""Idle nodes that send heartbeats by UDP, whole: the real daemon and real agents, whose devices are
stand-ins; and what happens where UDP does not arrive.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oobleckd.ctl.local import free_endpoint
from oobleckd.daemon import keys
from oobleckd.protocol.changes import LinkClosed, NodeHere, NodeLost, NodeRevived
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.unixhttp import ClientError
from tests.helpers.daemons import Daemon, daemon

WAIT_S = 120.0
HEARTBEATS = (
    "--heartbeat-s",
    "0.25",
    "--lease-s",
    "10",
)  # so a lease is 1 s and more, once some heartbeats have come
LEASES = 24  # heartbeats
ELSEWHERE = "127.0.0.2"  # this machine too, where the daemon does not listen

Launch = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make_server_keys(tmp_path / "keys")
    keys.make_node_keys(tmp_path / "keys", "n1")
    return tmp_path


@pytest.fixture
def running(folder: Path) -> Iterator[Daemon]:
    with daemon(folder, *HEARTBEATS) as made:
        assert made.process.stderr is not None
        reader = threading.Thread(
            target=made.process.stderr.read
        )  # a pipe that nobody reads holds up who writes
        reader.start()
        yield made
        made.process.kill()
        reader.join()


@pytest.fixture
def launch(folder: Path) -> Iterator[Launch]:
    """Agents of n1, of one device."""
    started: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str) -> subprocess.Popen[bytes]:
        made = [
            sys.executable, "-m", "tests.helpers.standin_agent", "--node=n1", f"--daemon={endpoint}",
            "--devices=1", "--no-spare",
            f"--keys-dir={folder / 'keys'}", f"--run-dir={folder / 'agent'}",
        ]  # fmt: skip
        started.append(subprocess.Popen(made))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(check: Callable[[], bool], what: str) -> None:
    """Ask until it is so; the daemon may be away meanwhile."""
    pause, deadline = threading.Event(), time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError):
            if check():
                return
        pause.wait(0.1)
    raise AssertionError(f"{what}: not so within {WAIT_S:g} s")


def node(running: Daemon) -> NodeView:
    (found,) = running.client.nodes()
    return found


def counted(running: Daemon, name: str) -> int:
    return running.client.debug().counters[name]


def usable(running: Daemon) -> None:
    until(lambda: [view.state for view in running.client.nodes()] == ["standby"], "n1 stands by")


def more(running: Daemon, name: str, number: int = LEASES) -> None:
    """Wait until a counter has grown by so much."""
    before = counted(running, name)
    until(lambda: counted(running, name) >= before + number, f"{name} grows by {number}")


def unharmed(running: Daemon) -> None:
    """It was never lost, nor its connection."""
    assert node(running).state == "standby"
    assert not [data for data in told(running) if isinstance(data, (NodeLost, LinkClosed, NodeRevived))]
    assert [data.back for data in told(running) if isinstance(data, NodeHere)] == [False]


def told(running: Daemon) -> list[object]:
    """What is known of it, in fields."""
    return [change.data for change in running.client.story("node:n1")]


def test_an_idle_node_lives_by_datagrams_alone(running: Daemon, launch: Launch) -> None:
    launch(running.endpoint)
    usable(running)
    more(running, "datagram_heartbeats", 2)
    messages = counted(running, "received")
    more(running, "datagram_heartbeats")
    assert counted(running, "received") - messages < LEASES / 2, (
        "but for lost packets nothing came over ZeroMQ"
    )
    unharmed(running)
    assert counted(running, "datagrams_forged") == counted(running, "datagrams_replayed") == 0


def test_a_stopped_agent_is_lost_by_its_lease(running: Daemon, launch: Launch) -> None:
    agent = launch(running.endpoint)
    usable(running)
    more(running, "datagram_heartbeats", 10)
    agent.send_signal(signal.SIGSTOP)
    until(lambda: node(running).state == "lost", "it is lost")
    agent.send_signal(signal.SIGCONT)
    usable(running)
    more(running, "datagram_heartbeats", 10)


def test_a_killed_agent_is_gone_at_once(running: Daemon, launch: Launch) -> None:
    agent = launch(running.endpoint)
    usable(running)
    more(running, "datagram_heartbeats", 2)
    agent.kill()
    until(lambda: node(running).state in {"disconnected", "lost"}, "its connection has closed")


def test_a_key_is_changed_and_it_heartbeats_by_datagrams_again(
    running: Daemon, launch: Launch, folder: Path
) -> None:
    agent = launch(running.endpoint)
    usable(running)
    more(running, "datagram_heartbeats", 2)
    keys.rotate_node_keys(folder / "keys", "n1")
    running.process.send_signal(signal.SIGHUP)
    received = counted(running, "received")
    agent.send_signal(signal.SIGHUP)
    until(
        lambda: counted(running, "received") > received,
        "it says Hello with its new key, or waits for the reload",
    )
    usable(running)
    more(running, "datagram_heartbeats", 10)


def test_after_a_restart_of_the_daemon_it_is_back(folder: Path, launch: Launch) -> None:
    endpoint = free_endpoint()
    for _ in range(2):
        with daemon(folder, *HEARTBEATS, "--endpoint", endpoint) as running:
            if not (folder / "agent").exists():
                launch(endpoint)
            usable(running)
            more(running, "datagram_heartbeats", 10)
            assert not [data for data in told(running) if isinstance(data, NodeLost)]
            running.stop(signal.SIGKILL)


def test_without_udp_it_heartbeats_over_zeromq(folder: Path, launch: Launch) -> None:
    with daemon(folder, *HEARTBEATS, "--no-udp") as running:
        launch(running.endpoint)
        usable(running)
        more(running, "received")
        assert counted(running, "datagram_heartbeats") == 0
        unharmed(running)


class Detour:
    """The daemon at another address: its TCP always gets through, its UDP while ``open`` is set."""

    def __init__(self, endpoint: str, *, udp: bool) -> None:
        self.to = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self.endpoint = f"tcp://{ELSEWHERE}:{self.to[1]}"
        self.open, self.closed = threading.Event(), threading.Event()
        self.num_dropped = 0
        self._listener = socket.create_server((ELSEWHERE, self.to[1]))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)
        if udp:
            self.open.set()
            front, back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
            front.bind((ELSEWHERE, self.to[1]))
            back.connect(self.to)
            self._sockets += [front, back]
            self._agent: tuple[str, int] | None = None
            self._run(self._there, front, back)
            self._run(self._here, front, back)

    def _run(self, work: Callable[..., None], *args: socket.socket) -> None:
        def until_closed() -> None:
            with contextlib.suppress(OSError):
                work(*args)

        self._threads.append(threading.Thread(target=until_closed))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self.to)
            self._sockets += [near, far]
            if self.closed.is_set():
                self._shut()
                return
            self._run(self._copy, near, far)
            self._run(self._copy, far, near)

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_RDWR)

    def _there(self, front: socket.socket, back: socket.socket) -> None:
        while not self.closed.is_set():
            data, self._agent = front.recvfrom(2000)
            if self.open.is_set():
                back.send(data)
            else:
                self.num_dropped += 1

    def _here(self, front: socket.socket, back: socket.socket) -> None:
        while not self.closed.is_set():
            data = back.recv(2000)
            if self._agent is not None:
                front.sendto(data, self._agent)

    def _shut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.closed.set()
        self._shut()
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in self._sockets:
            each.close()


@pytest.fixture
def detour(running: Daemon, request: pytest.FixtureRequest) -> Iterator[Detour]:
    made = Detour(running.endpoint, udp=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("detour", [False], indirect=True)
def test_where_nobody_listens_at_the_port_it_heartbeats_over_zeromq(
    running: Daemon, launch: Launch, detour: Detour
) -> None:
    launch(detour.endpoint)
    usable(running)
    more(running, "received")
    assert counted(running, "datagram_heartbeats") == 0
    unharmed(running)


@pytest.mark.parametrize("detour", [True], indirect=True)
def test_where_udp_comes_and_goes_no_node_does(running: Daemon, launch: Launch, detour: Detour) -> None:
    launch(detour.endpoint)
    usable(running)
    for _ in range(2):
        more(running, "datagram_heartbeats", 10)
        detour.open.clear()
        more(running, "received")
        assert detour.num_dropped > 0
        detour.open.set()
    more(running, "datagram_heartbeats", 10)
    unharmed(running)
