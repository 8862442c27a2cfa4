"""The wire side of an agent, for tests of the daemon: a DEALER that says what a test wants said.

Also a program (``python -m tests.helpers.agents ENDPOINT NODE [KEY SERVER_KEY]``) that says Hello, prints
``welcome`` at the first answer, and stays until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import zmq

from oobleckd.daemon.keys import KeyPair, load_pair, load_public
from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import Hello
from oobleckd.protocol.messages import PROTOCOL, ToWorker
from oobleckd.protocol.parts import DeviceInfo

WAIT_MS = 120_000


def hello(node: str, *, protocol: int = PROTOCOL, incarnation: str = "incarnation.1") -> Hello:
    """The Hello of a node with one device."""
    device = DeviceInfo(f"{node}/0", "cpu", "test", 2**30, "127.0.0.1:1", "", 1)
    return Hello(protocol, node, incarnation, "host", ready=True, devices=(device,))


class Agent:
    """One connection to a hub. Without keys it speaks in the clear."""

    def __init__(
        self, endpoint: str, pair: KeyPair | None = None, server: bytes = b"", *, identity: bytes = b""
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if identity:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        if pair is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = pair.public, pair.secret
            self.socket.curve_serverkey = server
        self.socket.connect(endpoint)

    def say(self, message: msgspec.Struct | bytes) -> None:
        """Send a message, or any bytes."""
        self.socket.send(message if isinstance(message, bytes) else codec.encode(message))

    def listen(self, timeout_ms: int = WAIT_MS) -> ToWorker:
        """The next message. Raises TimeoutError."""
        if not self.socket.poll(timeout_ms):
            raise TimeoutError("the hub said nothing")
        return codec.decode_to_worker(self.socket.recv())

    async def heard(self) -> ToWorker:
        """As ``listen``, beside a running loop."""
        return await asyncio.to_thread(self.listen)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
        self._context.term()


def main(endpoint: str, node: str, *key_files: str) -> None:
    """The program."""
    if key_files:
        pair, server = load_pair(Path(key_files[0])), load_public(Path(key_files[1]))
        agent = Agent(endpoint, pair, server)
    else:
        agent = Agent(endpoint)
    agent.say(hello(node))
    agent.listen()
    print("welcome", flush=True)
    agent.socket.poll()


if __name__ == "__main__":
    main(*sys.argv[1:])
