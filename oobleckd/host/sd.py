"""What systemd is told and gives: readiness, status line, watchdog, sockets that it opened for us,
credentials.

A leaf without state, for all services: outside of systemd every call does nothing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_FIRST_FD = 3


def notify(*lines: str) -> bool:
    """Send lines such as ``READY=1`` to NOTIFY_SOCKET; False where there is none (or nobody reads it)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    # A leading @ means an abstract name, which the kernel writes as a zero byte.
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(lines).encode(), target)
    except OSError:
        return False
    return True


def watchdog_s() -> float | None:
    """Seconds within which ``WATCHDOG=1`` is expected; None when nobody waits for it."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdigit() and int(usec) > 0 else None


def credential(name: str) -> Path | None:
    """The file of a credential (``LoadCredential=``), which this service alone can read; None where it was
    not given one.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    # Where no credential was given the folder may be closed to us, and asking it an error.
    return Path(folder, name) if folder and os.path.exists(f"{folder}/{name}") else None  # noqa: PTH110


def listen_sockets() -> list[socket.socket]:
    """Sockets of socket activation, in the unit's order; none when they were not meant for this process."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdigit():
        return []
    fds = range(_FIRST_FD, _FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    return [socket.socket(fileno=fd) for fd in fds]
