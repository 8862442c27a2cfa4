"""What an unprivileged user may do to the daemon's socket, on purpose or not: run by ``flood.py`` as root, it
gives that up first.

    python benchmarks/flooding.py asks SOCKET TARGETS
    python benchmarks/flooding.py halves SOCKET HOST:PORT

``asks``: eight threads. Six ask for one of ``TARGETS`` (lines ``METHOD TARGET``) after the other, read 100
bytes and hang up; one keeps its connections and reads nothing; one reads everything. ``halves``: connections
that begin a request and never end it, and a new one for each that is closed. It needs the standard library
alone, and floods until a line or the end of its standard input; then it prints one JSON object: answers by
status, and bytes of the largest piece of one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter, deque

NOBODY = 65534
READ_BYTES = 100
NUM_HALF = 300
_HELD = 16
_PATIENCE_S = 10.0
_HALVES = (
    b"",
    b"G",
    b"GET /v1/jobs HTTP/1.1\r\nHost:",
    b"POST /v1/jobs HTTP/1.1\r\nHost: d\r\nContent-Length: 9\r\n\r\n{",
)


class Reader:
    """One connection, one question, and its answer in pieces."""

    def __init__(self, path: str, method: str, target: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_PATIENCE_S)
        self.sock.connect(path)
        self.sock.sendall(f"{method} {target} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n".encode())

    def read(self) -> tuple[int, int, int]:
        """Status, bytes of the largest piece, bytes of the whole."""
        with self.sock, self.sock.makefile("rb") as file:
            status = int(file.readline().split()[1])
            headers = {}
            while line := file.readline().strip():
                name, _, value = line.partition(b":")
                headers[name.lower()] = value.strip()
            if headers.get(b"transfer-encoding") != b"chunked":
                size = len(file.read())
                return status, size, size
            largest = whole = 0
            while size := int(file.readline(), 16):
                file.read(size + 2)
                largest, whole = max(largest, size), whole + size
            return status, largest, whole


class Flood:
    """``asks``: what is asked for; ``statuses`` and ``largest``: what came."""

    def __init__(self, path: str, asks: list[tuple[str, str]]) -> None:
        self.path, self.asks = path, asks
        self.statuses: Counter[str] = Counter()
        self.largest = 0
        self.held: deque[socket.socket] = deque(maxlen=_HELD)

    def start(self) -> None:
        """Begin; the threads end with the process."""
        for number, manner in enumerate([self.hang_up] * 6 + [self.hold, self.read]):
            first = number * len(self.asks) // 8
            asks = itertools.cycle(self.asks[first:] + self.asks[:first])
            threading.Thread(target=self.forever, args=(manner, asks), daemon=True).start()

    def forever(self, manner, asks) -> None:
        """One question after the other, whatever becomes of it."""
        for method, target in asks:
            try:
                manner(method, target)
            except (OSError, ValueError, IndexError) as error:
                self.statuses[type(error).__name__] += 1
                time.sleep(0.001)

    def hang_up(self, method: str, target: str) -> None:
        """Read a little."""
        with Reader(self.path, method, target).sock as sock:
            self.statuses[sock.recv(READ_BYTES)[9:12].decode() or "closed"] += 1

    def hold(self, method: str, target: str) -> None:
        """Read nothing. The connection falls out of the queue when many others have come."""
        self.held.append(Reader(self.path, method, target).sock)
        time.sleep(0.02)

    def read(self, method: str, target: str) -> None:
        """Read all."""
        status, largest, _ = Reader(self.path, method, target).read()
        self.statuses[str(status)] += 1
        self.largest = max(self.largest, largest)


def halves(path: str, endpoint: str) -> None:
    """Connections that begin, as many as are let."""
    host, _, port = endpoint.rpartition(":")
    held: deque[socket.socket] = deque()
    for number in itertools.count():
        sock = socket.socket(socket.AF_INET if number % 2 else socket.AF_UNIX)
        sock.settimeout(1.0)
        try:
            sock.connect((host, int(port)) if number % 2 else path)
            sock.sendall(b"\xff" if number % 2 else _HALVES[number // 2 % len(_HALVES)])
        except OSError:
            sock.close()
            time.sleep(0.01)
        else:
            held.append(sock)
        if len(held) > NUM_HALF:
            held.popleft().close()


def main() -> None:
    """As nobody, if that can be."""
    how, path, what = sys.argv[1:]
    if not os.geteuid():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pairs = [line.split(" ", 1) for line in what.splitlines()] if how == "asks" else []
    flood = Flood(path, [(method, target) for method, target in pairs])
    if how == "asks":
        flood.start()
    else:
        threading.Thread(target=halves, args=(path, what), daemon=True).start()
    sys.stdin.readline()
    print(json.dumps({"statuses": flood.statuses, "largest": flood.largest}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
