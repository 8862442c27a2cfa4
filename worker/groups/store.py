"""The c10d store of one channel, kept by its two ends over the transport.

torch's process groups find each other through a key-value store. Theirs opens a port of its own, asks name
servers, and outlives the group; this one is group messages on a link that is authenticated already, and it
ends when the channel does: whoever waits in it is told so at once. It has what ProcessGroupGloo and
ProcessGroupNCCL ask of a store for two ranks (set, get, wait, check); every key is set by one end and read by
the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

WAIT_S = 60.0  # the peer may still be ending its last group, or loading a model


class ChannelOver(RuntimeError):
    """The channel was ended, or its other end did not come."""


class ChannelStore(dist.Store):  # type: ignore[name-defined, misc]
    """One end's copy. ``tell(key, value)`` sends an entry to the other end, which enters it by ``put``."""

    def __init__(self, tell: Callable[[str, bytes], object], wait_s: float = WAIT_S) -> None:
        super().__init__()
        self._tell = tell
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._entries: dict[str, bytes] = {}
        self._over = ""

    def put(self, key: str, value: bytes) -> None:
        """An entry of the other end."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Nothing more will come: all who wait, and who come to wait, get LaneOver."""
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    # ------------------------------------------------------------------ what c10d calls

    def set(self, key: str, value: str | bytes) -> None:
        """Enter ``value`` here and at the other end."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """The value of ``key``, waiting for it. Raises LaneOver."""
        self.wait([key])
        with self._changed:
            return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""
        with self._changed:
            return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all ``keys``. Raises LaneOver at the end of the channel or of the time."""
        deadline = time.monotonic() + (self._wait_s if timeout is None else timeout.total_seconds())
        with self._changed:
            while not all(key in self._entries for key in keys):
                left = deadline - time.monotonic()
                if self._over or left <= 0:
                    raise ChannelOver(self._over or f"the other end of the channel did not set {keys}")
                self._changed.wait(left)
