"""What has arrived at a device and was not taken yet: tensor messages from peers, control messages from the
agent.

Owns the store and the one condition that the executor sleeps on. Does not know what a key means, nor
where messages come from; never imports torch (the tests' stand-in device has none).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str | int, ...]
"""``(kind, …)``: the kind of a message first, then whatever tells it from others of its kind."""


@dataclass(frozen=True, slots=True)
class TensorMessage:
    """What ``source`` sent under ``key``: ``tensors``, owned by the receiver, and ``meta``.

    The tensors are in CPU memory if they came by the transport, and where they were if they came by a group.
    ``added``: the thread that read them has added them up, and they are gone.
    """

    key: Key
    source: str
    meta: bytes
    tensors: list[Tensor]
    added: bool = False


class Mailbox:
    """Thread-safe: any number of threads put, one takes and waits.

    Tensor messages under the same key queue up in the order of their arrival. ``wait`` counts arrivals, so
    nothing that comes between a look and the next ``wait`` is slept over.
    """

    __slots__ = ("_arrivals", "_changed", "_controls", "_messages", "_seen")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[Key, list[TensorMessage]] = {}
        self._controls: list[Any] = []
        self._arrivals = 0
        self._seen = 0

    def put(self, message: TensorMessage) -> None:
        """Store a message under its key."""
        with self._changed:
            self._messages.setdefault(message.key, []).append(message)
            self._arrived()

    def put_control(self, control: object) -> None:
        """Store a control message (or anything else that the one who waits must hear of)."""
        with self._changed:
            self._controls.append(control)
            self._arrived()

    def take(self, key: Key) -> TensorMessage | None:
        """The oldest message under ``key``, removed, or None."""
        with self._changed:
            queue = self._messages.get(key)
            if queue is None:
                return None
            message = queue.pop(0)
            if not queue:
                del self._messages[key]
            return message

    def take_all(self, kind: str) -> list[TensorMessage]:
        """Every message whose key begins with ``kind``, removed; oldest first within a key."""
        with self._changed:
            keys = [key for key in self._messages if key[0] == kind]
            return [message for key in keys for message in self._messages.pop(key)]

    def has(self, key: Key) -> bool:
        """Whether a message lies under ``key``."""
        with self._changed:
            return key in self._messages

    def keys(self) -> tuple[Key, ...]:
        """A snapshot of the keys under which messages lie."""
        with self._changed:
            return tuple(self._messages)

    def purge(self, predicate: Callable[[TensorMessage], bool]) -> int:
        """Drop the messages for which ``predicate`` holds; how many they were.

        ``predicate`` runs under the lock: it must be quick and must not call the mailbox.
        """
        with self._changed:
            before = sum(map(len, self._messages.values()))
            kept = {key: [x for x in queue if not predicate(x)] for key, queue in self._messages.items()}
            self._messages = {key: queue for key, queue in kept.items() if queue}
            return before - sum(map(len, self._messages.values()))

    def controls(self) -> list[Any]:
        """All control messages in order of arrival, removed."""
        with self._changed:
            controls, self._controls = self._controls, []
            return controls

    def next_control(self) -> Any | None:
        """The oldest control message, which stays, or None."""
        with self._changed:
            return self._controls[0] if self._controls else None

    def remove_control(self, control: object) -> None:
        """Remove ``control``, which must be there."""
        with self._changed:
            self._controls.remove(control)

    def wake(self) -> None:
        """Something else happened that the one who waits must look at."""
        with self._changed:
            self._arrived()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until something has arrived since the last ``wait``; whether it has (False: ``timeout`` s
        passed).
        """
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._arrivals != self._seen, timeout)
            self._seen = self._arrivals
            return arrived

    def _arrived(self) -> None:
        self._arrivals += 1
        self._changed.notify()
