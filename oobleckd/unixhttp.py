"""HTTP on a unix socket: the connection, what an answer says, and the errors of both.

Errors::

    ClientError
    ├── Unreachable   no daemon behind the socket (or no right to open it)
    ├── ApiProblem    the daemon said no: status, title, detail, hint
    └── BadAnswer     an answer that this version cannot read
"""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from oobleckd.protocol import unreadable
from oobleckd.protocol.api import Problem
from oobleckd.protocol.unreadable import UNREADABLE

Answer = TypeVar("Answer")

_FULL_S = 0.02
_START_HINT = "start it with `oobleckctl up`, or `systemctl start oobleckd` where it is a service"


class ClientError(Exception):
    """Base of all errors here. ``hint`` says what to do next and may be empty."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class Unreachable(ClientError):
    """Nobody answers on the socket, or it may not be opened."""


class ApiProblem(ClientError):
    """The daemon refused. ``status`` is the HTTP status (403, 404, 409, 422, 503), ``title`` its kind.
    ``retry_s``: after which it may be asked again (0: it was not asked too often).
    """

    def __init__(self, status: int, title: str, detail: str, hint: str = "", retry_s: float = 0.0) -> None:
        super().__init__(detail or title, hint)
        self.retry_s = retry_s
        self.status = status
        self.title = title


class BadAnswer(ClientError):
    """The answer is not what this version expects."""


class UnixConnection(http.client.HTTPConnection):
    """One connection to the socket at ``path``."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._raw: socket.socket | None = None

    def connect(self) -> None:
        """Connect. Raises OSError."""
        self._raw = self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        patience_s = self.timeout if isinstance(self.timeout, int | float) else 0.0
        until = time.monotonic() + patience_s
        while True:
            try:
                return self.sock.connect(str(self._path))
            except BlockingIOError:  # so many wait to be let in that there is no room for one more
                if time.monotonic() > until:
                    raise TimeoutError from None
                time.sleep(_FULL_S)

    def hang_up(self) -> None:
        """Wake a blocked reader in another thread."""
        if self._raw is not None:
            try:
                self._raw.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it was not connected, or is closed already


def close(connection: UnixConnection, response: http.client.HTTPResponse) -> None:
    """Both: a response may own the socket alone."""
    response.close()
    connection.close()


def decode(data: bytes, kind: type[Answer]) -> Answer:
    """An answer's body. Raises BadAnswer."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise BadAnswer(
            f"the daemon's answer cannot be read: {unreadable.problem_of(error)}",
            "daemon and client may be of different versions: compare `oobleckctl status` and `--version`",
        ) from error


def problem_of(status: int, reason: str, data: bytes) -> ApiProblem:
    """What an answer with an error status says."""
    try:
        told = msgspec.json.decode(data, type=Problem)
    except UNREADABLE:
        return ApiProblem(status, reason, data.decode(errors="replace").strip())
    return ApiProblem(status, told.title, told.detail, told.hint, told.retry_s)


def unreachable(path: Path, error: Exception) -> Unreachable:
    """What a connection that failed with ``error`` means, and what to do."""
    match error:
        case FileNotFoundError():
            return Unreachable(f"no daemon: {path} does not exist", _START_HINT)
        case ConnectionRefusedError():
            return Unreachable(f"no daemon listens on {path}", _START_HINT)
        case PermissionError():
            return Unreachable(f"{path} may not be opened", "ask to be added to the group oobleck")
        case TimeoutError():
            return Unreachable(f"the daemon behind {path} does not answer in time", "look into its log")
        case _:
            return Unreachable(f"the connection to {path} broke: {error}", "look into the daemon's log")
