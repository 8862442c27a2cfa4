"""The newest lines of a node's log, for who asks the daemon for them.

Owns what is kept of the agent's own lines, and where the rest is: devices write to the agent's stderr, which
they have from it, and of which nobody reads but whoever keeps it. Where that is a file the agent looks there;
where it is a pipe, a terminal or the journal, what devices print is not to be had here.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import deque
from contextlib import suppress

MAX_LINES = 1000
MAX_BYTES = 256 * 1024
"""Of all lines together, as UTF-8."""
_STDERR = 2


class LogKeeper(logging.Handler):
    """Keeps the newest lines that are logged; added to the root logger it keeps all. ``fd``: the agent's
    stderr.
    """

    def __init__(self, fd: int = _STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._kept: deque[str] = deque()
        self._num_bytes = 0
        self._keeping = threading.Lock()
        # No pipe: that would put the agent in the way of every line of its devices. And what was written
        # before it was started is none of it, as others may share the file. (D-watching-023)
        self._begin = _file_size(fd)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an entry, which may have several lines."""
        with self._keeping:
            for line in self.format(record).split("\n"):
                self._kept.append(line)
                self._num_bytes += _size(line)
            while len(self._kept) > MAX_LINES or self._num_bytes > MAX_BYTES:
                self._num_bytes -= _size(self._kept.popleft())

    def newest(self, num_lines: int) -> tuple[tuple[str, ...], bool]:
        """Up to ``num_lines`` lines, oldest first, and whether what devices print is among them. It may read
        a file, so it is not for a loop.
        """
        num_lines = min(num_lines, MAX_LINES)
        with suppress(OSError):
            if (lines := self._in_file()) is not None:
                return _last(lines, num_lines), True
        with self._keeping:
            return _last(list(self._kept), num_lines), False

    def _in_file(self) -> list[str] | None:
        """The end of the file that stderr is, without a line that began before it; None where it is none.
        Raises OSError where it may not be read.
        """
        size = _file_size(self._fd)
        if size < 0 or self._begin < 0:
            return None
        # By this way also where it was renamed, or removed, since. One that was cut short begins anew.
        begin = max(self._begin if self._begin <= size else 0, size - MAX_BYTES)
        reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(reader, size - begin, begin)
        finally:
            os.close(reader)
        if begin > self._begin:
            data = data.partition(b"\n")[2]
        return data.decode(errors="replace").removesuffix("\n").split("\n") if data else []


def _last(lines: list[str], number: int) -> tuple[str, ...]:
    return tuple(lines[-number:]) if number else ()


def _size(line: str) -> int:
    return len(line.encode(errors="backslashreplace")) + 1


def _file_size(fd: int) -> int:
    """Of the file that ``fd`` is; -1 where it is none."""
    try:
        found = os.fstat(fd)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1
