"""The daemon's clock: POSIX seconds that never go back, whatever is done to the wall clock meanwhile."""

from __future__ import annotations

import time


class Clock:
    """Wall-clock time at the start, carried on by the monotonic clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        """POSIX seconds, monotone."""
        return time.monotonic() + self._offset_s
