"""Ports of loopback for who has to know its own before it listens, and again after a restart.

Not one that ``bind`` to port 0 gives: those are the kernel's to give to every connection that anybody makes,
so that another program has it by the time it is listened on; or an agent, that connects while nobody listens,
has it at both ends, and is connected with itself.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _END = 10_000, 65_536  # below: where services with well-known ports are
_TRIES = 64
_dice = random.SystemRandom()


def free_port() -> int:
    """A port of 127.0.0.1 that is free now for TCP and UDP, and that the kernel gives nobody unasked.

    Where it gives away all, or those that it does not are in use, one of its own.
    """
    # One of theirs was taken now and then before the daemon listened. (D-daemon-032)
    for _ in range(_TRIES):
        port = _dice.randrange(_LOWEST, _END)
        if not _is_given_away(port):
            with suppress(OSError):
                _bind(port)
                return port
    return _bind(0)


def _is_given_away(port: int) -> bool:
    try:
        first, last = map(int, _RANGE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return True
    return first <= port <= last


def _bind(port: int) -> int:
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", port))
        found = int(tcp.getsockname()[1])
        udp.bind(("127.0.0.1", found))
        return found
