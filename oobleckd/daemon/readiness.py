"""ZeroMQ sockets on an asyncio loop: edge-triggered file descriptors made safe, with bounded turns. A UDP
socket is looked at in the same way.

Owns when a socket is looked at. A bare ``await recv()`` loop starves the loop (a finished future does not
yield), and the descriptor of a ZeroMQ socket tells of a *change* only: it must be read until empty, and
looked at again after every send.

Where thousands of messages a second come that nobody waits for, waking up for each costs several times what
it takes to read it. So the one who reads may say that it is *calm*: then the socket is looked at after a
rest, and not at once when something comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

MAX_PER_TURN = 256


# To wake up for each message costs several times what it takes to read it: with 10,000 nodes 47 % of a core
# became 29 %. What is no heartbeat waits 2 ms and ends the rest. (D-daemon-011)
REST_S = 0.002


class WatchedTask(Protocol):
    """A socket."""

    def fileno(self) -> int:
        """Its descriptor, which tells that there may be something to take."""


def never(_resting: bool) -> bool:
    """Nothing is calm."""
    return False


class Readiness:
    """Calls ``take_one`` while it returns True, at most ``max_per_turn`` times a turn of the running loop.

    ``calm`` is asked once a turn when nothing is left: whether what comes next may wait for ``REST_S``. Its
    argument: whether this turn was after such a rest.
    """

    def __init__(
        self,
        socket: WatchedTask,
        take_one: Callable[[], bool],
        calm: Callable[[bool], bool] = never,
        max_per_turn: int = MAX_PER_TURN,
    ) -> None:
        self._socket = socket
        self._take_one = take_one
        self._calm = calm
        self._max_per_turn = max_per_turn
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._scheduled = False
        self._rest: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._turn)
        self.look()

    def look(self) -> None:
        """Look at the socket in the next turn, whatever its descriptor says (needed after each send)."""
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def stop(self) -> None:
        """Take nothing any more."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        if self._rest is not None:
            self._rest.cancel()

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _rested_turn(self) -> None:
        loop, self._rest = self._loop, None
        if loop is None:
            return
        self._turn(rested=True)
        if self._rest is None and self._loop is not None:
            loop.add_reader(self._fd, self._turn)  # what has come meanwhile shows at once

    def _turn(self, *, rested: bool = False) -> None:
        for _ in range(self._max_per_turn):
            if self._loop is None:
                return
            if not self._take_one():
                self._emptied(rested=rested)
                return
        self.look()

    def _emptied(self, *, rested: bool) -> None:
        loop = self._loop
        if loop is None or self._rest is not None or not self._calm(rested):
            return
        if not rested:
            loop.remove_reader(self._fd)
        self._rest = loop.call_later(REST_S, self._rested_turn)
