"""Descriptors that are held ready for the moment in which there is none left.

Owns a few open files that mean nothing. A listening socket whose next connection cannot be taken stays
readable, and whoever waits for it spins; with a spare given up for a moment that connection is taken, and
closed or kept.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time

NUM_SPARES = 8
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SAY_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Spares:
    """``NUM_SPARES`` of them, or as many as there can be."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._fds: list[int] = []
        self._said_at = -_SAY_EVERY_S
        self.refill()

    def accept(self, listening: socket.socket) -> socket.socket | None:
        """A connection that waits there, in the place of a spare; None: there is none, or no spare either."""
        self.say()
        if not self._fds:
            self.refill()
        if not self._fds:
            return None
        os.close(self._fds.pop())
        try:
            made, _ = listening.accept()
        except OSError:
            self.refill()
            return None
        return made

    def refuse(self, refused: socket.socket) -> None:
        """Close what was accepted, and have the spare again."""
        refused.close()
        self.num_refused += 1
        self.refill()

    def drain(self, listening: socket.socket, most: int = 256) -> None:
        """Take and close what waits there."""
        for _ in range(most):
            if (made := self.accept(listening)) is None:
                return
            self.refuse(made)

    def refill(self) -> None:
        """As many as there can be."""
        while len(self._fds) < NUM_SPARES:
            try:
                self._fds.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return

    def say(self) -> None:
        """That there are no descriptors left: once, and a minute later again."""
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            _log.warning(
                "no file descriptor is free: new connections are closed or wait (%d closed before); raise "
                "LimitNOFILE, or look who holds so many",
                self.num_refused,
            )

    def close(self) -> None:
        """Give them up."""
        while self._fds:
            os.close(self._fds.pop())
