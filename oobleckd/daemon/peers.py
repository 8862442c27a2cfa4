"""Who is at the other end of the API's unix socket, and whether they may act.

Owns the rule: root, the daemon's own user, and members of its group act; everybody else reads.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

_CREDENTIALS = struct.Struct("3i")
_NAMES = 1024  # of users, kept


class PeerSocket(Protocol):
    """A connected unix socket."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """As in ``socket``."""


class AnySocket(PeerSocket, Protocol):
    """A connected socket."""

    @property
    def family(self) -> int:
        """As in ``socket``."""

    def getpeername(self) -> Any:
        """As in ``socket``."""


@dataclass(frozen=True, slots=True)
class SocketPeer:
    """A process as the kernel knows it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int

    @property
    def ours(self) -> bool:
        """Whether it is root's, or of the daemon's own user."""
        return self.uid in {0, os.geteuid()}

    def __str__(self) -> str:
        return _name_of(self.uid)


@lru_cache(_NAMES)  # of each question: where users are a directory's, a look-up may take its time
def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def peer_of(sock: PeerSocket) -> SocketPeer:
    """The process that connected."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return SocketPeer(*_CREDENTIALS.unpack(data))


def owner_of(sock: AnySocket) -> str | None:
    """Whose connection it is: a user's, or an address's; None: root's, or our own user's, on this machine."""
    if sock.family == socket.AF_UNIX:
        peer = peer_of(sock)
        return None if peer.ours else f"uid {peer.uid}"
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "somebody who has gone"


def may_act(peer: SocketPeer, group: str) -> bool:
    """Whether ``peer`` may change anything."""
    if peer.ours:
        return True
    try:
        wanted = grp.getgrnam(group).gr_gid
        user = pwd.getpwuid(peer.uid)
    except KeyError:
        return False
    return wanted == peer.gid or wanted in os.getgrouplist(user.pw_name, user.pw_gid)
