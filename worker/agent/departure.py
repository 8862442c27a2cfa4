"""Lets a node leave before others end it at a known time.

Owns what is known of that end (a SIGTERM with a deadline, a cloud's notice) and when the agent goes: as soon
as the daemon says that nothing of the node is needed, at the latest shortly before the deadline. Whether
something is needed is the daemon's to know, how a cloud tells is ``notices``'.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from oobleckd.protocol.parts import Notice

_LAST_S = 4.0
_SAME_S = 2.0  # signals that come so soon after each other are one
"""Before the deadline: for the goodbye, and for devices that take their time to end. Half of what is left
where that is less.
"""
_log = logging.getLogger(__name__)


class Departure:
    """Of one agent, in its loop. ``on_notice``: tell the daemon; ``leave``: go, with this reason; ``expire``:
    go with it, as the time is up.
    """

    def __init__(
        self,
        *,
        on_notice: Callable[[], None],
        leave: Callable[[str], None],
        expire: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_notice = on_notice
        self._leave, self._expire = leave, expire
        self._reason = ""
        self._ends_at = 0.0
        self._heard_at = 0.0
        self._last_call: asyncio.TimerHandle | None = None

    @property
    def notice(self) -> Notice | None:
        """What the daemon is told in every Hello; None while nobody is about to end this node."""
        if not self._reason:
            return None
        return Notice(self._reason, max(0.0, self._ends_at - self._loop.time()))

    @property
    def just_noticed(self) -> bool:
        """Whether who says it now says the same thing: a batch system tells a process, and its group, and
        each process of that.
        """
        return self.notice is not None and self._loop.time() - self._heard_at < _SAME_S

    def noticed(self, reason: str, left_s: float) -> None:
        """The node will be ended in ``left_s`` seconds. Of several such words the earliest end counts."""
        ends_at = self._loop.time() + left_s
        if self._last_call is not None:
            if ends_at >= self._ends_at:
                return
            self._last_call.cancel()
        self._reason, self._ends_at, self._heard_at = reason, ends_at, self._loop.time()
        _log.warning("%s: this node ends in %.0f s; what it holds moves elsewhere", reason, left_s)
        self._last_call = self._loop.call_later(left_s - min(_LAST_S, left_s / 2), self._expire, reason)
        self._on_notice()

    def dismissed(self) -> None:
        """The daemon has no use for this node any more."""
        if self._reason:
            self._leave(self._reason)

    def close(self) -> None:
        """No more."""
        if self._last_call is not None:
            self._last_call.cancel()
