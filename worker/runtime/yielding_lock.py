"""A lock over the engine, which the device's loop holds except while a layer computes.

A layer takes milliseconds to seconds, and a survivor of a loss is asked how far it is. Whoever answers
(``device``) takes the lock while the layer computes, and does not wait for its end. Between two layers
nothing is half done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

Released = Callable[[], AbstractContextManager[object]]
"""What the engine enters while it computes and touches nothing of its own."""


class YieldingLock:
    """A lock that its holder gives away for a while."""

    __slots__ = ("_away", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._away = _Away(self._lock)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def released(self) -> _Away:
        """Others may have a turn, until the end of the block; the caller has the turn before and after."""
        return self._away


class _Away:
    """``YieldingLock.released``. A class, of which a lock has one object: a generator's machinery, or another
    object each time, would take longer than the rest, three times in every layer.
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        # A survivor that is asked how far it is would otherwise wait for the task's end: 60 to 85 ms from a
        # loss to the decision, and not 20 to 26. (D-recovery-013)
        self._lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.acquire()
