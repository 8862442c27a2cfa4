"""Open files of this process for other processes of the same user on this host.

Owns the socket that they are asked for at: a name that no file has, which is gone with the process. What can
be opened by its name in ``/proc`` needs none of this; memory of a GPU cannot.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress

ANSWER_S = 30.0
"""Longer nobody waits for another process, which may be stopped: by then it has left its cluster."""
_ASK_S = 1.0  # so long a question may take, once somebody is there
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
        threading.Thread(target=self._run, name="lends-memory", daemon=True).start()

    def lend(self, number: int) -> None:
        """From now on whoever asks gets the descriptor ``number``."""
        self._lent.add(number)

    def end(self, number: int) -> None:
        """Nobody gets it any more. Before it is closed: its number will be another one's."""
        self._lent.discard(number)

    def _run(self) -> None:
        while True:
            with suppress(OSError):  # of one who asks and is gone, or says nothing
                connection, _ = self._socket.accept()
                with connection:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_ASK_S)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] not in {0, os.geteuid()}:
            return
        asked = connection.recv(_NUMBER.size)
        if len(asked) == _NUMBER.size and (number := _NUMBER.unpack(asked)[0]) in self._lent:
            socket.send_fds(connection, [asked], [number])


def borrowed(address: bytes, number: int) -> int:
    """A descriptor of what ``number`` is in the process that lends at ``address``; the caller's to close.
    Raises FileNotFoundError where that process is gone, or does not lend it, and TimeoutError where it does
    not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(address)
            connection.send(_NUMBER.pack(number))
            _, found, _, _ = socket.recv_fds(connection, _NUMBER.size, 1)
        except ConnectionError as error:
            raise FileNotFoundError(f"nobody lends at {address!r}") from error
    if not found:
        raise FileNotFoundError(f"descriptor {number} is not lent at {address!r}")
    os.set_inheritable(found[0], False)
    return found[0]
