"""The transport between real processes, one of which dies by SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.protocol.parts import Peer
from oobleckd.worker.transport.mailbox import Mailbox
from oobleckd.worker.transport.transport import Transport
from tests.helpers.transport_peer import Setup

TIMEOUT_S = 60.0


class Pair:
    """This process' transport and a process that echoes."""

    def __init__(self, directory: Path, host: str) -> None:
        self.mailbox = Mailbox()
        self.transport = Transport(
            "a/0", "here", self.mailbox, local_dir=directory,
            on_peer_lost=lambda peer, why: self.mailbox.put_control((peer, why)),
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.transport_peer", "b/0", host, str(directory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        peer = msgspec.json.decode(self.process.stdout.readline(), type=Peer)
        setup = Setup({"a/0": self.transport.peer}, bytes(32).hex())
        self.process.stdin.write(msgspec.json.encode(setup).decode() + "\n")
        self.process.stdin.flush()
        self.transport.configure({"b/0": peer}, bytes(32))

    def controls(self) -> list[tuple[str, str]]:
        """Wait for control messages: losses."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (controls := self.mailbox.controls()):
            assert self.mailbox.wait(deadline - time.monotonic()), "no loss was reported"
        return controls

    def pongs(self, number: int) -> None:
        """Wait for that many pongs, and take them."""
        got, deadline = 0, time.monotonic() + TIMEOUT_S
        while got < number:
            assert self.mailbox.wait(deadline - time.monotonic()), "no pong came"
            got += len(self.mailbox.take_all("pong"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.transport.close()


@pytest.fixture(params=["here", "elsewhere"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, request.param)
    yield made
    made.close()


def test_kill_is_reported_once_and_after_all_that_was_sent(pair: Pair) -> None:
    block = torch.zeros(50_000)
    for index in range(100):
        pair.transport.send("b/0", ("ping", index), [block])
    pair.pongs(1)
    pair.process.kill()
    assert [peer for peer, _ in pair.controls()] == ["b/0"]
    there = pair.mailbox.keys()
    assert not pair.transport.send("b/0", ("ping", 0), [block])
    assert pair.transport.flush(TIMEOUT_S)
    pair.transport.close()
    assert pair.mailbox.keys() == there
    assert pair.mailbox.controls() == []


def test_a_silent_link_reports_the_kill_too(pair: Pair) -> None:
    pair.transport.send("b/0", ("ping", 0), [torch.ones(1)])
    pair.pongs(1)
    pair.process.kill()
    assert [peer for peer, _ in pair.controls()] == ["b/0"]


def test_an_orderly_end_is_no_loss(pair: Pair) -> None:
    pair.transport.send("b/0", ("ping", 0), [torch.ones(1)])
    pair.pongs(1)
    assert pair.process.stdin is not None
    pair.process.stdin.close()
    assert pair.process.wait(TIMEOUT_S) == 0
    while pair.transport.send("b/0", ("ping", 1), []):
        pair.mailbox.wait(0.001)
    assert pair.mailbox.controls() == []
