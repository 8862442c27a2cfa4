"""The agent as a service of systemd: that it is ready, what it does in one line, and that its loop still
turns.

Owns when that is said. Outside of systemd nothing happens. What a device does is its ``watchdog``'s.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from oobleckd.host import sd

_STATUS_EVERY_S = 5.0


class SystemdService:
    """Of one agent, in its loop. ``line`` is what ``systemctl status`` shows."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._line = line
        self._timer: asyncio.TimerHandle | None = None
        watchdog_s = sd.watchdog_s()
        self._every_s = min(_STATUS_EVERY_S, watchdog_s / 3) if watchdog_s else _STATUS_EVERY_S

    def start(self) -> None:
        """Ready; and from now on a sign of life."""
        if os.environ.get("NOTIFY_SOCKET"):
            sd.notify("READY=1")
            self._say()

    def close(self) -> None:
        """The agent ends its devices, which takes a while."""
        if self._timer is not None:
            self._timer.cancel()
            sd.notify("STOPPING=1", f"STATUS={self._line()}; ends its devices")

    def _say(self) -> None:
        sd.notify(f"STATUS={self._line()}", "WATCHDOG=1")
        self._timer = self._loop.call_later(self._every_s, self._say)
