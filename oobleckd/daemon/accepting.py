"""Who is let in to the API: so many connections for each user, a reserve for root, and no spinning.

Owns accepting, and connections until they are gone. A user, or an address on TCP, has ``MAX_EACH`` at most;
the last descriptors are for root and the daemon's own user. What is said on a connection is ``http``'s, and
that a head comes in time is aiohttp's (``HEAD_S``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from oobleckd.daemon.halfopen import is_scarce
from oobleckd.daemon.peers import owner_of
from oobleckd.daemon.spares import FULL, Spares
from oobleckd.host import heap

HEAD_S = 10.0
"""For the head of a request, for TLS, and between two requests."""
MAX_EACH, MAX_OTHERS = 64, 1024
"""Connections of one user, and of all but root and the daemon's own user."""
# At most so many in a turn and then a short rest: who connects again and again takes some percent of a core,
# and whoever waits behind them some tenths of a second. (D-service-021)
_PER_TURN, _REST_S = 16, 0.004
_BACKLOG = 1024
_FULL_REST_S = 1.0
_SWEEP_S = 5.0
_SAY_EVERY_S = 60.0
_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
    b"Retry-After: 1\r\nContent-Length: %d\r\n\r\n%s"
)
_PROBLEM = (
    b'{"title":"too many connections","status":429,'
    b'"detail":"as many connections are open as one user may have",'
    b'"hint":"close some, and ask again","retry_s":1.0}'
)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    """One that was let in. ``closing``: it was being closed when it was looked at last."""

    sock: socket.socket
    transport: asyncio.Transport | None = None
    closing: bool = False

    @property
    def gone(self) -> bool:
        """Whether it is closed."""
        return self.sock.fileno() < 0


@dataclass(slots=True)
class Guests:
    """Connections by whose they are (None: root's and our own), of all listening sockets together."""

    spares: Spares
    by_owner: dict[str | None, list[_Connection]] = field(default_factory=dict)
    num_refused: int = 0
    said_at: float = -_SAY_EVERY_S

    def admit(self, sock: socket.socket) -> _Connection | None:
        """A new connection, unless its owner has too many, or no more than the reserve is left."""
        owner = owner_of(sock)
        connection = _Connection(sock)
        if owner is not None and not self._has_room(owner, sock.fileno()):
            self._refused(owner)
            return None
        self.by_owner.setdefault(owner, []).append(connection)
        return connection

    def sweep(self) -> None:
        """Forget who is gone, and drop who was told to go and does not read what is left to be said."""
        for owner in list(self.by_owner):
            self._prune(owner)
            for each in self.by_owner.get(owner, ()):
                closing = each.transport is not None and each.transport.is_closing()
                if closing and each.closing and each.transport is not None:
                    each.transport.abort()
                each.closing = closing
        self.spares.refill()

    def _has_room(self, owner: str, fd: int) -> bool:
        if is_scarce(fd):
            return False
        if len(self.by_owner.get(owner, ())) >= MAX_EACH:
            self._prune(owner)
        others = sum(len(each) for name, each in self.by_owner.items() if name is not None)
        return len(self.by_owner.get(owner, ())) < MAX_EACH and others < MAX_OTHERS

    def _prune(self, owner: str | None) -> None:
        kept = [each for each in self.by_owner.get(owner, ()) if not each.gone]
        if kept:
            self.by_owner[owner] = kept
        else:
            self.by_owner.pop(owner, None)

    def _refused(self, owner: str) -> None:
        self.num_refused += 1
        now = time.monotonic()
        if now - self.said_at >= _SAY_EVERY_S:
            self.said_at = now
            _log.warning(
                "refused a connection of %s: as many are open as one user may have (%d refused so far)",
                owner,
                self.num_refused,
            )


class GuardedSite(web.BaseSite):
    """Serves ``runner`` on ``listening``, which is bound, to whom ``guests`` admits. ``path``: of its socket,
    if that is of our own making.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        listening: socket.socket,
        guests: Guests,
        *,
        context: ssl.SSLContext | None = None,
        path: Path | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=context)
        self.path, self.guests = path, guests
        self._served, self._listening = runner, listening
        self._tasks: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """Where it listens."""
        return str(self._listening.getsockname())

    async def start(self) -> None:
        """Begin to accept."""
        await super().start()
        self._listening.setblocking(False)
        self._listening.listen(_BACKLOG)
        self._go_on()
        self._look_after()

    async def stop(self) -> None:
        """Nobody new."""
        for timer in (self._rest, self._sweep):
            if timer is not None:
                timer.cancel()
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
        await super().stop()

    def _go_on(self) -> None:
        self._rest = None
        asyncio.get_running_loop().add_reader(self._listening, self._take)

    def _pause(self, rest_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        self._rest = loop.call_later(rest_s, self._go_on)

    def _take(self) -> None:
        for _ in range(_PER_TURN):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._take_with_spare()
                return
            self._let_in(sock)
        self._pause(_REST_S)

    def _take_with_spare(self) -> None:
        """No descriptor is left: root gets one that was held for this."""
        sock = self.guests.spares.accept(self._listening)
        if sock is None:
            self._pause(_FULL_REST_S)
        elif owner_of(sock) is not None:
            self.guests.spares.refuse(sock)
        else:
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        connection = self.guests.admit(sock)
        if connection is None:
            with contextlib.suppress(OSError):
                if self._ssl_context is None:
                    sock.send(_TOO_MANY % (len(_PROBLEM), _PROBLEM))
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection) -> None:
        server = self._served.server
        assert server is not None
        handshake_s = HEAD_S if self._ssl_context is not None else None
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                server, connection.sock, ssl=self._ssl_context, ssl_handshake_timeout=handshake_s
            )
        except (OSError, ssl.SSLError, TimeoutError):
            connection.sock.close()  # who does not speak TLS, or has gone
        else:
            connection.transport = transport

    def _look_after(self) -> None:
        self.guests.sweep()
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, heap.give_back)
        self._sweep = loop.call_later(_SWEEP_S, self._look_after)
