"""Many agents that do nothing but live: they join the daemon, and send heartbeats as often as it tells them,
as idle agents do: by UDP where answers come (``oobleckd.worker.agent.heartbeat``), over ZeroMQ else. All of a
process share one UDP socket.

    python -m benchmarks.idle_agents [--starting] ENDPOINT KEYS NODE...

Prints ``joined`` when the daemon has welcomed all of them; lives until it is killed. A line on its standard
input says that the daemon is another process from now on: all say Hello again, as soon as they are connected,
and ``joined`` is printed once more.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import select
import socket as udp
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from oobleckd.daemon import keys
from oobleckd.host import tcp
from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import Heartbeat, Hello, Welcome
from oobleckd.protocol.datagrams import ACK_BYTES, Sender, address_of, short_session_of
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import DeviceInfo
from oobleckd.worker.agent import daemon_link

_JOINING = 50  # at a time: a handshake is some milliseconds of the daemon's
_INCARNATION = "idle.1"
_LISTEN_MS = 100
_ANSWER_S = 10.0
_BUFFER_BYTES = 4 * 2**20


@dataclass
class Node:
    """One that is welcome. ``sender`` is None where the daemon takes no datagrams."""

    socket: zmq.Socket[bytes]
    heartbeat_s: float
    sender: Sender | None = None
    to: tuple[str, int] = ("", 0)


class Agents:
    """All of them. Nodes that are not ``ready`` live, and take part in no job."""

    def __init__(self, endpoint: str, folder: Path, nodes: list[str], *, ready: bool) -> None:
        self._nodes, self._ready = nodes, ready
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = len(nodes) + 10
        self._endpoint, self._folder = endpoint, folder
        self._server = keys.load_public(keys.server_public_path(folder))
        self._poller = zmq.Poller()
        self._sockets: dict[zmq.Socket[bytes], str] = {}
        self._asked: dict[
            zmq.Socket[bytes], float
        ] = {}  # who waits to be welcomed, and since when; oldest first
        self._heartbeats: list[tuple[float, int, Node]] = []  # when, and whose
        self._senders: dict[bytes, Sender] = {}
        self._udp = udp.socket(udp.AF_INET, udp.SOCK_DGRAM)
        self._udp.setblocking(False)
        self._udp.setsockopt(udp.SOL_SOCKET, udp.SO_RCVBUF, _BUFFER_BYTES)
        self._data = codec.encode(Heartbeat(_INCARNATION))

    def join(self) -> None:
        """Until the daemon has welcomed everybody."""
        for node in self._nodes:
            socket = self._connected(node)
            self._sockets[socket] = node
            self._hello(socket)
            while len(self._asked) >= _JOINING:
                self._listen()
        self._all_welcome()

    def join_again(self) -> None:
        """The same, by another daemon."""
        self._heartbeats.clear()
        self._senders.clear()
        for socket in self._sockets:
            while socket.poll(0):
                socket.recv()  # what the one before said
            self._hello(socket)  # waits for the connection
        self._all_welcome()

    def heartbeat_until_told(self) -> str:
        """The line that came on standard input; "" at its end."""
        while not select.select([sys.stdin], [], [], max(0.0, self._heartbeats[0][0] - time.monotonic()))[0]:
            self._heartbeat()
        return sys.stdin.readline()

    def _connected(self, node: str) -> zmq.Socket[bytes]:
        pair = keys.load_pair(keys.node_secret_path(self._folder, node))
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = (
            daemon_link.RECONNECT_MS,
            daemon_link.RECONNECT_MAX_MS,
        )
        socket.handshake_ivl = daemon_link.HANDSHAKE_MS
        tcp.drop_dead(socket)
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        socket.curve_serverkey = self._server
        socket.connect(self._endpoint)
        return socket

    def _hello(self, socket: zmq.Socket[bytes]) -> None:
        node = self._sockets[socket]
        device = DeviceInfo(f"{node}/0", "cpu", "idle", 2**30, "127.0.0.1:1", "", 1)
        socket.send(
            codec.encode(Hello(PROTOCOL, node, _INCARNATION, "host", ready=self._ready, devices=(device,)))
        )
        self._asked.pop(socket, None)
        self._asked[socket] = time.monotonic()
        self._poller.register(socket, zmq.POLLIN)

    def _all_welcome(self) -> None:
        while self._asked:
            self._listen()

    def _listen(self) -> None:
        """Take in Welcomes, and send heartbeats for those who are welcome. A Hello may go down with its
        connection: it is said again.
        """
        for socket, _ in self._poller.poll(_LISTEN_MS):
            message = codec.decode_to_worker(socket.recv())
            if isinstance(message, Welcome):
                self._poller.unregister(socket)
                del self._asked[socket]
                node = Node(socket, message.heartbeat_s)
                self._welcome(node, message)
                heapq.heappush(self._heartbeats, (time.monotonic(), id(socket), node))
        while self._asked and time.monotonic() > (oldest := next(iter(self._asked.items())))[1] + _ANSWER_S:
            self._hello(oldest[0])
        self._heartbeat()

    def _welcome(self, node: Node, message: Welcome) -> None:
        address, session = address_of(self._endpoint), message.datagrams
        if address is not None and session is not None:
            node.sender = self._senders[session.session] = Sender(session.session, session.key)
            node.to = address[0], session.port

    def _look_again(self, node: Node) -> None:
        """A Hello that was said twice is answered twice, and the newer Welcome counts."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = codec.decode_to_worker(node.socket.recv(zmq.NOBLOCK))
                if isinstance(message, Welcome):
                    self._welcome(node, message)

    def _heartbeat(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        if self._heartbeats and self._heartbeats[0][0] <= now:
            self._take_answers()
        while self._heartbeats and self._heartbeats[0][0] <= now:
            due, whose, node = self._heartbeats[0]
            if not self._sent(node):
                node.socket.send(self._data)
                self._look_again(node)
            heapq.heapreplace(self._heartbeats, (max(due + node.heartbeat_s, now), whose, node))

    def _take_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._udp.recv(ACK_BYTES + 1)
                if (sender := self._senders.get(short_session_of(data))) is not None:
                    sender.heard(data)

    def _sent(self, node: Node) -> bool:
        """Whether a datagram stands for this heartbeat."""
        if node.sender is None:
            return False
        data, stands = node.sender.heartbeat()
        try:
            self._udp.sendto(data, node.to)
        except OSError:
            return False
        return stands


def main(endpoint: str, folder: str, nodes: list[str], *, ready: bool) -> None:
    """The program."""
    agents = Agents(endpoint, Path(folder), nodes, ready=ready)
    agents.join()
    print("joined", flush=True)
    while agents.heartbeat_until_told():
        agents.join_again()
        print("joined", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--starting", action="store_true")
    parser.add_argument("endpoint")
    parser.add_argument("folder")
    parser.add_argument("nodes", nargs="+")
    args = parser.parse_args()
    main(args.endpoint, args.folder, args.nodes, ready=not args.starting)
