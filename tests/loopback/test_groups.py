"""Groups between real processes: one is killed, another stands still, and no message of a
survivor is lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.parts import Peer
from tests.helpers.group_peer import TIMEOUT_S, Member

NAMES = ("a/0", "b/0", "c/0")
LARGE = 64 << 20  # far more than a socket takes while its reader stands still
MANY = 60


class Company:
    """All members, and who is alive."""

    def __init__(self, directory: Path) -> None:
        self.members = {name: Member(name, directory) for name in NAMES}
        self.peers = {name: member.hear(Peer) for name, member in self.members.items()}

    def enter(self, epoch: int, names: tuple[str, ...]) -> None:
        """A group of ``names`` with all channels open; messages on the way are staged."""
        for name in names:
            self.members[name].ask("enter", epoch=epoch, peers={n: self.peers[n] for n in names})
        for name in names:
            self.members[name].ask("send", names=others(name, names), first=1000 * epoch, count=1)
        for name in names:
            assert self.members[name].ask("open", epoch=epoch, names=others(name, names))

    def received(self, name: str, sources: tuple[str, ...], count: int) -> dict[str, int]:
        got, wrong = self.members[name].ask("receive", names=sources, count=count)
        assert wrong == []
        assert set(got.values()) <= {1}, f"came twice at {name}: {[k for k in got if got[k] > 1]}"
        return got


def others(name: str, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    return tuple(n for n in names if n != name)


@pytest.fixture
def company(tmp_path: Path) -> Iterator[Company]:
    made = Company(tmp_path)
    yield made
    for member in made.members.values():
        member.close()


def test_survivors_of_a_kill_in_the_middle_of_payloads_lose_nothing_while_one_stands_still(
    company: Company,
) -> None:
    a, b, c = company.members.values()
    company.enter(1, NAMES)
    for name in NAMES:
        by_channel = company.members[name].ask("send", names=others(name), count=MANY)
        assert by_channel == 2 * MANY
    a.signal(signal.SIGSTOP)  # nobody reads: the next payloads for a stay half sent
    assert c.ask("send_large", names=("a/0",), num_bytes=LARGE)
    assert b.ask("send_large", names=("a/0",), num_bytes=LARGE + 1)
    assert b.ask("send", names=("a/0", "c/0"), first=MANY, count=MANY) == 4 * MANY + 1
    c.signal(signal.SIGKILL)
    assert b.ask("forget", epoch=1, names=("c/0",)) < TIMEOUT_S / 4, (
        "an abort waited for a process that stands"
    )
    a.signal(signal.SIGCONT)
    assert a.ask("forget", epoch=1, names=("c/0",)) < TIMEOUT_S / 4
    assert a.ask("send", names=("b/0",), first=MANY, count=MANY) == 2 * MANY, (
        "a message took a group that is over"
    )

    company.enter(2, ("a/0", "b/0"))
    for member in (a, b):
        before = member.ask("send", names=())
        by_channel = member.ask("send", names=others(member.name, ("a/0", "b/0")), first=2 * MANY, count=MANY)
        assert by_channel == before + MANY, "the group of two was not used"
    for name in ("a/0", "b/0"):
        other = others(name, ("a/0", "b/0"))[0]
        large = name == "a/0"
        got = company.received(name, (other,), 3 * MANY + 2 + large)
        for index in (*range(3 * MANY), 1000, 2000):
            assert got[repr(("message", other, index, name))] == 1
    for member in (a, b):
        assert member.ask("end")
