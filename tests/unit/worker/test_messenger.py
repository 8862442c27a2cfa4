"""Which way messages take, and where their tensors are at its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.transport.mailbox import Key, Mailbox, TensorMessage


class NoTransport:
    """A transport over which nothing may go."""

    device = "a/0"

    def send(self, *_: object) -> bool:
        raise AssertionError("a message to itself took the transport")


def test_a_message_to_itself_is_there_at_once() -> None:
    mailbox, transport = Mailbox(), NoTransport()
    messenger = TransportMessenger(
        transport,
        GroupManager("a/0", mailbox, None, transport.send),
        Intake(mailbox),
        mailbox,
        torch.device("cpu"),
    )
    key, tensor = ("F", 3, 0, 1, 4), torch.arange(3.0)
    assert messenger.send("a/0", key, [tensor])
    assert messenger.has(key)
    message = messenger.take(key)
    assert message is not None
    assert torch.equal(message.tensors[0], tensor)
    assert not messenger.has(key)


class FakeTransport:
    """A transport that keeps what it is given."""

    device = "a/0"

    def __init__(self) -> None:
        self.sent: list[tuple[str, bool]] = []

    def send(self, _peer: str, key: Key, *_: object, later: bool = False) -> bool:
        self.sent.append((str(key[0]), later))
        return True

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        return [key for key in (("S", 1), ("U", 1)) if peer == "b/0" and unwanted(key)]


class Group:
    """A group that takes every message."""

    def offer(self, *_: object) -> bool:
        return True


def test_what_is_precopied_takes_no_group_and_waits_for_all_others() -> None:
    mailbox, transport = Mailbox(), FakeTransport()
    messenger = TransportMessenger(transport, Group(), Intake(mailbox), mailbox, torch.device("cpu"))
    for kind in "FSUPTQ":
        assert messenger.send("b/0", (kind, 1), [])
    assert transport.sent == [("S", True), ("U", True), ("P", True)]
    assert messenger.recall("b/0", lambda key: key[0] == "S") == [("S", 1)]


@pytest.mark.parametrize(
    ("kind", "where"), [("F", "meta"), ("T", "meta"), ("S", "cpu"), ("U", "cpu"), ("C", "cpu")]
)
def test_what_is_precopied_stays_in_the_host_s_memory(kind: str, where: str) -> None:
    mailbox, transport = Mailbox(), FakeTransport()
    messenger = TransportMessenger(transport, Group(), Intake(mailbox), mailbox, torch.device("meta"))
    mailbox.put(TensorMessage((kind, 1), "b/0", b"", [torch.ones(2)]))
    message = messenger.take((kind, 1))
    assert message is not None
    assert message.tensors[0].device.type == where
