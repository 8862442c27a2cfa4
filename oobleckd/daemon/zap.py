"""The door of the ZeroMQ endpoint: which CURVE keys may come in (RFC 27, ZAP).

Owns the handler that libzmq asks at each handshake, on the daemon's own event loop: no thread, and the
allow-list may change at any time. A key that is let in becomes the ``User-Id`` of every message of its
connection. Which node a key belongs to, and what it may say, is the hub's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from oobleckd.daemon.readiness import Readiness
from oobleckd.daemon.seldom import Seldom

DOMAIN = b"oobleck"
_VERSION = b"1.0"
_log = logging.getLogger(__name__)


class Door:
    """Answers libzmq's question for one context. ``allows`` is asked with the key as z85 text."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allows: Callable[[str], bool]) -> None:
        self.num_refused = 0
        self._refused = Seldom(_log)
        self._allows = allows
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._ready = Readiness(self._socket, self._answer_one)

    def open(self) -> None:
        """Begin to answer, on the running event loop."""
        self._ready.start()

    def close(self) -> None:
        """Stop answering."""
        self._ready.stop()
        self._socket.close()

    def _answer_one(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The ROUTER's envelope ends with an empty frame; what follows is RFC 27.
        split = frames.index(b"") + 1
        envelope, (_, request, domain, address, _, mechanism, *credentials) = frames[:split], frames[split:]
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        if domain == DOMAIN and key and self._allows(key):
            verdict = (b"200", b"OK", key.encode())
        else:
            self.num_refused += 1
            self._refused.warn(
                "refused a connection from %s: unknown key %s", address.decode(), key or "(none)"
            )
            verdict = (b"400", b"unknown key", b"")
        self._socket.send_multipart([*envelope, _VERSION, request, *verdict, b""])
        return True
