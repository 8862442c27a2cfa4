"""Asks agents for the newest lines of their nodes' logs, for the API.

Owns which questions are open, for how long, and how many at once. The core knows nothing of them: nothing is
decided by a log.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from oobleckd.protocol.agentmessages import LogTold, TellLog

WAIT_S = 2.0
DEFAULT_LINES, MAX_LINES = 200, 1000
MAX_OPEN = 64
"""Questions; an answer has 256 KiB at most."""


class TooManyQuestions(Exception):
    """So many are open that there is no room for another one."""


class NodeLogs:
    """``tell`` sends to the agent of a node, if it is connected."""

    def __init__(self, tell: Callable[[str, TellLog], None]) -> None:
        self._tell = tell
        self._open: dict[str, tuple[str, asyncio.Future[LogTold]]] = {}  # ticket -> node, answer

    async def newest(self, node: str, num_lines: int) -> LogTold:
        """The answer of ``node``. Raises TimeoutError where there is none in time, and TooManyQuestions."""
        if len(self._open) >= MAX_OPEN:
            raise TooManyQuestions
        ticket = secrets.token_hex(8)
        answer: asyncio.Future[LogTold] = asyncio.get_running_loop().create_future()
        self._open[ticket] = (node, answer)
        try:
            self._tell(node, TellLog(ticket, num_lines))
            return await asyncio.wait_for(answer, WAIT_S)
        finally:
            del self._open[ticket]

    def heard(self, node: str, message: LogTold) -> None:
        """``node`` answers; nothing where it was not asked, or too long ago."""
        asked, answer = self._open.get(message.ticket, ("", None))
        if answer is not None and asked == node and not answer.done():
            answer.set_result(message)
