"""Connections to the port for nodes on which nobody has said anything yet.

Owns which these are, and that they give way where descriptors run short: a node says Hello within
milliseconds, and who says nothing would keep the last descriptors from everybody for as long as a handshake
may take. ZeroMQ accepts them by itself, all there are, so they give way before the reserve of ``accepting``
is touched.
"""

from __future__ import annotations

import contextlib
import resource
import socket

RESERVE = 64
"""Descriptors, but no more than a quarter of what there may be."""


def is_scarce(fd: int, reserves: int = 1) -> bool:
    """Whether ``fd`` is among the last ones, so many ``reserves``: the kernel gives out the lowest number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fd >= limit - reserves * _reserve(limit)


def _reserve(limit: int) -> int:
    return min(RESERVE, limit // 4)


class HalfOpen:
    """By descriptor, oldest first. ``num_dropped`` so far."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._fds: dict[int, None] = {}

    def accepted(self, fd: int, port: int) -> None:
        """A new one, at ``port``."""
        self._fds.pop(fd, None)
        self._fds[fd] = None
        if is_scarce(fd, 2):
            self.make_room(port)

    def make_room(self, port: int) -> bool:
        """Drop all but the newest; whether there were others."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = self.num_dropped
        # Who floods connects as fast as one after the other could be dropped.
        for fd in list(self._fds)[: -(_reserve(limit) // 2)]:
            del self._fds[fd]
            self.num_dropped += _shut(fd, port)
        return self.num_dropped > before

    def over(self, fd: int) -> None:
        """Something was said on it, or it is gone."""
        self._fds.pop(fd, None)


def _shut(fd: int, port: int) -> bool:
    """End it, if it is there still: its number may have been given to another one meanwhile."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            if sock.family in {socket.AF_INET, socket.AF_INET6} and sock.getsockname()[1] == port:
                sock.shutdown(socket.SHUT_RDWR)
                return True
        finally:
            sock.detach()  # it is the router's
    return False
