"""The hub: the ZeroMQ ROUTER to which all agents connect.

Owns the sockets, and who is who: with CURVE the *key* of a connection names its node (the ZeroMQ identity
can be anybody's, so self-chosen ones are refused), without it (loopback only) the first ``Hello`` does.
Passes on what nodes say, and that a node's connection closed, once everything readable of it was passed
on. Owns no lease and no judgement: that is the core's.

What several connections of one node mean is ``connections``', and what sends heartbeats as a datagram
``heartbeats``'.

Errors: HubError with ``hint``.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from oobleckd.daemon.config import is_loopback
from oobleckd.daemon.connections import Connection, Connections
from oobleckd.daemon.halfopen import HalfOpen
from oobleckd.daemon.heartbeats import Heartbeats
from oobleckd.daemon.keys import KeyPair
from oobleckd.daemon.readiness import Readiness
from oobleckd.daemon.seldom import Seldom
from oobleckd.daemon.spares import Spares
from oobleckd.daemon.zap import DOMAIN, Door
from oobleckd.host import tcp, urgency
from oobleckd.planner.plan import node_of
from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import FiguresTold, Heartbeat, Hello, Refused, Welcome
from oobleckd.protocol.messages import PROTOCOL, FromWorker, ToWorker
from oobleckd.protocol.parts import RefusalCause
from oobleckd.protocol.text import visible
from oobleckd.protocol.unreadable import UNREADABLE
from oobleckd.protocol.versions import OLDEST, spoken, words

_MAX_MESSAGE_BYTES = 64 * 2**20
_BACKLOG = 4096
_LINGER_MS = 200
_ZERO_COPY_RECV = 10  # of zmq_ctx_set; pyzmq has no name for it
_MAX_BAD = 64
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_LISTENING | zmq.EVENT_ACCEPT_FAILED
_HANDSHAKE_S = 10.0
_log = logging.getLogger(__name__)


class HubError(Exception):
    """The endpoint cannot be opened."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@dataclass(slots=True)
class HubCounters:
    """What went through, and what did not."""

    received: int = 0
    sent: int = 0
    unknown: int = 0
    damaged: int = 0
    refused: int = 0
    undeliverable: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class _Peer(Connection):
    """One connection. ``key``: its CURVE key. ``num_bad``: messages of it that could not be read.
    ``incarnation``: of its last Hello. ``told``: something was told on it since it was last heard.
    """

    identity: bytes
    key: str
    num_bad: int = 0
    incarnation: str = ""
    told: bool = False


