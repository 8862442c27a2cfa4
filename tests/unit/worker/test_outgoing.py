"""What the other end of a link hears when it is stopped: a goodbye, but never one within a message."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from oobleckd.protocol.parts import Peer
from oobleckd.worker.transport import sockets, wire
from oobleckd.worker.transport.outgoing import Outgoing
from tests.helpers.transports import TIMEOUT_S, MakeDevice, introduce

_LATE_S = 0.2


class LateSocket(socket.socket):
    """A socket whose messages are there before its writer hears that they have left, as on a busy machine."""

    def sendmsg(self, *args) -> int:  # type: ignore[no-untyped-def,override]
        sent = super().sendmsg(*args)
        threading.Event().wait(_LATE_S)
        return sent


@pytest.fixture
def link(tmp_path: Path) -> Outgoing:
    """A link to a listener at ``tmp_path`` that nobody accepts from yet."""
    unblocked = threading.Event()
    unblocked.set()

    def spawn(run, name: str) -> None:  # type: ignore[no-untyped-def]
        threading.Thread(target=run, name=name, daemon=True).start()

    return Outgoing(
        Peer("", str(tmp_path / "b.sock"), "here"),
        unix=True,
        timeout_s=TIMEOUT_S,
        spawn=spawn,
        greet=lambda sock: None,
        unblocked=unblocked,
        on_end=lambda link, why: None,
    )


@pytest.mark.parametrize("num_values", [0, 2**18])
def test_who_got_a_whole_message_hears_the_goodbye_behind_it(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch, num_values: int
) -> None:
    """It was a loss if the writer had yet to hear that its message had left: of one who only went on
    elsewhere.
    """

    def open_late(peer: Peer, *, unix: bool) -> socket.socket:
        return LateSocket(fileno=open_socket(peer, unix=unix).detach())

    open_socket = sockets.open_socket
    monkeypatch.setattr(sockets, "open_socket", open_late)
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f", 0), [torch.ones(num_values)])
    b.receive(("f", 0))
    a.transport.forget(["b/0"])
    while b.transport._incoming:
        threading.Event().wait(0.001)
    assert b.lost == []


def test_no_goodbye_is_written_into_a_message(
    link: Outgoing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a message that lacked no more than a goodbye's bytes its receiver would have made a whole one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "b.sock"))
        listener.listen()
        link.send(wire.message_frame(("f", 0), [], b""))
        assert link.flush(time.monotonic() + TIMEOUT_S)
        monkeypatch.setattr(os, "eventfd_write", lambda fd, value: None)  # the writer thread is late
        big = wire.message_frame(("f", 1), [torch.ones(2**22)], b"")
        link.send(big)
        assert big.has_begun
        monkeypatch.undo()
        sock, _ = listener.accept()
        with sock:
            sock.recv(2**20, socket.MSG_WAITALL)  # there is room for a goodbye
            link.stop()
            rest = b"".join(iter(lambda: sock.recv(2**20), b""))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert wire.goodbye_frame().write_now(ours)
        goodbye = theirs.recv(2**10)
    assert rest
    assert not rest.endswith(goodbye)
