"""Files that a person names: whatever they are, they are read in bounded time and memory, or one sentence
says why not.

Owns reading, of a pipe or of stdin (``-``) as well as of a file, and the first look at TOML; what may be in
it is the caller's.

Errors: FileError (a ValueError) with ``hint``; a file that is not there is FileNotFoundError.
"""

from __future__ import annotations

import os
import select
import stat
import tomllib
from pathlib import Path
from typing import Any

from oobleckd.host import tomlwords
from oobleckd.words import seconds, size

MAX_BYTES = 2**20
"""Of a file that a person writes. The API takes no larger body either."""
MAX_DEPTH = 32
STDIN = Path("-")
_PIPE_S = 10.0
_CHUNK_BYTES = 2**16
_OTHER_TEXT = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class FileError(ValueError):
    """A file that cannot be used: what is wrong, without its name, and a hint."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


def read(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """All of a file, or of a pipe whose writer goes on writing. Raises FileError, FileNotFoundError."""
    try:
        return _read(path, max_bytes)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(f"cannot be read: {why}", "name a file that this user may read") from error


def text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The same as text, without the mark that some editors begin UTF-8 with. Raises FileError,
    FileNotFoundError.
    """
    data = read(path, max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = _OTHER_TEXT.get(data[:2], "something else")
        raise FileError(f"is not UTF-8 but {what}: {error.reason}", "save it as UTF-8") from error


def toml(path: Path, hint: str = "") -> dict[str, Any]:
    """The table of a TOML file; ``hint``: where to read what goes into it. Raises FileError,
    FileNotFoundError.
    """
    try:
        source = text(path)
        table = tomllib.loads(source)
    except FileError:
        raise
    except RecursionError as error:
        raise _too_deep(hint) from error
    except tomllib.TOMLDecodeError as error:
        raise FileError(tomlwords.problem_of(error, source), hint) from error
    except ValueError as error:
        raise FileError("not usable: a number has more digits than can be read", hint) from error
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise _too_deep(hint)
    return table


def _too_deep(hint: str) -> FileError:
    return FileError(f"not usable: tables and lists are nested more than {MAX_DEPTH} deep", hint)


def _opened(path: Path) -> int:
    if path == STDIN:  # /dev/stdin cannot be opened where it is a socket, as below sshd, or another user's
        return os.dup(0)
    # Else the opening of a pipe waits for ever where nobody writes into it.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


def _read(path: Path, max_bytes: int) -> bytes:
    fd = _opened(path)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        mode = os.fstat(fd).st_mode
        is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            if is_pipe and not poll.poll(_PIPE_S * 1000):
                raise FileError(
                    f"is a pipe that nothing came from for {seconds(_PIPE_S)}", "who writes into it?"
                )
            part = os.read(fd, _CHUNK_BYTES)
            if not part:
                return b"".join(parts)
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise FileError(f"is larger than {size(max_bytes)}", "name the file that was meant")
    finally:
        os.close(fd)
