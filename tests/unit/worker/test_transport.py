"""The transport within one process: real sockets, what is sent, who is let in, who is reported lost."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import Peer
from worker import handshake, outgoing, sockets, wire
from worker.framing import FrameBuffer, FrameError, frame, read_frame, write_frame
from worker.mailbox import Key, Letter, Mailbox
from worker.transport import Transport

SECRET = bytes(range(32))
TIMEOUT_S = 30.0


class Device:
    """A transport and what it reported."""

    def __init__(self, name: str, directory: Path, host: str = "here", handshake_s: float = 10.0) -> None:
        self.mailbox = Mailbox()
        self.lost: list[tuple[str, str]] = []
        self.transport = Transport(
            name, host, self.mailbox, local_dir=directory, on_peer_lost=self._on_lost, handshake_s=handshake_s
        )

    def _on_lost(self, peer: str, why: str) -> None:
        self.lost.append((peer, why))
        self.mailbox.post("lost")

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for letters and losses until ``done``."""
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            assert self.mailbox.wait(deadline - time.monotonic()), "nothing came"

    def receive(self, key: Key) -> Letter:
        """Wait for the letter of ``key``."""
        got: list[Letter] = []

        def done() -> bool:
            letter = self.mailbox.take(key)
            if letter is not None:
                got.append(letter)
            return bool(got)

        self.until(done)
        return got[0]


Make = Callable[..., Device]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Device] = []

    def start(name: str, host: str = "here", handshake_s: float = 10.0) -> Device:
        made.append(Device(name, tmp_path, host, handshake_s))
        return made[-1]

    yield start
    for device in made:
        device.transport.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("transport-")]


def introduce(*devices: Device, secret: bytes = SECRET) -> None:
    peers = {device.transport.device: device.transport.peer for device in devices}
    for device in devices:
        device.transport.configure(peers, secret)


def payloads() -> list[Tensor]:
    many = torch.arange(300_000, dtype=torch.float32)
    return [
        many,
        many.to(torch.bfloat16).reshape(100, 3000),
        torch.arange(7, dtype=torch.int64),
        torch.tensor(3.25, dtype=torch.float64),
        torch.empty(0, 5, dtype=torch.float32),
        torch.arange(250, dtype=torch.uint8),
        torch.arange(12, dtype=torch.float16).reshape(3, 4).t(),
        torch.tensor([True, False]),
        torch.ones(3, requires_grad=True),
    ]


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_tensors_arrive_bit_for_bit(make: Make, host: str) -> None:
    a, b = make("a/0"), make("b/0", host)
    introduce(a, b)
    sent = payloads()
    assert a.transport.send("b/0", ("f", 1, "x", 2), sent, b"meta")
    letter = b.receive(("f", 1, "x", 2))
    assert (letter.source, letter.meta) == ("a/0", b"meta")
    assert len(letter.tensors) == len(sent)
    for got, want in zip(letter.tensors, sent, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)
        assert got.is_contiguous()
        assert got.numel() == 0 or got.data_ptr() % 64 == 0


