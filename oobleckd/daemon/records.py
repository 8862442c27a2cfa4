"""Seals the records of the journal, so that changed bytes show, and writes all of them into a second file
once more.

Owns what a record is sealed with, the frames of the copy, and writing it. The copy is neither synced nor
waited for: it is there for a disk or a memory that changes bits, and for pages that are lost, not for the
loss of power, against which the journal itself is synced. Who mends the journal from it is ``mend``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

SEAL_BYTES = 8
Row = tuple[Any, ...]
"""A table's name and the columns of a row without the seal; the first of these is its number in
the journal.
"""

FORMAT_ROW = 0
"""The number of the row in a copy that says of which format it is."""

_MAGIC = b"\xf6oob"
_HEAD = struct.Struct(f"<4sI{SEAL_BYTES}s")
_log = logging.getLogger(__name__)


def seal(row: Row) -> bytes:
    """A digest of everything that is in ``row``."""
    return _seal(msgspec.msgpack.encode(row))


def _seal(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=SEAL_BYTES).digest()


def format_row(format_: int, names: Sequence[str] = ()) -> Row:
    """What a copy begins with, and what is said once more when the journal gets another name. ``names``: the
    journal's, the present one first.
    """
    return "format", FORMAT_ROW, format_, list(names)


def head_of(rows: dict[int, Row]) -> tuple[int, tuple[str, ...]]:
    """Format and names that a copy with ``rows`` says it has, which are taken out; 0 and none where it does
    not say.
    """
    match rows.pop(FORMAT_ROW, None):
        case (_, _, int(format_), [*names]):
            return format_, tuple(str(name) for name in names)
        case (_, _, int(format_)):
            return format_, ()
    return 0, ()


def sealed(text: str) -> str:
    """``text`` so that ``unsealed`` tells whether it was changed."""
    return f"{_seal(text.encode()).hex()} {text}"


def unsealed(found: object) -> str:
    """The text that was sealed; "" where that is not what is there."""
    text = found.partition(" ")[2] if isinstance(found, str) else ""
    return text if found == sealed(text) else ""


def framed(row: Row) -> bytes:
    """``row`` as it lies in the copy."""
    packed = msgspec.msgpack.encode(row)
    return _HEAD.pack(_MAGIC, len(packed), _seal(packed)) + packed


def rows_in(data: bytes) -> dict[int, Row]:
    """All rows of a copy that are what was written, by number; what is damaged is passed over."""
    found: dict[int, Row] = {}
    at = data.find(_MAGIC)
    while at >= 0:
        packed = _framed_at(data, at)
        if packed is None:
            at = data.find(_MAGIC, at + 1)
            continue
        row = tuple(msgspec.msgpack.decode(packed))
        found[row[1]] = row
        at = data.find(_MAGIC, at + _HEAD.size + len(packed))
    return found


def ends_whole(data: bytes) -> bool:
    """Whether a copy ends with a row that is what was written: else one or more after its last intact one may
    be lost.
    """
    at = data.rfind(_MAGIC)
    while at >= 0:
        packed = _framed_at(data, at)
        if packed is not None:
            return at + _HEAD.size + len(packed) == len(data)
        at = data.rfind(_MAGIC, 0, at)
    return not data


def _framed_at(data: bytes, at: int) -> bytes | None:
    if at + _HEAD.size > len(data):
        return None
    _, length, wanted = _HEAD.unpack_from(data, at)
    packed = data[at + _HEAD.size : at + _HEAD.size + length]
    return packed if len(packed) == length and _seal(packed) == wanted else None


class RecordCopy:
    """The file with all records once more. A disk that takes no more of it is said once, and
    holds nobody up.
    """

    def __init__(self, path: Path, format_: int, names: Sequence[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._path, self._failing = path, False
        if not os.fstat(self._fd).st_size:
            self.append([format_row(format_, names)])

    def append(self, rows: Iterable[Row]) -> None:
        """Write ``rows``, which are on disk."""
        data = b"".join(map(framed, rows))
        try:
            complete = os.write(self._fd, data) == len(data)
        except OSError as error:
            complete = False
            if not self._failing:
                _log.warning("the journal's copy %s cannot be written: %s", self._path, error)
        self._failing = not complete

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
