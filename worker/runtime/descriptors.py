"""Open files of this process for other processes of the same user on this host.

Owns the socket that they are asked for at: a name that no file has, which is gone with the process. What can
be opened by its name in ``/proc`` needs none of this; memory of a GPU cannot.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from contextlib import suppress

ANSWER_S = 1.0
"""Longer nobody waits for another process, which may be stopped."""
_ASK_S = 0.5  # so long a question may take, once somebody is there
_FULL_S = 0.1  # until there are descriptors again
_LENT, _NOT_LENT, _NOT_YOURS = b"+", b"-", b"!"
_PEER = struct.Struct("iII")  # struct ucred: pid, uid, gid
_NUMBER = struct.Struct("=i")


class Lender:
    """``address``: where others ask for what was ``lent``, by its number here."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.bind("")  # Linux makes up a name
        self._socket.listen()
        self.address: bytes = self._socket.getsockname()
        self._lent: set[int] = set()
        self._changing = threading.Lock()
        threading.Thread(target=self._run, name="lends-memory", daemon=True).start()

    def lend(self, number: int) -> None:
        """From now on whoever asks gets the descriptor ``number``."""
        with self._changing:
            self._lent.add(number)

    def end(self, number: int) -> None:
        """Nobody gets it any more. Before it is closed: its number will be another one's."""
        with self._changing:
            self._lent.discard(number)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                time.sleep(_FULL_S)
                continue
            with connection, suppress(OSError):  # of one who asks and is gone, or says nothing
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_ASK_S)
        asked = connection.recv(_NUMBER.size)  # also of a stranger: unread, it would take the answer with it
        if len(asked) != _NUMBER.size:
            return
        if _peer(connection)[1] not in {0, os.geteuid()}:
            connection.send(_NOT_YOURS)
            return
        (number,) = _NUMBER.unpack(asked)
        with self._changing:
            if number in self._lent:
                socket.send_fds(connection, [_LENT], [number])
            else:
                connection.send(_NOT_LENT)


def borrowed(address: bytes, number: int, pid: int) -> int:
    """A descriptor of what ``number`` is in the process ``pid``, which lends at ``address``; the caller's to
    close. Raises FileNotFoundError where that process is gone, or does not lend it, PermissionError where it
    is another user's, and TimeoutError where it does not answer now.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(address)
        except ConnectionRefusedError as error:
            raise FileNotFoundError(f"nobody lends at {address!r}") from error
        if _peer(connection)[0] != pid:  # names are given anew
            raise FileNotFoundError(f"another process is at {address!r}")
        try:
            connection.send(_NUMBER.pack(number))
            said, found, _, _ = socket.recv_fds(connection, 1, 1)
        except ConnectionError as error:  # it ended, or would not wait: the next try tells
            raise TimeoutError from error
    if found:
        os.set_inheritable(found[0], False)
        return found[0]
    if said == _NOT_LENT:
        raise FileNotFoundError(f"descriptor {number} is not lent at {address!r}")
    raise PermissionError(errno.EACCES, "it is another user's") if said == _NOT_YOURS else TimeoutError


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, group = _PEER.unpack(told)
    return pid, user, group
