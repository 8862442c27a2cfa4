"""What ``ps`` shows of a process that was forked and not started by exec: the command line that exec would
have given it.

Owns the words in the memory that the kernel shows as such. It is as large as the first command line was: who
forks asks for room when it is started (``ROOM``), so nothing behind it, the environment above all, is ever
overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

ROOM = "--room=" + "." * 1500
"""An argument that makes room for the words of those that are forked."""

_ARG_START, _ARG_END = 45, 46  # fields of /proc/PID/stat, counted from the one behind the name
_NAME_BYTES = 15


def set_title(words: Sequence[str], name: str = "") -> None:
    """Show ``words`` as the command line of this process, as far as there is room; and ``name`` as its short
    name.
    """
    with contextlib.suppress(OSError, ValueError):  # what is shown is never worth a process
        _show(words, name)


def _show(words: Sequence[str], name: str) -> None:
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()
    start, stop = int(fields[_ARG_START]), int(fields[_ARG_END])
    size = stop - start
    if size > 1:
        shown = "\0".join(words).encode()[: size - 1]
        ctypes.memmove(start, shown.ljust(size, b"\0"), size)
    if name:
        Path("/proc/self/comm").write_bytes(name.encode()[:_NAME_BYTES])
