"""Heartbeats of idle nodes that come as UDP datagrams, beside the hub's ROUTER and at the same address; and
who is silent is asked there.

Owns the UDP socket and the sessions: which datagram is whose, whether it is what it says
(``protocol.datagrams``), and the answer to it. Each ``Welcome`` opens a session, which lasts until the node's
next one or the end of its connection. Whether a node is still heard, and what its heartbeat means, is the
hub's to say.

A node that trains sends heartbeats over its connection, and where packets are lost TCP may hold that up for
seconds: first 0.2 s, then twice as long each time. So it is asked by UDP when two heartbeats are missing,
again and again, and an answer is a heartbeat. That says that its agent lives, and not that its connection
will carry anything again: nobody is asked who has said nothing there for as long as TCP itself waits.

ZeroMQ's queues are the reason for heartbeats by UDP: of each connection libzmq touches some 30 kB more with
the first 512 messages, which is all that idle nodes ever send. Where there is no UDP everything works as
well, and takes that memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_never

from oobleckd.daemon.connections import Connection
from oobleckd.daemon.readiness import Readiness
from oobleckd.host import tcp
from oobleckd.protocol.agentmessages import Heartbeat
from oobleckd.protocol.datagrams import HEARTBEAT_BYTES, Receiver, address_of, session_of, short_session_of
from oobleckd.protocol.parts import DATAGRAM_KEY_BYTES, DATAGRAM_SESSION_BYTES, DatagramSession

# What comes while the loop is busy waits in the kernel, which gives less than this where it is configured so.
_BUFFER_BYTES = 4 * 2**20
# 256 datagrams a turn made the loop 16 and 19 ms late with 1,000 nodes; 64 make it 3.6, as without UDP.
# (D-detection-011)
_MAX_PER_TURN = 64  # each is checked and answered, which takes longer than reading a message
# Heartbeats, half of the shortest lease; the other half is for questions and answers, some of them lost, too.
_MISSING = 2
_ASK_EVERY = 0.4  # heartbeats
_MAX_ASK_S = tcp.UNANSWERED_S
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DatagramCounters:
    """Datagrams by what they were: heartbeats, answers to questions, of no session that there is, with a
    wrong code, with a counter of before.
    """

    datagram_heartbeats: int = 0
    datagram_answers: int = 0
    datagrams_strange: int = 0
    datagrams_forged: int = 0
    datagrams_replayed: int = 0


Peer = TypeVar("Peer", bound=Connection)


@dataclass(slots=True, eq=False)
class _Session(Generic[Peer]):
    """What one Welcome opened, for the incarnation that its Hello told of, whose ``heartbeat`` it is.
    ``address``: where its newest datagram came from. ``answered_at``: when its last answer came.
    """

    connection: Peer
    heartbeat: Heartbeat
    receiver: Receiver
    address: Any = None
    answered_at: float = float("-inf")


class Heartbeats(Generic[Peer]):
    """All sessions; none until it is bound.

    ``on_datagram`` gets what was proven to come from a connection's node: a heartbeat, or None if it merely
    asks whether it gets through. It says whether to acknowledge it. ``heartbeat_s`` is the distance of
    heartbeats.
    """

    def __init__(
        self, on_datagram: Callable[[Peer, Heartbeat | None], bool], heartbeat_s: float = 0.25
    ) -> None:
        self.counters = DatagramCounters()
        self.port = 0
        self._on_datagram = on_datagram
        self._heartbeat_s = heartbeat_s
        self._heard: dict[Peer, float] = {}  # when each said something last, the longest silent first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._sessions: dict[bytes, _Session[Peer]] = {}
        self._of: dict[Peer, bytes] = {}
        self._num_taken = 0  # since it was asked whether all is calm
        self._socket: socket.socket | None = None
        self._ready: Readiness | None = None

    def bind(self, endpoint: str, *, any_port: bool) -> None:
        """Take the address of the ROUTER's ``endpoint``; with ``any_port`` another port will do where the
        same one is taken.
        """
        self._socket = _bound(endpoint, any_port=any_port)
        if self._socket is not None:
            self.port = int(self._socket.getsockname()[1])
            self._ready = Readiness(self._socket, self._take_one, self._is_calm, _MAX_PER_TURN)

    def start(self) -> None:
        """Begin to listen, on the running event loop."""
        if self._ready is not None:
            self._ready.start()
            self._loop = asyncio.get_running_loop()
            self._look_later()

    def close(self) -> None:
        """Listen no more."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._ready is not None:
            self._ready.stop()
        if self._socket is not None:
            self._socket.close()

    def open_session(self, connection: Peer, incarnation: str) -> DatagramSession | None:
        """A new one, in place of what the connection had; None where there is no UDP."""
        self.end_session(connection)
        if self._socket is None:
            return None
        # No DTLS: there is nothing to hide in a heartbeat. The key comes over CURVE and dies with the
        # connection, so revoking and restarting need no rule of their own. (D-detection-012)
        name, key = secrets.token_bytes(DATAGRAM_SESSION_BYTES), secrets.token_bytes(DATAGRAM_KEY_BYTES)
        self._of[connection] = name
        self._sessions[name] = _Session(connection, Heartbeat(incarnation), Receiver(name, key))
        self.heard(connection)
        return DatagramSession(self.port, name, key)

    def heard(self, connection: Peer) -> None:
        """Note that ``connection`` said something, whichever way."""
        if self._loop is not None and connection in self._of:
            self._heard.pop(connection, None)
            self._heard[connection] = self._loop.time()

    def end_session(self, connection: Peer) -> None:
        """End its session: its datagrams are nobody's from now on."""
        self._heard.pop(connection, None)
        name = self._of.pop(connection, None)
        if name is not None:
            del self._sessions[name]

    def _take_one(self) -> bool:
        assert self._socket is not None
        try:
            data, sender = self._socket.recvfrom(HEARTBEAT_BYTES + 1)
        except OSError:
            return False
        self._num_taken += 1
        if (session := self._sessions.get(session_of(data))) is not None:
            if self._is_answered(session, data, sender):
                self._send(session.receiver.ack(), sender)
        elif (session := self._sessions.get(short_session_of(data))) is not None:
            self._take_answer(session, data)
        else:
            self.counters.datagrams_strange += 1
        return True

    def _is_answered(self, session: _Session[Peer], data: bytes, sender: tuple[str, int]) -> bool:
        verdict = session.receiver.take(data)
        match verdict:
            case "heartbeat":
                self.counters.datagram_heartbeats += 1
                session.address = sender
                self.heard(session.connection)
                return self._on_datagram(session.connection, session.heartbeat)
            case "question":
                session.address = sender
                return self._on_datagram(session.connection, None)
            case "forged":
                self.counters.datagrams_forged += 1
            case "replayed":
                self.counters.datagrams_replayed += 1
            case _:
                assert_never(verdict)
        return False

    def _take_answer(self, session: _Session[Peer], data: bytes) -> None:
        if not session.receiver.is_answer(data):
            self.counters.datagrams_forged += 1
            return
        assert self._loop is not None
        self.counters.datagram_answers += 1
        session.answered_at = self._loop.time()
        self._on_datagram(session.connection, session.heartbeat)

    def _look_later(self) -> None:
        assert self._loop is not None
        after_s = _ASK_EVERY * self._heartbeat_s
        self._next_look = self._loop.call_later(after_s, self._look, self._loop.time() + 2 * after_s)

    def _look(self, latest: float) -> None:
        """Ask those who are silent; not where that may be us, who come to it after ``latest``: what they said
        may not have been read.
        """
        assert self._loop is not None
        self._look_later()
        now = self._loop.time()
        if now > latest:
            return
        for connection, heard_at in list(self._silent_since(now - _MISSING * self._heartbeat_s)):
            session = self._sessions[self._of[connection]]
            if now - heard_at > _MAX_ASK_S:
                del self._heard[connection]
            # The daemon asks, as only it knows who is silent: nothing is sent while all is well. A longer
            # lease for all would find dead hosts later, every day. (D-detection-013)
            elif session.address is not None and now - session.answered_at >= self._heartbeat_s:
                self._send(session.receiver.ask(), session.address)

    def _silent_since(self, then: float) -> Iterator[tuple[Peer, float]]:
        return itertools.takewhile(lambda each: each[1] <= then, self._heard.items())

    def _send(self, data: bytes, address: Any) -> None:
        assert self._socket is not None
        try:
            self._socket.sendto(data, address)
        except OSError as error:
            _log.debug("a datagram was not sent: %s", error)  # the node sends heartbeats over ZeroMQ, then

    def _is_calm(self, resting: bool) -> bool:
        """Whether they come that fast that they wait for each other: nobody waits for any of them."""
        calm = self._num_taken > (not resting)
        self._num_taken = 0
        return calm


def _bound(endpoint: str, *, any_port: bool) -> socket.socket | None:
    """A socket at the address of ``endpoint``; None where it has none, or that is not to be had."""
    address = address_of(endpoint)
    if address is None:
        return None
    host, port = address
    for tried in (port, 0) if any_port else (port,):
        try:
            return _socket_at(host, tried)
        except OSError as error:
            problem = error
    _log.warning("idle nodes send heartbeats over ZeroMQ alone, there is no UDP at %s: %s", endpoint, problem)
    return None


def _socket_at(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
