"""Sums on their way between real transports: how many come in at a time, and who waits for whom."""

from __future__ import annotations

import itertools
import socket
import time

import torch
from torch import Tensor

from oobleckd.worker.messaging.gather import Gathered, Gathering, key_of
from oobleckd.worker.sums import NUM_MARKS
from oobleckd.worker.transport import handshake, wire
from oobleckd.worker.transport.pages import MESSAGE_PAGES
from tests.helpers.transports import SECRET, TIMEOUT_S, Device, MakeDevice, dial, introduce

NAMES = tuple(f"{name}/0" for name in "abcde")
SIZE = 2**19


def large(value: float) -> list[Tensor]:
    """A sum, and the marks that travel beside it."""
    return [torch.full((SIZE,), value, dtype=torch.float64), torch.zeros(NUM_MARKS, dtype=torch.float64)]


def test_sums_of_many_peers_take_the_memory_of_two(make_device: MakeDevice) -> None:
    z, peers = make_device("z/0"), [make_device(name) for name in NAMES]
    introduce(z, *peers)
    buckets = {bucket: Gathered(NAMES, exact=True) for bucket in range(3)}
    z.intake.gathering = Gathering(1, 1, buckets)
    MESSAGE_PAGES.clear()
    for number, peer in enumerate(peers):
        for bucket in buckets:
            key = key_of(1, 1, bucket, NAMES[number])
            assert peer.transport.send("z/0", key, large(bucket + 10.0**number))
    for name, bucket in itertools.product(NAMES, buckets):
        assert z.receive(key_of(1, 1, bucket, name)).tensors == []
    for bucket, gathered in buckets.items():
        assert bool((gathered.total()[0] == 11_111 + 5 * bucket).all())
    marks = 64  # bytes, with what aligns them
    assert MESSAGE_PAGES.idle_bytes <= 2 * (8 * SIZE + marks)


def half_sent(device: Device, source: Device, key: tuple[str | int, ...]) -> socket.socket:
    """A link from ``source`` on which a message has begun to come, and stops."""
    sock = dial(device)
    incarnation = f"{source.transport.address} {source.transport.local}"
    handshake.connect(
        sock,
        source=source.transport.device,
        incarnation=incarnation,
        target=device.transport.device,
        secret=SECRET,
    )
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        frame = wire.message_frame(key, [torch.zeros(2**18, dtype=torch.float32)], b"")
        assert not frame.write_now(one)
        sock.sendall(other.recv(4096))
    return sock


def test_who_stops_in_the_middle_of_sums_holds_up_others_until_it_is_forgotten(
    make_device: MakeDevice,
) -> None:
    z, a, b, c = (make_device(name) for name in ("z/0", "a/0", "b/0", "c/0"))
    introduce(z, a, b, c)
    stuck = [half_sent(z, peer, key_of(1, 1, 0, peer.transport.device)) for peer in (a, b)]
    room = z.intake.room(key_of(1, 1, 0, "c/0"), 8 * SIZE)
    deadline = time.monotonic() + TIMEOUT_S
    while room.acquire(blocking=False):  # type: ignore[attr-defined]
        room.release()  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, "they have not begun to be read"
    c.transport.send("z/0", key_of(1, 1, 0, "c/0"), large(1.0))
    c.transport.send("z/0", ("V", 1), [])
    c.transport.flush(0.2)
    assert not z.mailbox.has(("V", 1))
    z.transport.forget(["a/0", "b/0"])
    assert float(z.receive(key_of(1, 1, 0, "c/0")).tensors[0].sum()) == SIZE
    z.receive(("V", 1))
    for sock in stuck:
        sock.close()
    assert c.transport.flush(TIMEOUT_S)
