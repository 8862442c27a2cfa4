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
from oobleckd.protocol import codec
from oobleckd.protocol.messages import PROTOCOL, Beat, Hello, Welcome
from oobleckd.protocol.parts import DeviceInfo

_JOINING = 50  # at a time: a handshake is some milliseconds of the daemon's
_LIFE = "beating.1"
_RECONNECT_MS = (100, 2000, 5000)


def main(endpoint: str, folder: str, nodes: list[str], *, ready: bool) -> None:
    """The program. Nodes that are not ``ready`` live, and take part in no job."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = len(nodes) + 10
    server, poller = keys.load_public(keys.server_public_path(Path(folder))), zmq.Poller()
    sockets = []
    beats: list[tuple[float, int, float]] = []  # when, whose, how often
    for index, node in enumerate(nodes):
        sockets.append(_connect(context, endpoint, Path(folder), server, node))
        poller.register(sockets[-1], zmq.POLLIN)
        sockets[-1].send(codec.encode(_hello(node, ready=ready)))
        while len(beats) < index + 1 - _JOINING:
            _listen(poller, sockets, beats, 1000)
            _beat(sockets, beats)
    while True:
        while len(beats) < len(nodes):
            _listen(poller, sockets, beats, 100)
            _beat(sockets, beats)
        print("joined", flush=True)
        while not select.select([sys.stdin], [], [], max(0.0, beats[0][0] - time.monotonic()))[0]:
            _beat(sockets, beats)
        if not sys.stdin.readline():
            return
        beats.clear()
        for socket, node in zip(sockets, nodes, strict=True):
            poller.register(socket, zmq.POLLIN)
            socket.send(codec.encode(_hello(node, ready=ready)))  # waits for the connection


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, folder: Path, server: bytes, node: str
) -> zmq.Socket[bytes]:
    pair, socket = keys.load_pair(keys.node_secret_path(folder, node)), context.socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl, socket.reconnect_ivl_max, socket.handshake_ivl = _RECONNECT_MS  # as an agent's
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, server
    socket.connect(endpoint)
    return socket


def _hello(node: str, *, ready: bool) -> Hello:
    device = DeviceInfo(f"{node}/0", "cpu", "beating", 2**30, "127.0.0.1:1", "", 1)
    return Hello(PROTOCOL, node, _LIFE, "host", ready=ready, devices=(device,))


def _listen(
    poller: zmq.Poller, sockets: list[zmq.Socket[bytes]], beats: list[tuple[float, int, float]], wait_ms: int
) -> None:
    """Take in Welcomes; a node that is welcome beats from now on."""
    for socket, _ in poller.poll(wait_ms):
        message = codec.decode_to_worker(socket.recv())
        if isinstance(message, Welcome):
            poller.unregister(socket)
            heapq.heappush(beats, (time.monotonic(), sockets.index(socket), message.beat_s))


def _beat(sockets: list[zmq.Socket[bytes]], beats: list[tuple[float, int, float]]) -> None:
    """Send what is due."""
    data, now = codec.encode(Beat(_LIFE)), time.monotonic()
    while beats and beats[0][0] <= now:
        due, index, every_s = beats[0]
        sockets[index].send(data)
        heapq.heapreplace(beats, (max(due + every_s, now), index, every_s))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--starting", action="store_true")
    parser.add_argument("endpoint")
    parser.add_argument("folder")
    parser.add_argument("nodes", nargs="+")
    args = parser.parse_args()
    main(args.endpoint, args.folder, args.nodes, ready=not args.starting)