def test_letters_without_tensors_and_with_thousands(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f",), [])
    a.transport.send("b/0", ("g",), [torch.full((3,), i) for i in range(3000)])
    assert b.receive(("f",)).tensors == []
    assert [int(t[2]) for t in b.receive(("g",)).tensors] == list(range(3000))


def test_many_letters_keep_their_order_both_ways_at_once(make: Make) -> None:
    a, b = make("a/0"), make("b/0", "elsewhere")
    introduce(a, b)
    for index in range(200):
        a.transport.send("b/0", ("f",), [torch.full((index * 37,), index)])
        b.transport.send("a/0", ("f",), [torch.full((index * 37,), index)])
    for device in (a, b):
        for index in range(200):
            tensor = device.receive(("f",)).tensors[0]
            assert tensor.shape == (index * 37,)
            assert bool((tensor == index).all())
    assert a.transport.flush(TIMEOUT_S)
    assert a.lost == b.lost == []


def test_a_tensor_without_a_form_on_the_wire_is_refused(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    with pytest.raises(wire.WireError, match="complex64"):
        a.transport.send("b/0", ("f",), [torch.zeros(1, dtype=torch.complex64)])


def test_an_early_letter_waits_for_the_receiver_to_be_configured(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    a.transport.configure({"b/0": b.transport.peer}, SECRET)
    assert a.transport.send("b/0", ("f",), [torch.ones(2)])
    b.transport.configure({"a/0": a.transport.peer}, SECRET)
    assert torch.equal(b.receive(("f",)).tensors[0], torch.ones(2))


def test_a_receiver_that_takes_long_to_be_configured_is_not_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "_RETRY_S", (0.6, 0.6))
    a, b = make("a/0", handshake_s=1.5), make("b/0", handshake_s=0.02)
    a.transport.configure({"b/0": b.transport.peer}, SECRET)
    assert a.transport.send("b/0", ("f",), [torch.ones(2)])
    while b.transport.counts.refused < 4:  # by then more than a's 1.5 s are over
        threading.Event().wait(0.01)
    b.transport.configure({"a/0": a.transport.peer}, SECRET)
    b.receive(("f",))
    assert a.lost == []


def test_a_new_secret_leaves_old_links_open(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f", 1), [])
    b.receive(("f", 1))
    introduce(a, b, secret=b"n" * 32)
    a.transport.send("b/0", ("f", 2), [])
    b.transport.send("a/0", ("f", 3), [])
    b.receive(("f", 2))
    a.receive(("f", 3))
    assert a.lost == b.lost == []


def test_goodbye_is_no_loss_and_drops_later_letters(make: Make) -> None:
    a, b, c = make("a/0"), make("b/0"), make("c/0", "elsewhere")
    introduce(a, b, c)
    for one, other in ((a, "b/0"), (b, "a/0"), (c, "a/0")):
        one.transport.send(other, ("f", 1), [])
    b.receive(("f", 1))
    a.receive(("f", 1))
    a.receive(("f", 1))
    a.transport.close()
    for device in (b, c):
        while device.transport.send("a/0", ("f", 2), []):
            threading.Event().wait(0.001)
        assert device.lost == []


def test_close_hands_over_what_was_sent_before(make: Make) -> None:
    a, b = make("a/0"), make("b/0", "elsewhere")
    introduce(a, b)
    big = torch.arange(3_000_000)
    a.transport.send("b/0", ("f", 1), [big])
    a.transport.close()
    assert torch.equal(b.receive(("f", 1)).tensors[0], big)
    assert b.lost == []


def test_nobody_at_the_address_is_a_loss_reported_once(make: Make, tmp_path: Path) -> None:
    a = make("a/0")
    gone = Device("b/0", tmp_path)
    address = gone.transport.peer
    gone.transport.close()
    a.transport.configure({"b/0": address}, SECRET)
    a.transport.send("b/0", ("f", 1), [])
    a.until(lambda: bool(a.lost))
    assert not a.transport.send("b/0", ("f", 2), [])
    assert [peer for peer, _ in a.lost] == ["b/0"]
    assert a.transport.counts.dropped == 1


def test_a_new_life_replaces_the_old_one(make: Make, tmp_path: Path) -> None:
    a, old = make("a/0"), Device("b/0", tmp_path / "old")
    introduce(a, old)
    old.transport.send("a/0", ("f", 1), [])
    a.receive(("f", 1))
    new = make("b/0")
    introduce(a, new)
    a.transport.send("b/0", ("f", 2), [])
    new.receive(("f", 2))
    old.transport.close()
    assert a.lost == []


def test_the_forgotten_are_not_reported_and_not_let_in(make: Make) -> None:
    a, b = make("a/0", handshake_s=0.2), make("b/0", handshake_s=0.2)
    introduce(a, b)
    b.transport.send("a/0", ("f", 1), [])
    a.receive(("f", 1))
    a.transport.forget(["b/0"])
    assert not a.transport.send("b/0", ("f", 2), [])
    while b.transport.send("a/0", ("f", 3), []):
        threading.Event().wait(0.001)
    assert a.mailbox.take(("f", 3)) is None
    introduce(a, b)
    b.transport.send("a/0", ("f", 4), [])
    a.receive(("f", 4))
    assert a.lost == b.lost == []


def test_a_peer_that_does_not_read_holds_up_nobody_else(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    silent = socket.create_server(("127.0.0.1", 0))
    host, port = silent.getsockname()
    introduce(a, b)
    a.transport.configure({"s/0": Peer(f"{host}:{port}", "/nowhere/s.sock", "far")}, SECRET)
    a.transport.send("s/0", ("f", 1), [torch.zeros(1000)])
    a.transport.send("b/0", ("f", 1), [torch.zeros(1000)])
    b.receive(("f", 1))
    assert not a.transport.flush(0.01)
    a.transport.forget(["s/0"])
    assert a.transport.flush(TIMEOUT_S)
    silent.close()


# ---------------------------------------------------------------------- strangers


def dial(device: Device) -> socket.socket:
    sock = sockets.open_socket(device.transport.peer, unix=False)
    sock.settimeout(TIMEOUT_S)
    sockets.connect(sock, device.transport.peer, unix=False)
    return sock


def greet(sock: socket.socket, secret: bytes, target: str = "b/0") -> None:
    handshake.connect(sock, source="a/0", life="life", target=target, secret=secret)


def refused(device: Device, why: str, secret: bytes, target: str) -> None:
    with dial(device) as sock:
        with pytest.raises(handshake.HandshakeError, match=why):
            greet(sock, secret, target)
        assert sock.recv(1) == b""  # the acceptor counts before it closes


def test_without_the_secret_nobody_gets_anywhere(make: Make) -> None:
    b = make("b/0", handshake_s=1)
    b.transport.configure({}, SECRET)
    refused(b, "does not know the secret", b"x" * 32, "b/0")
    refused(b, "not c/0", SECRET, "c/0")
    with dial(b) as sock:
        greet(sock, SECRET)
    assert b.transport.counts.refused == 2


def hello(version: int = PROTOCOL) -> bytes:
    greeting = handshake.Greeting(version, "a/0", "life", "b/0", handshake.key_name(SECRET), b"n" * 32)
    return msgspec.msgpack.encode(greeting)


def test_a_forged_proof_is_refused(make: Make) -> None:
    b = make("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        write_frame(sock, hello())
        assert read_frame(sock) is not None
        write_frame(sock, b"p" * 32)
        assert read_frame(sock) is None
    assert b.transport.counts.refused == 1


def test_a_replayed_handshake_is_refused(make: Make) -> None:
    """Word for word what somebody said who was let in."""
    b = make("b/0")
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


def test_the_secret_of_an_old_epoch_opens_nothing(make: Make) -> None:
    """That of the epoch before still does: a peer may hear of the new one a little later."""
    b = make("b/0", handshake_s=1)
    epochs = [bytes([number]) * 32 for number in range(3)]
    for secret in epochs:
        b.transport.configure({}, secret)
    refused(b, "does not know the secret", epochs[0], "b/0")
    for secret in epochs[1:]:
        with dial(b) as sock:
            greet(sock, secret)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", frame(b"\xc1"), frame(b"")])
def test_garbage_is_refused_and_counted(make: Make, garbage: bytes) -> None:
    b = make("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        sock.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert b.transport.counts.refused == 1


def test_another_protocol_version_is_refused(make: Make) -> None:
    b = make("b/0")
    b.transport.configure({}, SECRET)
    with dial(b) as sock:
        write_frame(sock, hello(PROTOCOL + 1))
        answer = read_frame(sock)
    assert answer is not None
    assert b"speaks protocol" in answer


def test_a_damaged_frame_is_a_loss(make: Make) -> None:
    b = make("b/0")
    life = Peer("127.0.0.1:1", "/nowhere", "far")
    b.transport.configure({"a/0": life}, SECRET)
    with dial(b) as sock:
        handshake.connect(
            sock, source="a/0", life=f"{life.address} {life.local}", target="b/0", secret=SECRET
        )
        sock.sendall(b"\0" * 64)
        b.until(lambda: bool(b.lost))
    assert b.lost == [("a/0", "damaged frame header")]


@pytest.mark.parametrize(
    ("dtypes", "shapes", "why"),
    [
        ((0,), ((2**60,),), "cannot be made"),
        ((99,), ((1,),), "cannot be made"),
        ((0, 0), ((1,),), "cannot be made"),
        ((0,), ((3,),), "does not have the size"),
    ],
)
def test_a_letter_that_contradicts_itself_is_damage(
    dtypes: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], why: str
) -> None:
    one, other = socket.socketpair()
    with one, other:
        body = msgspec.msgpack.encode((("f",), b"", dtypes, shapes))
        one.sendall(struct.pack("<4sBxxxIQ", b"OBLK", 1, len(body), 8) + body + bytes(8))
        with pytest.raises(wire.WireError, match=why):
            wire.LetterReader(other, "a/0").read()


# ---------------------------------------------------------------------- framing


def test_frame_buffer_cuts_at_any_place() -> None:
    frames = [b"", b"one", bytes(5000), b"last"]
    stream = b"".join(map(frame, frames))
    for step in (1, 3, 4, 1000, len(stream)):
        buffer = FrameBuffer()
        got = [f for i in range(0, len(stream), step) for f in buffer.feed(stream[i : i + step])]
        assert got == frames


def test_frames_have_a_limit() -> None:
    with pytest.raises(FrameError, match="longer than"):
        FrameBuffer().feed(b"\xff\xff\xff\xff")


def test_frames_on_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        write_frame(one, b"hello")
        one.sendall(frame(b"cut short")[:6])
        one.shutdown(socket.SHUT_WR)
        assert read_frame(other) == b"hello"
        with pytest.raises(EOFError):
            read_frame(other)
        assert read_frame(other) is None


def test_a_peer_that_is_forgotten_and_named_again_is_not_lost(make: Make) -> None:
    """The end of the links that we closed ourselves may be read only after the peer is back."""
    a, b = make("a/0", handshake_s=0.2), make("b/0", handshake_s=0.2)
    introduce(a, b)
    for number in range(20):
        b.transport.send("a/0", ("f", number), [])
        a.receive(("f", number))
        a.transport.forget(["b/0"])
        while b.transport.send("a/0", ("late", number), []):
            threading.Event().wait(0.0001)
        introduce(a, b)
    assert a.lost == []


def test_a_goodbye_that_is_heard_only_after_its_sender_was_named_again_is_of_the_links_before(
    make: Make,
) -> None:
    """All give a job back and are in the next layout at once: what is sent then was dropped, for ever."""
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    b.transport.send("a/0", ("f", 1), [])
    a.receive(("f", 1))
    a.transport.block(0.0)  # its reader gets no further than the goodbye
    b.transport.forget(["a/0"])
    a.transport.forget(["b/0"])
    introduce(a, b, secret=b"n" * 32)
    a.transport.block(0.001)
    sent = 0
    while a.transport._incoming or not sent:  # until it was heard, and once more
        sent += a.transport.send("b/0", ("f", sent), [])
    assert a.transport.send("b/0", ("f", "last"), [])
    b.receive(("f", "last"))
    assert a.transport.counts.dropped == 0


def test_an_end_that_is_told_only_after_its_peer_was_named_again_is_of_the_links_before(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f", 1), [])
    b.receive(("f", 1))
    link = a.transport._known["b/0"].link
    assert link is not None
    with a.transport._changed:  # whoever tells it has to wait
        b.transport.forget(["a/0"])
        assert link._stopped.wait(TIMEOUT_S)
        a.transport.forget(["b/0"])
        introduce(a, b, secret=b"n" * 32)
        assert a.transport.send("b/0", ("f", 2), [])
    b.receive(("f", 2))
    assert a.transport.send("b/0", ("f", 3), [])
    b.receive(("f", 3))
    assert a.lost == []


def test_what_can_wait_leaves_behind_all_others_and_in_its_own_order(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    a.transport.block(0.0)
    for number in range(3):
        assert a.transport.send("b/0", ("S", number), [torch.ones(3)], later=True)
        assert a.transport.send("b/0", ("F", number), [])
    assert not a.transport.flush(0.01)
    a.transport.block(0.001)
    b.receive(("S", 2))
    assert a.transport.flush(TIMEOUT_S)
    assert list(b.mailbox.keys()) == [("F", 0), ("F", 1), ("F", 2), ("S", 0), ("S", 1)]


def test_what_has_not_left_is_taken_back(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    assert a.transport.recall("b/0", lambda _: True) == []  # no link is there yet
    a.transport.block(0.0)
    for number in range(4):
        a.transport.send("b/0", ("S", number), [], later=True)
    a.transport.send("b/0", ("F", 0), [])
    assert a.transport.recall("b/0", lambda key: key != ("S", 2)) == [("S", 0), ("S", 1), ("S", 3)]
    assert a.transport.counts.dropped == 3
    a.transport.block(0.001)
    b.receive(("S", 2))
    assert list(b.mailbox.keys()) == [("F", 0)]
    assert a.transport.recall("b/0", lambda _: True) == []
    assert a.transport.recall("c/0", lambda _: True) == []


def test_taking_all_back_leaves_nothing_to_flush(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    a.transport.block(0.0)
    a.transport.send("b/0", ("S", 0), [], later=True)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(a.transport.flush, TIMEOUT_S)
        assert a.transport.recall("b/0", lambda _: True) == [("S", 0)]
        assert flushed.result(TIMEOUT_S)
    a.transport.block(0.001)


def test_what_can_wait_is_dropped_with_its_link(make: Make) -> None:
    a, b = make("a/0"), make("b/0")
    introduce(a, b)
    a.transport.block(0.0)
    a.transport.send("b/0", ("S", 0), [], later=True)
    a.transport.forget(["b/0"])
    assert not a.transport.send("b/0", ("S", 1), [], later=True)
    a.transport.block(0.001)
