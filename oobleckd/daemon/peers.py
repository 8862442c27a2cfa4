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
from typing import Protocol

from aiohttp import web

_CREDENTIALS = struct.Struct("3i")
_NAMES = 1024  # of users, kept


class PeerSocket(Protocol):
    """A connected unix socket."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
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


def is_ours(request: web.Request) -> bool:
    """Whether root asks, or our own user, on this machine."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    return sock is not None and sock.family == socket.AF_UNIX and peer_of(sock).ours


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
