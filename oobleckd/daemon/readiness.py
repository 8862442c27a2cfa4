"""ZeroMQ sockets on an asyncio loop: edge-triggered file descriptors made safe, with bounded turns.

Owns when a socket is looked at. A bare ``await recv()`` loop starves the loop (a finished future does not
yield), and the descriptor of a ZeroMQ socket tells of a *change* only: it must be read until empty, and
looked at again after every send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

MOST_PER_TURN = 256


class Readiness:
    """Calls ``take_one`` while it returns True, at most 256 times a turn of the running loop."""

    def __init__(self, socket: zmq.Socket[bytes], take_one: Callable[[], bool]) -> None:
        self._socket = socket
        self._take_one = take_one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._scheduled = False

    def start(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
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

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        for _ in range(MOST_PER_TURN):
            if self._loop is None or not self._take_one():
                return
        self.look()
