"""Large messages to peers on the same host: in memory that is lent, given back, and never wrong."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.worker.transport import handshake, lending, wire
from oobleckd.worker.transport.lending import LENDING, MOST, Borrowed, LendError, Lending, LentPiece
from oobleckd.worker.transport.pages import MESSAGE_PAGES
from tests.helpers.transports import SECRET, TIMEOUT_S, MakeDevice, introduce

MIB = 1 << 20
SIZE = MIB // 4
"""Float32 numbers of a message that is just large enough."""


@pytest.fixture(autouse=True)
def nothing_is_lent() -> Iterator[None]:
    LENDING.clear()
    MESSAGE_PAGES.clear()
    yield
    LENDING.clear()


class Both:
    """Who lends and who borrows, with what goes from one to the other."""

    def __init__(self) -> None:
        self.lending, self.borrowed = Lending(), Borrowed()
        self.known: set[int] = set()

    def is_refused(self, num_bytes: int) -> bool:
        return self.lending.lend(num_bytes, "link") is None

    def pass_on(self, num_bytes: int, link: str = "link") -> tuple[LentPiece, Tensor]:
        """What was lent, and all that is in it as its reader has it."""
        piece = self.lending.lend(num_bytes, link)
        assert piece is not None
        if piece.number not in self.known:
            self.known.add(piece.number)
            self.borrowed.learn(piece.number, os.dup(piece.fd))
        return piece, torch.frombuffer(self.borrowed.take(piece.number, num_bytes), dtype=torch.uint8)


def test_what_nobody_has_is_lent_again() -> None:
    both = Both()
    first, tensor = both.pass_on(MIB)
    assert not first.is_free
    view = tensor[5:10]
    del tensor
    assert not first.is_free  # a view is enough
    del view
    assert first.is_free
    again, _ = both.pass_on(MIB)
    assert again is first


def test_what_somebody_has_is_lent_to_nobody_and_there_is_no_more_than_may_be() -> None:
    both = Both()
    lent = [both.pass_on(MIB) for _ in range(MOST)]
    assert both.is_refused(MIB)
    assert len({piece.number for piece, _ in lent}) == MOST
    assert both.lending.num_bytes == MOST * MIB
    lent.pop()
    lent.append(both.pass_on(MIB))
    assert both.is_refused(MIB)


def test_one_that_is_too_large_does_where_there_may_be_no_more_and_small_ones_make_room() -> None:
    both = Both()
    small = [both.pass_on(MIB) for _ in range(MOST)]
    numbers = [piece.number for piece, _ in small]
    small.clear()
    large = [both.pass_on(4 * MIB) for _ in range(MOST - 1)]
    assert both.lending.numbers > set(numbers)
    large.append(both.pass_on(4 * MIB))
    assert not both.lending.numbers & set(numbers)
    assert both.is_refused(MIB)
    kept = large.pop()[0].number
    piece, tensor = both.pass_on(MIB)
    assert piece.number == kept
    assert tensor.numel() >= MIB
    assert both.lending.num_bytes == MOST * 4 * MIB


def test_memory_that_is_lent_no_more_goes_back_although_a_peer_has_it_mapped() -> None:
    both = Both()
    piece, tensor = both.pass_on(MIB)
    tensor.fill_(7)
    del tensor
    assert os.fstat(piece.fd).st_blocks * 512 >= MIB
    both.lending.clear()
    assert os.fstat(piece.fd).st_blocks == 0
    assert both.lending.num_bytes == 0


def test_what_is_read_while_all_is_given_back_goes_with_its_reader() -> None:
    both = Both()
    piece, tensor = both.pass_on(MIB)
    piece.data[:3] = b"abc"
    number = piece.number
    both.lending.clear()
    del piece
    assert both.lending.num_bytes == 0
    assert bytes(tensor[:3].tolist()) == b"abc"
    both.borrowed.forget([number])
    assert "tensor messages" in Path("/proc/self/maps").read_text()
    del tensor
    assert "tensor messages" not in Path("/proc/self/maps").read_text()
    assert both.pass_on(MIB)[0].number != number


def test_of_a_link_that_is_over_all_stays_readable_and_nothing_is_lent_again() -> None:
    both = Both()
    piece, tensor = both.pass_on(MIB, "gone")
    _, other = both.pass_on(MIB, "there")
    piece.data[:3] = b"abc"
    both.lending.over("gone")
    number, fd = piece.number, piece.fd
    del piece
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert both.lending.num_bytes == MIB
    assert number not in both.lending.numbers
    assert bytes(tensor[:3].tolist()) == b"abc"
    del other, tensor
    assert both.pass_on(MIB)[0].number != number


def test_where_there_is_no_such_memory_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(lending.os, "memfd_create", none)
    assert Lending().lend(MIB, None) is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: os.memfd_create("x", os.MFD_ALLOW_SEALING), "could cut"),
        (lambda path: os.open(path, os.O_RDWR | os.O_CREAT), "Invalid argument"),
    ],
)
def test_memory_that_its_owner_could_cut_is_not_read(
    make: Callable[[Path], int], why: str, tmp_path: Path
) -> None:
    fd = make(tmp_path / "file")
    os.truncate(fd, MIB)
    with pytest.raises((LendError, OSError), match=why):
        Borrowed().learn(0, fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_no_piece_is_larger_than_it_is() -> None:
    both = Both()
    piece, _ = both.pass_on(MIB)
    with pytest.raises(LendError, match="no piece"):
        both.borrowed.take(piece.number, MIB + 1)
    both.borrowed.forget([piece.number, 99])
    with pytest.raises(LendError, match="no piece"):
        both.borrowed.take(piece.number, 1)


# ---------------------------------------------------------------------- messages


def numbers(value: float, size: int = SIZE) -> Tensor:
    return torch.full((size,), value, dtype=torch.float32)


def test_a_large_message_does_not_go_through_the_socket(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("F", 0), [])  # opens the link
    b.receive(("F", 0))
    sent = [numbers(3.0), torch.arange(6).view(2, 3), torch.empty(0, 4), torch.ones((), dtype=torch.bfloat16)]
    assert a.transport.send("b/0", ("F", 1), sent, b"beside")
    sent[0].fill_(9.0)  # it is copied, so it may change at once
    message = b.receive(("F", 1))
    assert message.meta == b"beside"
    assert [(t.shape, t.dtype) for t in message.tensors] == [(t.shape, t.dtype) for t in sent]
    assert bool((message.tensors[0] == 3.0).all())
    assert message.tensors[1].equal(sent[1])
    assert all(tensor.data_ptr() % 64 == 0 for tensor in message.tensors if tensor.numel())
    assert LENDING.num_bytes > 0
    assert MESSAGE_PAGES.idle_bytes == 0
    assert a.transport.counts.sent_bytes > sum(tensor.nbytes for tensor in sent)
    message.tensors[0][0] = 5.0  # and is the receiver's


def test_tensors_that_are_not_contiguous_come_as_they_are(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("F", 0), [])
    b.receive(("F", 0))
    sent = torch.randn(1024, 512).t()
    a.transport.send("b/0", ("F", 1), [sent])
    assert b.receive(("F", 1)).tensors[0].equal(sent)
    assert LENDING.num_bytes > 0


def test_more_than_may_be_lent_comes_through_the_socket(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    for turn in range(3):
        for number in range(2 * MOST):
            assert a.transport.send("b/0", ("F", turn, number), [numbers(number)])
        found = [b.receive(("F", turn, number)).tensors[0] for number in range(2 * MOST)]
        assert [float(each.mean()) for each in found] == list(range(2 * MOST))
        assert len({each.data_ptr() for each in found}) == 2 * MOST
        assert LENDING.num_bytes <= MOST * 4 * SIZE


def test_another_host_gets_bytes(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0", "elsewhere")
    introduce(a, b)
    for number in range(2):
        a.transport.send("b/0", ("F", number), [numbers(number)])
        assert float(b.receive(("F", number)).tensors[0].mean()) == number
    assert LENDING.num_bytes == 0


def test_a_peer_of_before_says_nothing_of_borrowing() -> None:
    answer = msgspec.msgpack.encode([b"nonce", b"proof", "", False])
    assert not handshake._decode(answer, handshake._Answer).borrows
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        found: list[bool] = []

        def connect() -> None:
            words = {"source": "a/0", "incarnation": "life", "target": "b/0", "secret": SECRET}
            found.append(handshake.connect(one, **words))

        thread = threading.Thread(target=connect)
        thread.start()
        handshake.accept(other, device="b/0", find_secret=lambda _: SECRET)
        thread.join(TIMEOUT_S)
        assert found == [True]


def test_what_has_no_form_on_the_wire_borrows_nothing(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("F", 0), [])
    b.receive(("F", 0))
    with pytest.raises(wire.WireError, match="complex64"):
        a.transport.send("b/0", ("F", 1), [torch.zeros(SIZE, dtype=torch.complex64)])
    assert LENDING.num_bytes == 0


def test_what_is_sent_to_one_who_is_gone_is_free_again(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("F", 0), [])
    b.receive(("F", 0))
    link = a.transport._known["b/0"].link
    assert link is not None
    link.stop()
    assert not a.transport.send("b/0", ("F", 1), [numbers(1.0)])
    LENDING.clear()
    assert LENDING.num_bytes == 0


def test_pieces_of_other_sizes_do_not_gather_where_they_are_read(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("F", 0), [])
    b.receive(("F", 0))
    largest = 8
    for number in range(1, 40):
        size = SIZE * (1 + (7 * number) % largest)
        a.transport.send("b/0", ("F", number), [numbers(number, size)])
        assert float(b.receive(("F", number)).tensors[0].mean()) == number
        mapped = sum("tensor messages" in line for line in Path("/proc/self/maps").read_text().splitlines())
        assert mapped <= 2 * (MOST * largest + 1)  # by both ends, which are this process


# ---------------------------------------------------------------------- frames that nobody can have meant


def frame(body: tuple[Any, ...], num_bytes: int) -> bytes:
    data = msgspec.msgpack.encode(body)
    return wire._HEADER.pack(b"OBLK", 3, len(data), num_bytes) + data


FLOATS = ((0,), ((SIZE,),))


def piece_of(num_bytes: int) -> LentPiece:
    piece = Lending().lend(num_bytes, None)
    assert piece is not None
    return piece


@pytest.mark.parametrize(
    ("bodies", "fds", "why"),
    [
        ([(("F", 0), b"", *FLOATS, 5, False, ())], 0, "no piece 5"),
        ([(("F", 0), b"", *FLOATS, 0, True, ())], 0, "it did not come"),
        ([(("F", 0), b"", (0,), ((2 * SIZE,),), 0, True, ())], 1, "no piece 0 with"),
        ([(("F", 0), b"", (0,), ((-1,),), 0, True, ())], 1, "below 0"),
        ([(("F", 0), b"", (0,), (), 0, True, ())], 1, "cannot be made"),
        ([(("F", 0), b"", (99,), ((1,),), 0, True, ())], 1, "no dtype 99"),
        (
            [(("F", 0), b"", *FLOATS, 0, True, (0,)), (("F", 1), b"", *FLOATS, 0, False, (0,))],
            1,
            "no piece 0",
        ),
        ([(("F", 0), b"")], 0, "damaged"),
        ([], 9, "nobody speaks of"),
    ],
)
def test_damage_is_refused_and_leaves_nothing_open(bodies: list[tuple[Any, ...]], fds: int, why: str) -> None:
    piece = piece_of(4 * SIZE)
    one, other = socket.socketpair(socket.AF_UNIX)
    before = set(Path("/proc/self/fd").iterdir())
    with one, other:
        sent = array.array("i", [piece.fd] * fds)
        first, *more = [frame(body, 4 * SIZE) for body in bodies] or [b"x"]
        one.sendmsg([first], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)] if fds else [])
        one.sendall(b"".join(more))
        reader = wire.MessageReader(other, "a/0")
        with pytest.raises(wire.WireError, match=why):
            [reader.read() for _ in range(len(bodies) + 1)]
        reader.close()
        del reader
        assert set(Path("/proc/self/fd").iterdir()) == before


def test_descriptors_come_in_the_order_of_their_frames() -> None:
    """Also where one read of the socket brings small messages before them."""
    pieces = [piece_of(4 * SIZE) for _ in range(3)]
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        reader = wire.MessageReader(other, "a/0")
        for number, piece in enumerate(pieces):
            piece.number = number
            wire.message_frame(("V", number), [], b"").write_now(one)
            sent = wire.lent_frame(("F", number), [numbers(number)], b"", piece, is_new=True)
            assert sent.write_now(one)
        messages = [message for _ in range(6) if (message := reader.read()) is not None]
    assert [message.key for message in messages] == [(kind, n) for n in range(3) for kind in ("V", "F")]
    assert [float(message.tensors[0][0]) for message in messages[1::2]] == [0.0, 1.0, 2.0]


# ---------------------------------------------------------------------- who dies


_PEER = [sys.executable, "-m", "tests.helpers.transport_peer", "b/0", "here"]


def test_a_killed_sender_leaves_what_it_lent(make_device: MakeDevice, tmp_path: Path) -> None:
    a = make_device("a/0")
    with subprocess.Popen([*_PEER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        peer = msgspec.json.decode(process.stdout.readline())
        setup = {"peers": {"a/0": msgspec.to_builtins(a.transport.peer)}, "secret": SECRET.hex()}
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        process.stdin.flush()
        a.transport.configure({"b/0": msgspec.convert(peer, type(a.transport.peer))}, SECRET)
        a.transport.send("b/0", ("ping", 0), [])
        a.receive(("pong", 0))
        a.transport.send("b/0", ("ping", 1), [numbers(4.0)])
        pong = a.receive(("pong", 1))
        assert LENDING.num_bytes > 0
        process.kill()
        process.wait()
        a.until(lambda: bool(a.lost))
    assert bool((pong.tensors[0] == 4.0).all())  # it lent us its echo, and is dead
    LENDING.clear()
    assert LENDING.num_bytes == 0  # nor does it have anything of ours
