"""Sockets of the transport: addresses, listeners, connecting. Owns no thread and no protocol."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oobleckd.protocol.parts import Peer

_BACKLOG = 512
_UNIX_BUFFER_BYTES = 2**20


def listen_tcp(host: str) -> socket.socket:
    """A listener on a free port of ``host`` (an IPv4 or IPv6 address)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


def tcp_address(listener: socket.socket) -> str:
    """``"ip:port"`` (``"[ip]:port"`` for IPv6)."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_unix(directory: Path, device: str) -> tuple[socket.socket, str]:
    """A listener in ``directory`` for this process of ``device``, and its path.

    The name holds the process id, so a path never means two incarnations. What an earlier incarnation left is
    removed.
    """
    stem = device.replace("/", ".")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if re.fullmatch(re.escape(stem) + r"-\d+\.sock", entry.name):
            entry.unlink(missing_ok=True)
    path = str(directory.resolve() / f"{stem}-{os.getpid()}.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        listener.bind(name)
    listener.listen(_BACKLOG)
    return listener, path


def open_socket(peer: Peer, *, unix: bool) -> socket.socket:
    """An unconnected socket that fits ``peer``."""
    if unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return sock
    family = socket.AF_INET6 if peer.address.startswith("[") else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def connect(sock: socket.socket, peer: Peer, *, unix: bool) -> None:
    """Connect ``sock`` to ``peer``. Raises OSError; BlockingIOError when its backlog is full."""
    if unix:
        with _short(peer.local) as name:
            sock.connect(name)
    else:
        host, _, port = peer.address.rpartition(":")
        sock.connect((host.strip("[]"), int(port)))


@contextmanager
def _short(path: str) -> Iterator[str]:
    # A Unix socket's name is at most 107 bytes; run directories can be longer.
    directory = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(path).name}"
    finally:
        os.close(directory)
