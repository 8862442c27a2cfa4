"""What the engine needs of the transport, and nothing more: keyed letters out, keyed letters in.

Letters are found by what they are, not by who sent them or in which order. The first part of a key is
its kind: "F" activations, "B" their gradients, "G" contributions, "V" votes, "T" training state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from worker.mailbox import Key, Letter, Mailbox
from worker.transport import Transport


class Post(Protocol):
    """Implemented by ``TransportPost`` (real) and by the tests' single-process world."""

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> object:
        """Send a letter; never blocks. ``tensors`` must stay unchanged until their round is over."""

    def take(self, key: Key) -> Letter | None:
        """The letter with this key, removed; None if it has not arrived."""

    def has(self, key: Key) -> bool:
        """Whether the letter with this key has arrived and was not taken."""

    def waiting(self) -> Sequence[Key]:
        """Keys of all letters that have arrived and were not taken."""

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        """Drop letters whose key is unwanted."""


class TransportPost:
    """The real post: letters go out by the transport and come in through its mailbox."""

    def __init__(self, transport: Transport, mailbox: Mailbox) -> None:
        self._transport = transport
        self._mailbox = mailbox

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> bool:
        """Hand a letter to the peer's writer thread; False if the peer is gone."""
        return self._transport.send(peer, key, tensors, meta)

    def take(self, key: Key) -> Letter | None:
        """Take a letter out of the mailbox."""
        return self._mailbox.take(key)

    def has(self, key: Key) -> bool:
        """Whether the mailbox has the letter."""
        return self._mailbox.has(key)

    def waiting(self) -> Sequence[Key]:
        """Keys in the mailbox."""
        return self._mailbox.keys()

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        """Drop letters from the mailbox."""
        self._mailbox.purge(lambda letter: unwanted(letter.key))
