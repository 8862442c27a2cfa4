"""Many agents that do nothing but live: they join the daemon, and beat as often as it tells them.

    python -m benchmarks.beating ENDPOINT KEYS NODE...

Prints ``joined`` when the daemon has welcomed all of them; lives until it is killed.
"""

from __future__ import annotations

import heapq
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


def main(endpoint: str, folder: str, *nodes: str) -> None:
    """The program."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = len(nodes) + 10
    server, poller = keys.load_public(keys.server_public_path(Path(folder))), zmq.Poller()
    sockets = []
    beats: list[tuple[float, int, float]] = []  # when, whose, how often
    for index, node in enumerate(nodes):
        sockets.append(_connect(context, endpoint, Path(folder), server, node))
        poller.register(sockets[-1], zmq.POLLIN)
        sockets[-1].send(codec.encode(_hello(node)))
        while len(beats) < index + 1 - _JOINING:
            _listen(poller, sockets, beats, 1000)
            _beat(sockets, beats)
    while len(beats) < len(nodes):
        _listen(poller, sockets, beats, 100)
        _beat(sockets, beats)
    print("joined", flush=True)
    while True:
        _beat(sockets, beats)
        time.sleep(max(0.0, beats[0][0] - time.monotonic()))


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, folder: Path, server: bytes, node: str
) -> zmq.Socket[bytes]:
    pair, socket = keys.load_pair(keys.node_secret_path(folder, node)), context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, server
    socket.connect(endpoint)
    return socket


def _hello(node: str) -> Hello:
    device = DeviceInfo(f"{node}/0", "cpu", "beating", 2**30, "127.0.0.1:1", "", 1)
    return Hello(PROTOCOL, node, _LIFE, "host", ready=True, devices=(device,))


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
    main(*sys.argv[1:])
