"""What the engine needs of the transport, and nothing more: keyed tensor messages out, keyed tensor messages
in.

Tensor messages are found by what they are, not by who sent them or in which order. The first part of a key is
its kind: "F" activations, "B" their gradients, "G" contributions of sums, "M" means, "C" copies of sums, "K"
that one has arrived, "V" votes, "T" training state, "P" that it was pre-copied and "Q" that it is wanted all
the same, "S" state and "U" updates that are pre-copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.gather import Gathering, Intake
from oobleckd.worker.transport.mailbox import Key, Mailbox, TensorMessage
from oobleckd.worker.transport.transport import Transport

LATER = frozenset({"S", "U", "P"})
"""Kinds that leave when no other message does, as training must not wait for them; in their own order, so
that "P" comes behind what it speaks of. They take the transport, and what comes with them stays in the host's
memory.
"""
_LEFT_ON_THE_HOST = LATER | {"C"}


class Messenger(Protocol):
    """Implemented by ``TransportMessenger`` (real) and by the tests' single-process world."""

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> object:
        """Send a message; never blocks. ``tensors`` must stay unchanged until their round is over."""

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> Sequence[Key]:
        """Take back messages of ``LATER`` kinds that have not begun to leave; their keys."""

    def take(self, key: Key) -> TensorMessage | None:
        """The tensor message with this key, removed; None if it has not arrived."""

    def has(self, key: Key) -> bool:
        """Whether the message with this key has arrived and was not taken."""

    def waiting(self) -> Sequence[Key]:
        """Keys of all messages that have arrived and were not taken."""

    def gather(self, gathering: Gathering | None) -> None:
        """From now on contributions to ``gathering``, and to no other, may be added to it before they are
        taken: then they have no tensors.
        """

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        """Drop messages whose key is unwanted."""


class SentCount(NamedTuple):
    """Messages that were sent, and the bytes of their tensors and meta: without what a backend puts around
    them.
    """

    messages: int = 0
    num_bytes: int = 0


NOTHING_SENT = SentCount()


class CountingMessenger:
    """Counts what is sent by another ``messenger``, to others and of any kind; the rest is that one's."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._sent = NOTHING_SENT

    def take_count(self) -> SentCount:
        """What was sent since the last call."""
        sent, self._sent = self._sent, NOTHING_SENT
        return sent

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> object:
        """Send a message, and count it."""
        num_bytes = sum(tensor.nbytes for tensor in tensors) + len(meta)
        self._sent = SentCount(self._sent.messages + 1, self._sent.num_bytes + num_bytes)
        return self._messenger.send(peer, key, tensors, meta)

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> Sequence[Key]:
        """As the other does; the count stays."""
        return self._messenger.recall(peer, unwanted)

    def take(self, key: Key) -> TensorMessage | None:
        """As the other does."""
        return self._messenger.take(key)

    def has(self, key: Key) -> bool:
        """As the other does."""
        return self._messenger.has(key)

    def waiting(self) -> Sequence[Key]:
        """As the other does."""
        return self._messenger.waiting()

    def gather(self, gathering: Gathering | None) -> None:
        """As the other does."""
        self._messenger.gather(gathering)

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        """As the other does."""
        self._messenger.purge(unwanted)


class TransportMessenger:
    """The real one: tensor messages go out by a group or by the transport, and come in through the mailbox.

    Their tensors are on ``device`` when they are taken, whichever way they came, but for those of copies of
    sums, which most likely nobody will look at, and of what is pre-copied, for which a device that trains has
    no room. What a device sends to itself, where a route comes back to it, needs no backend.
    """

    def __init__(
        self,
        transport: Transport,
        groups: GroupManager,
        intake: Intake,
        mailbox: Mailbox,
        device: torch.device,
    ) -> None:
        self._transport = transport
        self._intake = intake
        self._groups = groups
        self._mailbox = mailbox
        self._device = device

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> bool:
        """Hand a message to a channel or to the peer's writer thread; False if the peer is gone."""
        # Through the mailbox like any other message: key, attempt and what is kept are then the same for a
        # repair. (D-transport-006)
        if peer == self._transport.device:
            self._mailbox.put(TensorMessage(key, peer, meta, list(tensors)))
            return True
        # Gigabytes of pre-copied state would otherwise leave in front of the next micro-batch's activations
        # where source and target are neighbours. (D-precopy-014)
        if key[0] in LATER:
            return self._transport.send(peer, key, tensors, meta, later=True)
        return self._groups.offer(peer, key, tensors, meta) or self._transport.send(peer, key, tensors, meta)

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> Sequence[Key]:
        """Take messages back that the transport still has."""
        return self._transport.recall(peer, unwanted)

    def take(self, key: Key) -> TensorMessage | None:
        """Take a message out of the mailbox."""
        message = self._mailbox.take(key)
        if (
            message is None
            or key[0] in _LEFT_ON_THE_HOST
            or all(tensor.device == self._device for tensor in message.tensors)
        ):
            return message
        tensors = [tensor.to(self._device) for tensor in message.tensors]
        return TensorMessage(message.key, message.source, message.meta, tensors)

    def has(self, key: Key) -> bool:
        """Whether the mailbox has the message."""
        return self._mailbox.has(key)

    def waiting(self) -> Sequence[Key]:
        """Keys in the mailbox."""
        return self._mailbox.keys()

    def gather(self, gathering: Gathering | None) -> None:
        """On a CPU, where messages come in as what is added."""
        self._intake.gathering = gathering if self._device.type == "cpu" else None

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        """Drop messages from the mailbox."""
        self._mailbox.purge(lambda message: unwanted(message.key))