class Hub:
    """All agents' connections.

    ``pair`` is the daemon's key pair, None for no CURVE; ``allowed`` maps public keys to nodes; ``udp``: idle
    nodes may send heartbeats as datagrams, and others are asked by them when heartbeats are missing, which
    come every ``heartbeat_s``. The constructor binds (so that ``endpoint`` is known), ``start`` begins to
    listen. Raises HubError.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        pair: KeyPair | None,
        allowed: Mapping[str, str],
        udp: bool = True,
        heartbeat_s: float = 0.25,
    ) -> None:
        if pair is None and not is_loopback(endpoint):
            raise HubError(
                f"{endpoint} reaches beyond this machine, and there is no key",
                "make keys with `oobleckctl keygen`, or bind to 127.0.0.1",
            )
        self.counters = HubCounters()
        self._curve = pair is not None
        self._allowed = dict(allowed)
        self._peers: dict[bytes, _Peer] = {}
        self._connections: Connections[_Peer] = Connections()
        # Connections by descriptor, oldest first: the kernel gives a closed one's number to the next.
        self._by_fd: dict[int, list[bytes]] = {}
        self._closed_fds: deque[int] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # Without it, and without scipy in this process, 10,000 agents take 482 MB and not 580.
        # (D-daemon-013)
        self._context.set(_ZERO_COPY_RECV, 0)  # a page of counters for each connection, for what is short
        if urgency.hurries():
            self._context.set(zmq.THREAD_SCHED_POLICY, urgency.POLICY)
            self._context.set(zmq.THREAD_PRIORITY, urgency.priority())
        self._door = Door(self._context, lambda key: key in self._allowed)
        self._router = self._open_router(pair, endpoint)
        self.spares = Spares()
        self.half_open = HalfOpen()
        self._refusals, self._damaged = Seldom(_log), Seldom(_log)
        self._listening: list[socket.socket] = []
        self._monitor = self._router.get_monitor_socket(_EVENTS)
        self._messages = Readiness(self._router, self._take_message, self._is_calm)
        self._num_heartbeats = self._num_others = 0  # since it was asked whether all is calm
        self._closings = Readiness(self._monitor, self._take_closing)
        self.heartbeats: Heartbeats[_Peer] = Heartbeats(self._proven, heartbeat_s)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise HubError(f"cannot listen on {endpoint}: {error}", "name another with --endpoint") from error
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(self.endpoint.rpartition(":")[2])
        if udp:
            self.heartbeats.bind(self.endpoint, any_port=endpoint.endswith((":0", ":*")))

    @property
    def num_refused_keys(self) -> int:
        """Connections that the door did not let in."""
        return self._door.num_refused

    def start(self, on_heard: Callable[[str, FromWorker], None], on_lost: Callable[[str], None]) -> None:
        """Begin to listen, on the running event loop, where both are called with a node's name."""

        def heard(node: str, message: FromWorker) -> None:
            if _speaks_for(node, message):
                on_heard(node, message)
            else:
                self.counters.refused += 1
                _log.warning(
                    "refused %s of %s: it speaks for a device of another node", type(message).__name__, node
                )

        self._connections.listen(heard, on_lost)
        self._door.open()
        self._messages.start()
        self._closings.start()
        self.heartbeats.start()

    def close(self) -> None:
        """Close every connection. Agents keep trying to come back; their work goes on."""
        self.heartbeats.close()
        self._messages.stop()
        self._closings.stop()
        for each in self._listening:
            each.detach()  # it is the router's
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._door.close()
        self.spares.close()
        self._context.term()

    def allow(self, allowed: Mapping[str, str]) -> None:
        """Another allow-list. Connections whose key is no longer in it are not heard any more."""
        self._allowed = dict(allowed)

    def tell(self, node: str, message: ToWorker) -> None:
        """Send to the agent of ``node``; dropped (and counted) when it is not connected."""
        peer = self._connections.of(node)
        if peer is None or (self._curve and self._allowed.get(peer.key) != node):
            self.counters.undeliverable += 1
            return
        if isinstance(message, Welcome):
            session = self.heartbeats.open_session(peer, peer.incarnation)
            message = msgspec.structs.replace(message, datagrams=session)
        peer.told = True
        self._send(peer.identity, message)

    # ------------------------------------------------------------------- in

    def _take_message(self) -> bool:
        router = self._router
        try:
            identity = router.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._report_closed()
            return False
        self.counters.received += 1
        peer = self._peers.get(identity)
        if peer is None:
            frames = router.recv_multipart(copy=False)
            peer, parts = self._newcomer(identity, frames[0]), [frame.bytes for frame in frames]
        else:
            parts = router.recv_multipart()  # frames that tell what they came on cost several times as much
        if len(parts) == 1:
            self._receive(peer, parts[0])
        else:
            self.counters.damaged += 1
        return True

    def _newcomer(self, identity: bytes, frame: zmq.Frame) -> _Peer:
        fd = int(frame.get(zmq.SRCFD))
        self.half_open.over(fd)
        self._by_fd.setdefault(fd, []).append(identity)
        key = str(frame.get("User-Id")) if self._curve else ""
        peer = self._peers[identity] = _Peer(identity=identity, key=key)
        return peer

    def _receive(self, peer: _Peer, data: bytes) -> None:
        if self._curve and peer.key not in self._allowed:
            hint = "make a new one: oobleckctl keygen"
            self._refuse(peer, "its key is no longer in the allow-list", hint, "key-revoked")
            return
        peer.told = False
        self.heartbeats.heard(peer)
        if peer.num_bad >= _MAX_BAD:
            self.counters.damaged += (
                1  # it was said often enough: nothing of this connection is looked at any more
            )
            return
        try:
            message = codec.decode_from_worker(data)
        except codec.UnknownTagError as error:
            self.counters.unknown += 1
            _log.info("ignored %s of %s", error, peer.node or "a newcomer")
        except codec.CodecError as error:
            self._receive_damaged(peer, data, error)
        else:
            if isinstance(message, Heartbeat):
                self._num_heartbeats += 1
            else:
                self._num_others += 1
            self._heard(peer, message)

    def _is_calm(self, resting: bool) -> bool:
        """Whether heartbeats come that fast that they wait for each other, and nothing else does."""
        calm = not self._num_others and self._num_heartbeats > (not resting)
        self._num_heartbeats = self._num_others = 0
        return calm

    def _receive_damaged(self, peer: _Peer, data: bytes, error: codec.CodecError) -> None:
        # Another protocol's Hello may have other fields: say what is wrong instead of counting damage.
        speaks = _protocols_of_hello(data)
        if speaks is not None and spoken(*speaks) is None:
            self._refuse_protocol(peer, *speaks)
            return
        self.counters.damaged += 1
        peer.num_bad += 1
        self._damaged.warn("ignored a damaged message of %s: %s", peer.node or "a newcomer", error)

    def _heard(self, peer: _Peer, message: FromWorker) -> None:
        if not isinstance(message, Hello):
            self._connections.heard(peer, message)
        elif not peer.replaced and (node := self._owner(peer, message)):
            peer.incarnation = message.incarnation
            self._connections.introduced(peer, node, message)

    def _proven(self, peer: _Peer, heartbeat: Heartbeat | None) -> bool:
        """A datagram of ``peer``; whether to answer it. Without an answer its node sends heartbeats over
        ZeroMQ, which it shall do once after everything that it was told: that a connection carries nothing
        any more is noticed by what is missing on it.
        """
        if peer.replaced or peer.num_bad >= _MAX_BAD:
            return False
        if self._curve and self._allowed.get(peer.key) != peer.node:
            return False  # it hears why when it sends heartbeats over ZeroMQ
        if heartbeat is not None:
            self._connections.heard(peer, heartbeat)
        # Else a node would look alive by UDP while work is given to it on a connection that carries
        # nothing. (D-detection-009)
        return not peer.told

    def _owner(self, peer: _Peer, hello: Hello) -> str:
        """Whose connection it is; empty if that is nobody's, who is told why."""
        if not peer.identity.startswith(b"\0"):
            hint = "leave ZMQ_ROUTING_ID unset"
            self._refuse(peer, "it chose a ZeroMQ identity", hint, "chosen-identity")
            return ""
        if spoken(hello.protocol, hello.oldest) is None:
            self._refuse_protocol(peer, hello.protocol, hello.oldest)
            return ""
        if not hello.node or visible(hello.node) != hello.node:
            hint = (
                "start it with another --node: small characters a to z, digits, dots, dashes and underscores"
            )
            self._refuse(peer, f"{hello.node!r} is no name for a node", hint, "other-node")
            return ""
        owner = self._allowed[peer.key] if self._curve else peer.node or hello.node
        if hello.node != owner:
            self._refuse(
                peer,
                f"it calls itself {hello.node!r}, and its key belongs to {owner!r}",
                f"start it as --node {owner}, or with the key of {hello.node}",
                "other-node",
            )
            return ""
        return owner

    def _refuse_protocol(self, peer: _Peer, newest: int, oldest: int) -> None:
        self._refuse(
            peer,
            f"it speaks protocol {words(newest, oldest)}, the daemon {words(PROTOCOL, OLDEST)}",
            "install the same version of oobleckd on every machine",
            "other-protocol",
        )

    def _refuse(self, peer: _Peer, reason: str, hint: str, cause: RefusalCause) -> None:
        self.counters.refused += 1
        peer.early.clear()
        name = self._allowed.get(peer.key, "a newcomer")
        self._refusals.warn("refused %s: %s; %s", name, reason, hint)
        self._send(peer.identity, Refused(reason, hint, cause))

    # ------------------------------------------------------------------- out

    def _send(self, identity: bytes, message: ToWorker) -> None:
        try:
            self._router.send_multipart([identity, codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: it closed a moment ago. EAGAIN: it reads nothing, and its lease will tell.
            self.counters.undeliverable += 1
            _log.info("%s was not sent: %s", type(message).__name__, error)
        else:
            self.counters.sent += 1
        self._messages.look()

    # ------------------------------------------------------------------- closed connections

    def _take_closing(self) -> bool:
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return False
        if event["event"] == zmq.EVENT_LISTENING:
            self._listening.append(socket.socket(fileno=event["value"]))
            self._listening[-1].setblocking(False)  # else draining it would wait for the next one
            return True
        if event["event"] == zmq.EVENT_ACCEPT_FAILED:
            # Else its thread tries again for ever, as fast as it can. (D-service-021)
            if not self.half_open.make_room(self._port):
                for each in self._listening:
                    self.spares.drain(each)
            return True
        if event["event"] == zmq.EVENT_ACCEPTED:
            self.half_open.accepted(event["value"], self._port)
            return True
        self.half_open.over(event["value"])
        self._closed_fds.append(event["value"])
        # Told when the router is empty: what a node said before its end is heard before its end.
        self._messages.look()
        return True

    def _report_closed(self) -> None:
        while self._closed_fds:
            fds = self._by_fd.get(fd := self._closed_fds.popleft())
            if not fds:
                continue  # it never said a word
            peer = self._peers.pop(fds.pop(0))
            if not fds:
                del self._by_fd[fd]
            self.heartbeats.end_session(peer)
            self._connections.closed(peer)

    def _open_router(self, pair: KeyPair | None, endpoint: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        # Now, and not when it is closed: a connection that is just being made would not hear of it, and the
        # context would wait for its messages for ever. (D-daemon-019)
        router.linger = _LINGER_MS
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.BACKLOG, _BACKLOG)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * _HANDSHAKE_S))
        tcp.speak(router, endpoint)
        # ZeroMQ's own heartbeats are off: with 10,000 connections its thread took 71 % of a core, now 13 %.
        # Leases tell who is alive, then as now. (D-daemon-010)
        tcp.drop_dead(router)
        if pair is not None:
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = pair.public, pair.secret
            router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        return router


def _speaks_for(node: str, message: FromWorker) -> bool:
    """Whether ``message`` is about devices of ``node``, whose connection it came on, and of nobody else's."""
    if isinstance(message, Hello):
        return all(node_of(info.device) == node for info in message.devices)
    if isinstance(message, FiguresTold):
        devices = [each.device for each in message.figures] + [each.device for each in message.reports]
        return all(node_of(device) == node for device in devices)
    device = getattr(message, "device", None)
    # A worker is believed in what it says of its own devices: Byzantine agreement would cost every step of
    # every honest cluster. Who it may speak for is checked. (D-service-013)
    return device is None or node_of(device) == node


class _AnyHello(msgspec.Struct):
    type: str
    protocol: int
    oldest: int = 0


_any_hello = msgspec.msgpack.Decoder(_AnyHello)


def _protocols_of_hello(data: bytes) -> tuple[int, int] | None:
    """The newest and the oldest protocol of a Hello of any version, None for anything else."""
    try:
        hello = _any_hello.decode(data)
    except UNREADABLE:
        return None
    return (hello.protocol, hello.oldest) if hello.type == "Hello" else None
