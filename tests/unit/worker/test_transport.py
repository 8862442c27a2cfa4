"""The transport within one process: real sockets, what is sent and what arrives."""

from __future__ import annotations

import socket
import struct
import threading

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.protocol.parts import Peer
from oobleckd.worker.transport import handshake, outgoing, wire
from tests.helpers.transports import SECRET, TIMEOUT_S, MakeDevice, dial, introduce


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
def test_tensors_arrive_bit_for_bit(make_device: MakeDevice, host: str) -> None:
    a, b = make_device("a/0"), make_device("b/0", host)
    introduce(a, b)
    sent = payloads()
    assert a.transport.send("b/0", ("f", 1, "x", 2), sent, b"meta")
    message = b.receive(("f", 1, "x", 2))
    assert (message.source, message.meta) == ("a/0", b"meta")
    assert len(message.tensors) == len(sent)
    for got, want in zip(message.tensors, sent, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)
        assert got.is_contiguous()
        assert got.numel() == 0 or got.data_ptr() % 64 == 0


def test_messages_without_tensors_and_with_thousands(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f",), [])
    a.transport.send("b/0", ("g",), [torch.full((3,), i) for i in range(3000)])
    assert b.receive(("f",)).tensors == []
    assert [int(t[2]) for t in b.receive(("g",)).tensors] == list(range(3000))


def test_many_messages_keep_their_order_both_ways_at_once(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0", "elsewhere")
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


def test_a_tensor_without_a_form_on_the_wire_is_refused(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    with pytest.raises(wire.WireError, match="complex64"):
        a.transport.send("b/0", ("f",), [torch.zeros(1, dtype=torch.complex64)])


def test_an_early_message_waits_for_the_receiver_to_be_configured(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    a.transport.configure({"b/0": b.transport.peer}, SECRET)
    assert a.transport.send("b/0", ("f",), [torch.ones(2)])
    b.transport.configure({"a/0": a.transport.peer}, SECRET)
    assert torch.equal(b.receive(("f",)).tensors[0], torch.ones(2))


def test_a_receiver_that_takes_long_to_be_configured_is_not_lost(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "_RETRY_S", (0.6, 0.6))
    a, b = make_device("a/0", handshake_s=1.5), make_device("b/0", handshake_s=0.02)
    a.transport.configure({"b/0": b.transport.peer}, SECRET)
    assert a.transport.send("b/0", ("f",), [torch.ones(2)])
    while b.transport.counts.refused < 4:  # by then more than a's 1.5 s are over
        threading.Event().wait(0.01)
    b.transport.configure({"a/0": a.transport.peer}, SECRET)
    b.receive(("f",))
    assert a.lost == []


def test_close_hands_over_what_was_sent_before(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0", "elsewhere")
    introduce(a, b)
    big = torch.arange(3_000_000)
    a.transport.send("b/0", ("f", 1), [big])
    a.transport.close()
    assert torch.equal(b.receive(("f", 1)).tensors[0], big)
    assert b.lost == []


def test_a_peer_that_does_not_read_holds_up_nobody_else(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
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


def test_a_damaged_frame_is_a_loss(make_device: MakeDevice) -> None:
    b = make_device("b/0")
    incarnation = Peer("127.0.0.1:1", "/nowhere", "far")
    b.transport.configure({"a/0": incarnation}, SECRET)
    with dial(b) as sock:
        handshake.connect(
            sock,
            source="a/0",
            incarnation=f"{incarnation.address} {incarnation.local}",
            target="b/0",
            secret=SECRET,
        )
        sock.sendall(b"\0" * 64)
        b.until(lambda: bool(b.lost))
    assert b.lost == [("a/0", "damaged frame header")]


@pytest.mark.parametrize(
    ("dtypes", "shapes", "why"),
    [
        ((0,), ((2**60,),), "cannot be made"),
        ((0, 0), ((2**30, 2**30), (-1,)), "cannot be made"),
        ((0, 0), ((2**20,), (-1,)), "cannot be made: a size below 0"),
        ((99,), ((1,),), "cannot be made"),
        ((0, 0), ((1,),), "cannot be made"),
        ((0,), ((3,),), "does not have the size"),
    ],
)
def test_a_message_that_contradicts_itself_is_damage(
    dtypes: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], why: str
) -> None:
    one, other = socket.socketpair()
    with one, other:
        body = msgspec.msgpack.encode((("f",), b"", dtypes, shapes))
        one.sendall(struct.pack("<4sBxxxIQ", b"OBLK", 1, len(body), 8) + body + bytes(8))
        with pytest.raises(wire.WireError, match=why):
            wire.MessageReader(other, "a/0").read()
