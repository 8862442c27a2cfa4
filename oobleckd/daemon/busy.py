"""How long the event loop is not free: the time between two looks at its descriptors and timers.

Owns the measurement. Whatever a node says waits that long at most, so this is what a flood of questions, or a
slow answer, does to everybody else.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque

_KEPT_S = 60


class BusySelector(selectors.EpollSelector):
    """A selector that knows how long nobody looked at it. ``longest_s``: of the last minute."""

    def __init__(self) -> None:
        super().__init__()
        self._left_at = time.monotonic()
        self._by_second: deque[tuple[int, float]] = deque(maxlen=_KEPT_S)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of every selector."""
        self._note(time.monotonic())
        try:
            return super().select(timeout)
        finally:
            self._left_at = time.monotonic()

    @property
    def longest_s(self) -> float:
        """The longest time in the last minute that the loop was not free."""
        oldest = int(time.monotonic()) - _KEPT_S
        return max((took_s for second, took_s in self._by_second if second >= oldest), default=0.0)

    def forget(self) -> None:
        """What was so far, as at a start, when nobody is heard yet."""
        self._by_second.clear()
        self._left_at = time.monotonic()

    def _note(self, now: float) -> None:
        took_s, second = now - self._left_at, int(now)
        known = self._by_second
        if known and known[-1][0] == second:
            if took_s > known[-1][1]:
                known[-1] = (second, took_s)
        else:
            known.append((second, took_s))


class MeasuredLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, with such a selector."""

    def __init__(self) -> None:
        self.busy = BusySelector()
        super().__init__(self.busy)


def longest_s() -> float:
    """Of the running loop; 0.0 where it is not measured."""
    loop = asyncio.get_running_loop()
    return loop.busy.longest_s if isinstance(loop, MeasuredLoop) else 0.0


def forget() -> None:
    """Of the running loop, where it is measured."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, MeasuredLoop):
        loop.busy.forget()
