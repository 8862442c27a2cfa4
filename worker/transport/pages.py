"""Memory of its own for every large tensor message that comes in: whole pages, which the next message of that
size gets when nobody has the last one any more.

From the heap, which keeps what is freed (``children``), it would stay: messages come at all times and from
many threads, and between what else is allocated they leave gaps that nothing fills (docs/decisions.md,
2026-11-27). Fresh pages for each message would take longer to be cleared by the kernel than to be filled.
Owns the pages that lie idle, and how many may. Knows no messages.
"""

from __future__ import annotations

import mmap
import threading
import weakref

_KEPT = 2
"""Idle pages are kept for so many of the largest messages."""


class Pages:
    """Thread-safe. What it gives is free again as soon as nothing refers to it, tensors that were made of it
    included.
    """

    def __init__(self) -> None:
        # Reentrant: whatever is called with it held may end the life of a piece, which calls ``_back``.
        self._lock = threading.RLock()
        self._idle: list[mmap.mmap] = []
        self._largest = 0

    def take(self, num_bytes: int) -> memoryview:
        """At least ``num_bytes`` (> 0) of memory, with whatever in it. Raises OSError when there is none."""
        with self._lock:
            self._largest = max(self._largest, num_bytes)
            # Read into the heap, messages left gaps that nothing fills: processes of four blocks of width
            # 512 held 343 MiB where 272 were planned. (D-devices-012)
            fitting = [piece for piece in self._idle if num_bytes <= len(piece) <= num_bytes + num_bytes // 4]
            if fitting:
                piece = min(fitting, key=len)
                self._idle = [other for other in self._idle if other is not piece]
            else:
                piece = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                piece.madvise(mmap.MADV_HUGEPAGE)
        lent = memoryview(piece)
        weakref.finalize(lent, self._back, piece).atexit = False
        return lent

    def clear(self) -> None:
        """Give all idle memory back to the kernel."""
        with self._lock:
            self._idle, self._largest = [], 0

    @property
    def idle_bytes(self) -> int:
        """Of memory that waits for a message."""
        with self._lock:
            return sum(map(len, self._idle))

    def _back(self, piece: mmap.mmap) -> None:
        with self._lock:
            # The last is the warmest.
            self._idle.append(piece)
            # More would be memory that nobody planned. Fresh pages for each message take 2.3 times as long
            # to be cleared as to be filled; with kept ones reading takes as long as into the heap.
            # (D-devices-012)
            while self.idle_bytes > _KEPT * self._largest:
                del self._idle[0]


MESSAGE_PAGES = Pages()
"""Of this process."""
