"""Beats of idle nodes that come as UDP datagrams, beside the hub's ROUTER and at the same address.

Owns the UDP socket and the sessions: which datagram is whose, whether it is what it says (``protocol.datagrams``), and the
answer to it. Each ``Welcome`` opens a session, which lasts until the node's next one or the end of its connection. Whether a node is still heard, and what its
beat means, is the hub's to say.

ZeroMQ's queues are the reason: of each connection libzmq touches some 30 kB more with the first 512 messages, which is all that idle nodes ever send.
Where there is no UDP everything works as well, and takes that memory.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

from oobleckd.daemon.connections import Connection
from oobleckd.daemon.readiness import Readiness
from oobleckd.protocol.datagrams import BEAT_BYTES, Receiver, address_of, session_of
from oobleckd.protocol.messages import Beat
from oobleckd.protocol.parts import DATAGRAM_KEY_BYTES, DATAGRAM_SESSION_BYTES, DatagramSession

# What comes while the loop is busy waits in the kernel, which gives less than this where it is configured so.
_BUFFER_BYTES = 4 * 2**20
_MOST_PER_TURN = 64  # each is checked and answered, which takes longer than reading a message
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DatagramCounters:
    """Datagrams by what they were: beats, of no session that there is, with a wrong code, with a counter of before."""

    datagram_beats: int = 0
    datagrams_strange: int = 0
    datagrams_forged: int = 0
    datagrams_replayed: int = 0


Peer = TypeVar("Peer", bound=Connection)


@dataclass(slots=True, eq=False)
class _Session(Generic[Peer]):
    """What one Welcome opened, for the life that its Hello told of, whose ``beat`` it is."""

    connection: Peer
    beat: Beat
    receiver: Receiver


class Beats(Generic[Peer]):
    """All sessions; none until it is bound.

    ``on_datagram`` gets what was proven to come from a connection's node: a beat, or None if it merely asks whether it gets
    through. It says whether to answer.
    """

    def __init__(self, on_datagram: Callable[[Peer, Beat | None], bool]) -> None:
        self.counters = DatagramCounters()
        self.port = 0
        self._on_datagram = on_datagram
        self._sessions: dict[bytes, _Session[Peer]] = {}
        self._of: dict[Peer, bytes] = {}
        self._num_taken = 0  # since it was asked whether all is calm
        self._socket: socket.socket | None = None
        self._ready: Readiness | None = None

    def bind(self, endpoint: str, *, any_port: bool) -> None:
        """Take the address of the ROUTER's ``endpoint``; with ``any_port`` another port will do where the same one is taken."""
        self._socket = _bound(endpoint, any_port=any_port)
        if self._socket is not None:
            self.port = int(self._socket.getsockname()[1])
            self._ready = Readiness(self._socket, self._take_one, self._is_calm, _MOST_PER_TURN)

    def start(self) -> None:
        """Begin to listen, on the running event loop."""
        if self._ready is not None:
            self._ready.start()

    def close(self) -> None:
        """Listen no more."""
        if self._ready is not None:
            self._ready.stop()
        if self._socket is not None:
            self._socket.close()

    def open_session(self, connection: Peer, incarnation: str) -> DatagramSession | None:
        """A new one, in place of what the connection had; None where there is no UDP."""
        self.end_session(connection)
        if self._socket is None:
            return None
        name, key = secrets.token_bytes(DATAGRAM_SESSION_BYTES), secrets.token_bytes(DATAGRAM_KEY_BYTES)
        self._of[connection] = name
        self._sessions[name] = _Session(connection, Beat(incarnation), Receiver(name, key))
        return DatagramSession(self.port, name, key)

    def end_session(self, connection: Peer) -> None:
        """Its datagrams are nobody's from now on."""
        name = self._of.pop(connection, None)
        if name is not None:
            del self._sessions[name]

    def _take_one(self) -> bool:
        assert self._socket is not None
        try:
            data, sender = self._socket.recvfrom(BEAT_BYTES + 1)
        except OSError:
            return False
        self._num_taken += 1
        session = self._sessions.get(session_of(data))
        if session is None:
            self.counters.datagrams_strange += 1
        elif self._is_answered(session, data):
            self._answer(session.receiver.ack(), sender)
        return True

    def _is_answered(self, session: _Session[Peer], data: bytes) -> bool:
        verdict = session.receiver.take(data)
        match verdict:
            case "beat":
                self.counters.datagram_beats += 1
                return self._on_datagram(session.connection, session.beat)
            case "question":
                return self._on_datagram(session.connection, None)
            case "forged":
                self.counters.datagrams_forged += 1
            case "replayed":
                self.counters.datagrams_replayed += 1
            case _:
                assert_never(verdict)
        return False

    def _answer(self, data: bytes, sender: tuple[str, int]) -> None:
        assert self._socket is not None
        try:
            self._socket.sendto(data, sender)
        except OSError as error:
            _log.debug("an answer was not sent: %s", error)  # the node beats over ZeroMQ, then

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
    _log.warning("idle nodes beat over ZeroMQ alone, there is no UDP at %s: %s", endpoint, problem)
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
