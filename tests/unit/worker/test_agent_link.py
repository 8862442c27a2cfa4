"""Both ends of the socket between an agent and a device process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import Ack
from oobleckd.protocol.artifactmessages import ArtifactHere, WantArtifact
from oobleckd.protocol.message import Message
from oobleckd.protocol.messages import LinkDown, Resume
from oobleckd.worker.agent.device_link import AgentSide
from oobleckd.worker.artifacts.asking import Asking
from oobleckd.worker.device.agent_link import AGENT_GONE, DeviceLink
from oobleckd.worker.runtime.framing import read_frame, write_frame
from oobleckd.worker.transport.mailbox import Mailbox

TIMEOUT_S = 30.0


def test_messages_land_in_the_mailbox_and_unknown_ones_do_not() -> None:
    ours, theirs = socket.socketpair()
    closed = threading.Event()
    mailbox = Mailbox()
    link = DeviceLink(theirs.detach(), mailbox, on_closed=closed.set)
    with ours:
        write_frame(ours, codec.encode(Resume("n/0", 3, 2)))
        write_frame(ours, b"\x81\xa4type\xa4What")
        write_frame(ours, codec.encode(Ack("j", 1)))
        got: list[object] = []
        while len(got) < 2:
            assert mailbox.wait(TIMEOUT_S)
            got += mailbox.controls()
        assert got == [Resume("n/0", 3, 2), Ack("j", 1)]
        assert link.num_unknown == 1
        link.send(LinkDown("n/0", "m/0", "why"))
        data = read_frame(ours)
        assert data is not None
        assert codec.decode_from_worker(data) == LinkDown("n/0", "m/0", "why")
    assert closed.wait(TIMEOUT_S)
    link.close()


def test_what_a_device_that_compiles_waits_for_comes_past_the_mailbox() -> None:
    """Its loop reads none while it compiles."""
    ours, theirs = socket.socketpair()
    mailbox, closed = Mailbox(), threading.Event()

    def say(message: Message) -> None:
        link.send(message)

    asking = Asking(say)
    link = DeviceLink(theirs.detach(), mailbox, on_closed=closed.set, on_artifact=asking.heard)
    with ours:
        write_frame(ours, codec.encode(Ack("j", 1)))
        write_frame(ours, codec.encode(ArtifactHere("key", "/a/file")))
        assert asking.want("key") == Path("/a/file")
        data = read_frame(ours)
        assert data is not None
        assert codec.decode_from_worker(data) == WantArtifact("key")
        assert mailbox.controls() == [Ack("j", 1)]
    assert closed.wait(TIMEOUT_S)
    link.close()


def test_a_device_ends_when_its_agent_s_end_closes() -> None:
    ours, theirs = socket.socketpair()
    code = (
        "import sys, threading; from oobleckd.worker.device.agent_link import DeviceLink; from "
        "oobleckd.worker.transport.mailbox import Mailbox; "
        "DeviceLink(int(sys.argv[1]), Mailbox()); threading.Event().wait()"
    )
    fd = theirs.fileno()
    process = subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd])
    theirs.close()
    ours.close()
    assert process.wait(TIMEOUT_S) == AGENT_GONE


def test_large_and_small_frames_through_a_full_socket() -> None:
    sizes = [0, 1, 3_000_000, 17, 70_000]

    async def talk() -> None:
        ours, theirs = socket.socketpair()
        got: list[bytes | None] = []
        back: list[bytes] = []
        ended = asyncio.Event()
        link = AgentSide(asyncio.get_running_loop(), ours, on_frame=back.append, on_end=ended.set)
        for size in sizes:
            link.send(bytes(size))

        def echo() -> None:
            with theirs:
                for _ in sizes:
                    got.append(read_frame(theirs))
                    assert got[-1] is not None
                    write_frame(theirs, got[-1])

        await asyncio.to_thread(echo)
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        assert [len(data or b"") for data in got] == [len(data) for data in back] == sizes
        link.close()
        ours.close()

    asyncio.run(talk())


@pytest.mark.parametrize("last", [b"last words", b""])
def test_drain_hears_last_words(last: bytes) -> None:
    async def talk() -> list[bytes]:
        ours, theirs = socket.socketpair()
        back: list[bytes] = []
        link = AgentSide(asyncio.get_running_loop(), ours, on_frame=back.append, on_end=lambda: None)
        write_frame(theirs, last)
        theirs.close()
        link.drain()
        ours.close()
        return back

    assert asyncio.run(talk()) == [last]
