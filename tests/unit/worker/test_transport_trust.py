"""Strangers: who is let in, and what is done with those who are not."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import msgspec
import pytest

from oobleckd.protocol.messages import PROTOCOL
from oobleckd.worker.runtime.framing import frame, read_frame, write_frame
from oobleckd.worker.transport import handshake
from tests.helpers.transports import SECRET, TIMEOUT_S, Device, MakeDevice, dial


def greet(sock: socket.socket, secret: bytes, target: str = "b/0") -> None:
    handshake.connect(sock, source="a/0", incarnation="life", target=target, secret=secret)


def refused(device: Device, why: str, secret: bytes, target: str) -> None:
    with dial(device) as sock:
        with pytest.raises(handshake.HandshakeError, match=why):
            greet(sock, secret, target)
        assert sock.recv(1) == b""  # the acceptor counts before it closes


def test_without_the_secret_nobody_gets_anywhere(make_device: MakeDevice) -> None:
    b = make_device("b/0", handshake_s=1)
    b.transport.configure({}, SECRET)
    refused(b, "does not know the secret", b"x" * 32, "b/0")
    refused(b, "not c/0", SECRET, "c/0")
    with dial(b) as sock:
        greet(sock, SECRET)
    assert b.transport.counts.refused == 2


def hello(version: int = PROTOCOL) -> bytes:
    greeting = handshake.Greeting(version, "a/0", "life", "b/0", handshake.key_name(SECRET), b"n" * 32)
    return msgspec.msgpack.encode(greeting)


def test_a_forged_proof_is_refused(make_device: MakeDevice) -> None:
    b = make_device("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        write_frame(sock, hello())
        assert read_frame(sock) is not None
        write_frame(sock, b"p" * 32)
        assert read_frame(sock) is None
    assert b.transport.counts.refused == 1


def test_a_replayed_handshake_is_refused(make_device: MakeDevice) -> None:
    """Word for word what somebody said who was let in."""
    b = make_device("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        write_frame(sock, hello())
        answer = read_frame(sock)
        assert answer is not None
        nonce = msgspec.msgpack.decode(answer)[0]
        proof = handshake._proof(SECRET, b"connector", hello(), nonce)
        write_frame(sock, proof)
        assert read_frame(sock) == b"accepted"
    with dial(b) as sock:
        write_frame(sock, hello())
        assert read_frame(sock) is not None
        write_frame(sock, proof)
        assert read_frame(sock) is None
    assert b.transport.counts.refused == 1


def test_the_secret_of_an_old_generation_opens_nothing(make_device: MakeDevice) -> None:
    """That of the epoch before still does: a peer may hear of the new one a little later."""
    b = make_device("b/0", handshake_s=1)
    epochs = [bytes([number]) * 32 for number in range(3)]
    for secret in epochs:
        b.transport.configure({}, secret)
    refused(b, "does not know the secret", epochs[0], "b/0")
    for secret in epochs[1:]:
        with dial(b) as sock:
            greet(sock, secret)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", frame(b"\xc1"), frame(b"")])
def test_garbage_is_refused_and_counted(make_device: MakeDevice, garbage: bytes) -> None:
    b = make_device("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        sock.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert b.transport.counts.refused == 1


def test_another_protocol_version_is_refused(make_device: MakeDevice) -> None:
    b = make_device("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        write_frame(sock, hello(PROTOCOL + 1))
        answer = read_frame(sock)
    assert answer is not None
    assert b"speaks protocol" in answer


def test_a_stranger_who_comes_as_the_transport_is_closed(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``close`` saw the thread that was to serve him before it was started."""
    b = make_device("b/0")
    starting, may_start = threading.Event(), threading.Event()
    start, join = threading.Thread.start, threading.Thread.join

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "transport-reader":
            starting.set()
            assert may_start.wait(TIMEOUT_S)
        start(thread)

    def join_all(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout if may_start.is_set() else 0.0)  # the one that accepts ends only afterwards

    monkeypatch.setattr(threading.Thread, "start", start_late)
    monkeypatch.setattr(threading.Thread, "join", join_all)
    with dial(b), ThreadPoolExecutor(1) as pool:
        assert starting.wait(TIMEOUT_S)
        closed = pool.submit(b.transport.close)
        wait([closed], 0.2)  # it may fail until then, or wait for the thread
        may_start.set()
        closed.result(TIMEOUT_S)
