"""The agent's connection to the daemon: a ZeroMQ DEALER with CURVE.

Owns the socket, its monitor and the options that decide about reconnects. What is sent while there is
no connection is dropped, not queued: after a reconnect the agent says Hello first and then repeats what
matters (``outbox``). Plain sockets on the loop's selector, drained in bounded portions: awaiting
messages one by one starves an asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from oobleckd.host import tcp, urgency

_BURST = 256
RECONNECT_MS = 100  # libzmq adds as much again at random, and doubles up to the maximum
RECONNECT_MAX_MS = 2000
# It was 5 s: when 10,000 agents came back at once those who had waited for that began again, and all were
# back after 90 s and more, not 23. (D-daemon-012)
HANDSHAKE_MS = 30_000
_LINGER_MS = 500
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """Key pair of this node and public key of the daemon, as z85 text."""

    public: bytes
    secret: bytes
    server: bytes


class Uplink:
    """Messages to and from the daemon at ``endpoint``; all callbacks run in ``loop``.

    While it is ``blocked`` nothing may go out or come in, by no way.

    ``on_connected`` is called at each successful handshake: the daemon behind it may be a new process.
    ``on_lost``: the connection is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: str,
        keys: CurveKeys | None,
        *,
        on_message: Callable[[bytes], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._context = zmq.Context()
        if urgency.hurries():
            self._context.set(zmq.THREAD_SCHED_POLICY, urgency.POLICY)
            self._context.set(zmq.THREAD_PRIORITY, urgency.priority())
        self._socket = self._context.socket(zmq.DEALER)
        self._set_options(keys)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._refusals = 0
        self.blocked = False
        loop.add_reader(self._socket.fileno(), self._on_readable)
        loop.add_reader(self._monitor.fileno(), self._on_event)

    def connect(self) -> None:
        """Begin to connect, for as long as it takes. Raises zmq.ZMQError for an endpoint that is none."""
        self._socket.connect(self._endpoint)
        self._loop.call_soon(self._on_event)

    def rekey(self, keys: CurveKeys) -> None:
        """Speak with these keys from now on: the connection is made anew. Training does not notice."""
        self._socket.disconnect(self._endpoint)
        self._set_keys(keys)
        self._socket.connect(self._endpoint)

    def send(self, data: bytes) -> bool:
        """Send one message; False when there is no connection (then it is dropped)."""
        if self.blocked:
            return False
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending can swallow the readiness signal of the socket's edge-triggered descriptor.
        self._loop.call_soon(self._on_readable)
        return True

    def block(self, seconds: float) -> None:
        """Drop all that goes out and comes in, as a network does that is gone; for good if ``seconds`` is 0.

        The connection stays: nobody is told. When the network is back it counts as a new one.
        """
        self.blocked = True
        if seconds:
            self._loop.call_later(seconds, self._unblock)

    def _unblock(self) -> None:
        if not self._socket.closed:
            self.blocked = False
            self._on_connected()

    def close(self) -> None:
        """Close; what is on its way gets ``_LINGER_MS``."""
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _set_options(self, keys: CurveKeys | None) -> None:
        sock = self._socket
        sock.setsockopt(zmq.IMMEDIATE, 1)
        # Now, and not when it is closed: a connection that is just being made would not hear of it, and the
        # context would wait for its messages for ever. (D-daemon-019)
        sock.setsockopt(zmq.LINGER, _LINGER_MS)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        tcp.speak(sock, self._endpoint)
        # Not ZeroMQ's heartbeats: with 10,000 connections its thread took 71 % of a core, and takes 13 %
        # with the kernel's timers. (D-daemon-010)
        tcp.drop_dead(sock)
        self._set_keys(keys)

    def _set_keys(self, keys: CurveKeys | None) -> None:
        """Set the keys for connections that are made from now on."""
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)

    def _on_readable(self) -> None:
        for _ in range(_BURST):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self.blocked:
                self._on_message(frames[-1])
        self._loop.call_soon(self._on_readable)

    def _on_event(self) -> None:
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle_event(parse_monitor_message(frames)["event"])

    def _handle_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            _log.info("connected to the daemon at %s", self._endpoint)
            self._refusals = 0
            if not self.blocked:
                self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED:
            _log.warning("lost the connection to the daemon at %s; training goes on", self._endpoint)
            self._on_lost()
        else:
            self._refusals += 1
            if self._refusals == 1:
                _log.error(
                    "the daemon at %s does not accept our key, or is not who its key says; check --key, "
                    "--server-key and the daemon's authorized/ folder; trying again",
                    self._endpoint,
                )
