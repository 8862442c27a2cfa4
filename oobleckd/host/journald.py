"""Log entries for systemd's journal, with fields of their own: ``journalctl OOBLECK_INCIDENT=inc-3``.

Owns the journal's native protocol (https://systemd.io/JOURNAL_NATIVE_PROTOCOL) as a handler of ``logging``,
and what our fields are called. A leaf for all services: where stderr is not the journal, entries go to stderr
as ever.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from oobleckd.protocol.text import visible

SOCKET = Path("/run/systemd/journal/socket")
FIELDS = "journal"
"""The attribute of a log record that holds its own fields, as pairs: ``extra={FIELDS: …}``."""
_PREFIX = "OOBLECK_"
_MAX_BYTES = 64 * 1024  # a datagram of this size always passes
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

Pairs = Iterable[tuple[str, str]]


def reaches_journal() -> bool:
    """Whether what this process writes to stderr ends in the journal, as systemd says
    (``JOURNAL_STREAM``).
    """
    try:
        stderr = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}" and SOCKET.exists()


def set_up(level: str, formatter: logging.Formatter, **own: str) -> None:
    """Log from now on, to the journal if it is there, else to stderr with ``formatter``. ``own``: fields of
    every entry, in small letters.
    """
    handler: logging.Handler
    if reaches_journal():
        handler = JournalHandler(SOCKET, {_PREFIX + name.upper(): value for name, value in own.items()})
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def of_story(kind: str, story: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Fields of a change: its kind, and what it concerns (``job:x`` is OOBLECK_JOB=x; a field may come more
    than once).
    """
    pairs = [key.partition(":")[::2] for key in story]
    return ((f"{_PREFIX}KIND", kind), *((_PREFIX + what.upper(), name) for what, name in pairs))


class LineFormatter(logging.Formatter):
    """An entry is one line, and what others wrote does nothing to a terminal. A traceback follows it in lines
    that are set in by ``margin``, so that none of it looks like an entry.
    """

    def __init__(self, fmt: str, datefmt: str | None = None, margin: str = "    ") -> None:
        super().__init__(fmt, datefmt)
        self._margin = margin

    def format(self, record: logging.LogRecord) -> str:
        """The entry. Nothing is taken from what another formatter has left in ``record``."""
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        below = self.formatException(record.exc_info) if record.exc_info else ""
        lines = [line for text in (below, record.stack_info or "") if text for line in text.split("\n")]
        return "\n".join(
            [visible(self.formatMessage(record)), *(self._margin + visible(line) for line in lines)]
        )


class JournalHandler(logging.Handler):
    """Sends entries to the journal's socket at ``path``; to stderr where it is gone."""

    def __init__(self, path: Path, own: Mapping[str, str]) -> None:
        super().__init__()
        self.setFormatter(LineFormatter("%(message)s", margin=""))  # level, time and logger are fields
        self._path = str(path)
        self._own = tuple(own.items())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one entry."""
        try:
            self._socket.sendto(
                _entry([*self._standard(record), *self._own, *getattr(record, FIELDS, ())]), self._path
            )
        except OSError:
            sys.stderr.write(f"{self.format(record)}\n")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _standard(self, record: logging.LogRecord) -> Pairs:
        message = self.format(record).encode(errors="backslashreplace")[:_MAX_BYTES].decode(errors="ignore")
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return (
            ("MESSAGE", message),
            ("PRIORITY", str(priority)),
            ("SYSLOG_IDENTIFIER", Path(sys.argv[0]).name),
            ("LOGGER", record.name),
            ("CODE_FILE", record.pathname),
            ("CODE_LINE", str(record.lineno)),
            ("CODE_FUNC", record.funcName),
        )


def _entry(pairs: Pairs) -> bytes:
    """A value of several lines has its length in front, in eight bytes, the lowest first."""
    parts = []
    for name, value in pairs:
        data = value.encode(errors="backslashreplace")
        if b"\n" in data:
            parts.append(b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data))
        else:
            parts.append(b"%s=%s\n" % (name.encode(), data))
    return b"".join(parts)
