"""Many agents that do nothing but live: they join the daemon, and beat as often as it tells them.

    python -m benchmarks.beating [--starting] ENDPOINT KEYS NODE...

Prints ``joined`` when the daemon has welcomed all of them; lives until it is killed. A line on its standard input says that the daemon
is another process from now on: all say Hello again, as soon as they are connected, and ``joined`` is printed once more.
"""

from __future__ import annotations

import argparse
import heapq
import select
import sys
import time
from pathlib import Path

import zmq

from oobleckd.daemon import keys
from oobleckd.protocol import codec, tcp
from oobleckd.protocol.messages import PROTOCOL, Beat, Hello, Welcome
from oobleckd.protocol.parts import DeviceInfo
from worker import uplink

_JOINING = 50  # at a time: a handshake is some milliseconds of the daemon's
_LIFE = "beating.1"
_LISTEN_MS = 100
_ANSWER_S = 10.0


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
        self._beats: list[tuple[float, int, zmq.Socket[bytes], float]] = []  # when, whose, how often
        self._data = codec.encode(Beat(_LIFE))

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
        self._beats.clear()
        for socket in self._sockets:
            while socket.poll(0):
                socket.recv()  # what the one before said
            self._hello(socket)  # waits for the connection
        self._all_welcome()

    def beat_until_told(self) -> str:
        """The line that came on standard input; "" at its end."""
        while not select.select([sys.stdin], [], [], max(0.0, self._beats[0][0] - time.monotonic()))[0]:
            self._beat()
        return sys.stdin.readline()

    def _connected(self, node: str) -> zmq.Socket[bytes]:
        pair = keys.load_pair(keys.node_secret_path(self._folder, node))
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = uplink.RECONNECT_MS, uplink.RECONNECT_MAX_MS
        socket.handshake_ivl = uplink.HANDSHAKE_MS
        tcp.drop_dead(socket)
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        socket.curve_serverkey = self._server
        socket.connect(self._endpoint)
        return socket

    def _hello(self, socket: zmq.Socket[bytes]) -> None:
        node = self._sockets[socket]
        device = DeviceInfo(f"{node}/0", "cpu", "beating", 2**30, "127.0.0.1:1", "", 1)
        socket.send(codec.encode(Hello(PROTOCOL, node, _LIFE, "host", ready=self._ready, devices=(device,))))
        self._asked.pop(socket, None)
        self._asked[socket] = time.monotonic()
        self._poller.register(socket, zmq.POLLIN)

    def _all_welcome(self) -> None:
        while self._asked:
            self._listen()

    def _listen(self) -> None:
        """Take in Welcomes, and beat for those who are welcome. A Hello may go down with its connection: it is said again."""
        for socket, _ in self._poller.poll(_LISTEN_MS):
            message = codec.decode_to_worker(socket.recv())
            if isinstance(message, Welcome):
                self._poller.unregister(socket)
                del self._asked[socket]
                heapq.heappush(self._beats, (time.monotonic(), id(socket), socket, message.beat_s))
        while self._asked and time.monotonic() > (oldest := next(iter(self._asked.items())))[1] + _ANSWER_S:
            self._hello(oldest[0])
        self._beat()

    def _beat(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        while self._beats and self._beats[0][0] <= now:
            due, whose, socket, every_s = self._beats[0]
            socket.send(self._data)
            heapq.heapreplace(self._beats, (max(due + every_s, now), whose, socket, every_s))


def main(endpoint: str, folder: str, nodes: list[str], *, ready: bool) -> None:
    """The program."""
    agents = Agents(endpoint, Path(folder), nodes, ready=ready)
    agents.join()
    print("joined", flush=True)
    while agents.beat_until_told():
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
