"""What has arrived at a device and was not taken yet: letters from peers, control messages from the agent.

Owns the store and the one condition that the executor sleeps on. Does not know what a key means, nor
where letters come from; never imports torch (the tests' stand-in device has none).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str | int, ...]
"""``(kind, …)``: the kind of a letter first, then whatever tells it from others of its kind."""


@dataclass(frozen=True, slots=True)
class Letter:
    """What ``source`` sent under ``key``: ``tensors``, owned by the receiver, and ``meta``.

    The tensors are in CPU memory if they came by the transport, and where they were if they came by a group.
    """

    key: Key
    source: str
    meta: bytes
    tensors: list[Tensor]


class Mailbox:
    """Thread-safe: any number of threads put and post, one takes and waits.

    Letters under the same key queue up in the order of their arrival. ``wait`` counts arrivals, so
    nothing that comes between a look and the next ``wait`` is slept over.
    """

    __slots__ = ("_arrivals", "_changed", "_controls", "_letters", "_seen")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._letters: dict[Key, list[Letter]] = {}
        self._controls: list[Any] = []
        self._arrivals = 0
        self._seen = 0

    def put(self, letter: Letter) -> None:
        """Store a letter under its key."""
        with self._changed:
            self._letters.setdefault(letter.key, []).append(letter)
            self._arrived()

    def post(self, control: object) -> None:
        """Store a control message (or anything else that the one who waits must hear of)."""
        with self._changed:
            self._controls.append(control)
            self._arrived()

    def take(self, key: Key) -> Letter | None:
        """The oldest letter under ``key``, removed, or None."""
        with self._changed:
            queue = self._letters.get(key)
            if queue is None:
                return None
            letter = queue.pop(0)
            if not queue:
                del self._letters[key]
            return letter

    def take_all(self, kind: str) -> list[Letter]:
        """Every letter whose key begins with ``kind``, removed; oldest first within a key."""
        with self._changed:
            keys = [key for key in self._letters if key[0] == kind]
            return [letter for key in keys for letter in self._letters.pop(key)]

    def has(self, key: Key) -> bool:
        """Whether a letter lies under ``key``."""
        with self._changed:
            return key in self._letters

    def keys(self) -> tuple[Key, ...]:
        """A snapshot of the keys under which letters lie."""
        with self._changed:
            return tuple(self._letters)

    def purge(self, predicate: Callable[[Letter], bool]) -> int:
        """Drop the letters for which ``predicate`` holds; how many they were.

        ``predicate`` runs under the lock: it must be quick and must not call the mailbox.
        """
        with self._changed:
            before = sum(map(len, self._letters.values()))
            kept = {key: [x for x in queue if not predicate(x)] for key, queue in self._letters.items()}
            self._letters = {key: queue for key, queue in kept.items() if queue}
            return before - sum(map(len, self._letters.values()))

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
        """Sleep until something has arrived since the last ``wait``; whether it has (False: ``timeout`` s passed)."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._arrivals != self._seen, timeout)
            self._seen = self._arrivals
            return arrived

    def _arrived(self) -> None:
        self._arrivals += 1
        self._changed.notify()
