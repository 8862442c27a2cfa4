"""Mutated frames, datagrams and requests against a running daemon: it answers, or does not, and goes on;
never with a fault of its own, and with the same memory.

5,000 of each here; ``make soak`` sends 100,000.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.daemon import keys
from oobleckd.protocol.agentmessages import Heartbeat, Welcome
from oobleckd.protocol.datagrams import Sender
from oobleckd.protocol.job import parse_job
from tests.helpers.agents import Agent, hello
from tests.helpers.daemons import Daemon, daemon
from tests.helpers.fuzz import http_requests, mutated, worker_frames

FEW, MANY = 5_000, 100_000
_A_CONNECTION = 50  # frames: the daemon looks at no more than 64 damaged ones of a connection
_GROWTH_KIB = 24 * 1024
JOB = {"name": "small", "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("fuzz")
    for node in ("node-1", "node-2"):
        keys.make_node_keys(folder / "keys", node)
    with daemon(folder, "--lease-s", "3600", "--allow-injection") as made:
        said = made.process.stderr
        assert said is not None
        log: list[str] = []
        # A pipe that nobody reads holds up who writes.
        reader = threading.Thread(target=log.extend, args=(said,))
        reader.start()
        made.client.submit(parse_job(JOB))
        yield made
        made.process.kill()
        reader.join()
    assert not [line for line in log if line.startswith("Traceback")]


def resident_kib(running: Daemon) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1])


def still_well(running: Daemon) -> None:
    assert running.process.poll() is None, "the daemon has ended"
    assert running.client.healthy()


def frames(running: Daemon, count: int, seed: int) -> None:
    dice, corpus = random.Random(f"frames {seed}"), worker_frames("node-1")
    for _ in range(0, count, _A_CONNECTION):
        agent = running.agent("node-1")
        agent.socket.linger = 10_000
        if dice.random() < 0.8:
            agent.say(hello("node-1"))
        for _ in range(_A_CONNECTION):
            agent.say(mutated(dice, corpus))
        agent.close()


def datagrams(running: Daemon, count: int, seed: int) -> None:
    """Mutated heartbeats of a node, and then an honest one, which is answered."""
    dice = random.Random(f"datagrams {seed}")
    agent = running.agent("node-1")
    agent.say(hello("node-1"))
    welcome = agent.listen()
    assert isinstance(welcome, Welcome)
    assert welcome.datagrams is not None
    agent.say(Heartbeat("incarnation.1"))
    found = welcome.datagrams
    sender, corpus = (Sender(found.session, found.key) for _ in range(2))
    valid = [corpus.heartbeat()[0] for _ in range(20)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", found.port))
        for _ in range(count):
            sock.send(mutated(dice, valid))
        sock.settimeout(0.05)
        sender.counter = len(valid)
        for _ in range(2400):  # the kernel may drop one, and the connection's heartbeat may come later
            sock.send(sender.heartbeat()[0])
            with contextlib.suppress(TimeoutError):
                sender.heard(sock.recv(1000))
                if sender.acked > len(valid):
                    break
    assert sender.acked > len(valid)
    agent.close()


def answers(running: Daemon, count: int, seed: int) -> list[int]:
    """The status of each answer; 0: it closed without one."""
    dice, corpus, found = random.Random(f"requests {seed}"), http_requests(), []
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(running.client.socket_path))
            sock.settimeout(60)
            try:
                sock.sendall(mutated(dice, corpus))
                sock.shutdown(socket.SHUT_WR)
                line = sock.recv(64)
            except (BrokenPipeError, ConnectionResetError):
                line = b""
        status = re.match(rb"HTTP/1\.[01] (\d{3}) ", line)
        found.append(int(status[1]) if status else 0)
    return found


def fuzz_frames(running: Daemon, count: int) -> None:
    frames(running, count // 2, 1)
    still_well(running)
    before = resident_kib(running)
    frames(running, count // 2, 2)
    still_well(running)
    assert resident_kib(running) - before < _GROWTH_KIB
    honest: Agent = running.agent("node-2")
    honest.say(hello("node-2"))
    assert type(honest.listen()).__name__ == "Welcome"
    honest.close()


def fuzz_datagrams(running: Daemon, count: int) -> None:
    datagrams(running, count // 2, 1)
    before = resident_kib(running)
    datagrams(running, count // 2, 2)
    still_well(running)
    assert resident_kib(running) - before < _GROWTH_KIB


def fuzz_requests(running: Daemon, count: int) -> None:
    found = answers(running, count // 2, 1)
    before = resident_kib(running)
    found += answers(running, count // 2, 2)
    still_well(running)
    assert [status for status in found if status >= 500] == []
    assert {200, 400, 404} <= set(found), "the requests are too damaged, or not enough"
    assert resident_kib(running) - before < _GROWTH_KIB


def test_mutated_frames(running: Daemon) -> None:
    fuzz_frames(running, FEW)


def test_mutated_datagrams(running: Daemon) -> None:
    fuzz_datagrams(running, FEW)


def test_mutated_requests(running: Daemon) -> None:
    fuzz_requests(running, FEW)


@pytest.mark.slow
def test_many_mutated_frames(running: Daemon) -> None:
    fuzz_frames(running, MANY)


@pytest.mark.slow
def test_many_mutated_datagrams(running: Daemon) -> None:
    fuzz_datagrams(running, MANY)


@pytest.mark.slow
def test_many_mutated_requests(running: Daemon) -> None:
    fuzz_requests(running, MANY)
