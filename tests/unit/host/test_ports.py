"""Ports that somebody is told before he listens: nobody else is given them meanwhile."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.host import ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture
def given_away() -> range:
    first, last = map(int, RANGE.read_text().split())
    return range(first, last + 1)


def test_it_is_free_for_both_and_not_one_that_connections_get(given_away: range) -> None:
    found = {ports.free_port() for _ in range(50)}
    assert not found & set(given_away)
    assert len(found) > 1
    for port in found:
        with socket.create_server(("127.0.0.1", port)), socket.socket(type=socket.SOCK_DGRAM) as udp:
            udp.bind(("127.0.0.1", port))


class Said(random.SystemRandom):
    """A die that falls as it is told, and then as it likes."""

    def __init__(self, numbers: Iterator[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return next(self.numbers, None) or super().randrange(start, stop, step)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_one_that_is_taken_is_none(kind: socket.SocketKind, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(type=kind) as taken:
        taken.bind(("127.0.0.1", port := ports.free_port()))
        monkeypatch.setattr(ports, "_dice", Said(iter([port])))
        assert ports.free_port() != port


@pytest.mark.parametrize("text", ["1024\t65535\n", "no numbers", None])
def test_where_the_kernel_gives_away_all_it_is_one_of_its_own(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(ports, "_RANGE", file)
    with socket.create_server(("127.0.0.1", ports.free_port())):
        pass
