"""The daemon's end of the agents' protocol on a real ROUTER socket, driven step by step by a test."""

from __future__ import annotations

import time
from typing import TypeVar

import zmq

from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import Heartbeat, Hello, Welcome
from oobleckd.protocol.messages import PROTOCOL, FromWorker, ToWorker

T = TypeVar("T")
TIMEOUT_S = 30.0


class StubDaemon:
    """Says Welcome to every Hello (unless ``welcome`` is False) and keeps what it hears in order."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        name: str = "daemon-1",
        heartbeat_s: float = 0.05,
        welcome: bool = True,
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[0])
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1])
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._welcome = welcome
        self._peer = b""

    def hear(self, timeout_s: float = TIMEOUT_S) -> FromWorker:
        """The next message, whatever it is."""
        assert self._socket.poll(timeout_s * 1000), "nothing was heard"
        self._peer, data = self._socket.recv_multipart()
        message = codec.decode_from_worker(data)
        if isinstance(message, Hello) and self._welcome:
            incarnations = tuple(info.incarnation for info in message.devices)
            self.tell(Welcome(PROTOCOL, self._name, self._heartbeat_s, 1.0, incarnations))
        return message

    def expect(self, kind: type[T]) -> T:
        """The next message but for heartbeats, which must be of ``kind``."""
        deadline = time.monotonic() + TIMEOUT_S
        while (
            isinstance(message := self.hear(deadline - time.monotonic()), Heartbeat) and kind is not Heartbeat
        ):
            pass
        assert isinstance(message, kind), message
        return message

    def ready(self) -> Hello:
        """The next Hello that says ready; only Hellos may come before it."""
        while not (hello := self.expect(Hello)).ready:
            pass
        return hello

    def tell(self, message: ToWorker) -> None:
        """Send to the agent that was heard last."""
        self._socket.send_multipart([self._peer, codec.encode(message)])

    def close(self) -> None:
        """As if the process had ended."""
        self._socket.close()
        self._context.term()
