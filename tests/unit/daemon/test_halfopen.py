"""Who says nothing at the port for nodes gives way where descriptors run short, and nobody else does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from oobleckd.daemon import halfopen
from oobleckd.daemon.halfopen import HalfOpen

KEPT = 4


class Port:
    """Connections to it, accepted."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.number = self.listening.getsockname()[1]
        self.ends: list[tuple[socket.socket, socket.socket]] = []

    def accept(self) -> tuple[int, socket.socket]:
        """Its descriptor, and the other end."""
        theirs = socket.create_connection(self.listening.getsockname())
        ours, _ = self.listening.accept()
        self.ends.append((ours, theirs))
        return ours.fileno(), theirs


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    for ours, theirs in made.ends:
        ours.close()
        theirs.close()
    made.listening.close()


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halfopen, "_reserve", lambda _limit: 2 * KEPT)
    monkeypatch.setattr(halfopen, "is_scarce", lambda _fd, _reserves=1: True)


def is_over(sock: socket.socket) -> bool:
    """Whether the other end has ended it."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.usefixtures("_few")
def test_where_descriptors_are_scarce_the_oldest_who_said_nothing_give_way(port: Port) -> None:
    known, said = HalfOpen(), port.accept()
    known.accepted(said[0], port.number)
    known.over(said[0])
    found = []
    for _ in range(3 * KEPT):
        found.append(port.accept())
        known.accepted(found[-1][0], port.number)
    assert [is_over(theirs) for _, theirs in found] == [True] * 2 * KEPT + [False] * KEPT
    assert not is_over(said[1])
    assert known.num_dropped == 2 * KEPT
    assert not known.make_room(port.number)


@pytest.mark.usefixtures("_few")
def test_a_number_that_was_given_to_another_one_is_left_alone(port: Port) -> None:
    known = HalfOpen()
    mine, theirs = socket.socketpair()
    number, _ = port.accept()
    known.accepted(number, port.number)
    os.dup2(mine.fileno(), number)
    for _ in range(KEPT):
        known.accepted(port.accept()[0], port.number)
    assert not is_over(theirs)
    assert known.num_dropped == 0
    mine.close()
    theirs.close()


def test_where_there_are_enough_nobody_gives_way(port: Port) -> None:
    known, found = HalfOpen(), [port.accept() for _ in range(halfopen.RESERVE)]
    for number, _ in found:
        known.accepted(number, port.number)
    assert not any(is_over(theirs) for _, theirs in found)
