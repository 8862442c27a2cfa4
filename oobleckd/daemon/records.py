"""Seals the records of the journal, so that changed bytes show, and frames them for the copy.

Owns what a record is sealed with, the frames of a file of the copy, and reading such a file. Which files the
copy has is in ``segments``, the tables are in ``tables``, and who mends one from the other is ``mend``.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

SEAL_BYTES = 8
Row = tuple[Any, ...]
"""A table's name and the columns of a row without the seal; the first of these is its number in
the journal.
"""

FORMAT_ROW = 0
"""The number of the row in a copy that says of which format it is."""
HEAD = "format"
SNAPSHOTS = "snapshots"

_MAGIC = b"\xf6oob"
_HEAD = struct.Struct(f"<4sI{SEAL_BYTES}s")
_CHUNK_BYTES = 2**20
_MOST_BYTES = 2**28  # of one row: more is a length that was changed


class CopyHead(NamedTuple):
    """What a file of the copy says of the journal: 0 and none where it does not say. ``dropped``: up to this
    number steps may be missing that were kept for long enough.
    """

    format: int = 0
    names: tuple[str, ...] = ()
    dropped: int = 0


def seal(row: Row) -> bytes:
    """A digest of everything that is in ``row``."""
    return _seal(msgspec.msgpack.encode(row))


def _seal(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=SEAL_BYTES).digest()


def format_row(format_: int, names: Sequence[str] = (), dropped: int = 0) -> Row:
    """What a file of the copy begins with, and what is said once more when the journal gets another name.
    ``names``: the journal's, the present one first.
    """
    return HEAD, FORMAT_ROW, format_, list(names), dropped


def head_in(row: Row) -> CopyHead:
    """What a row that ``format_row`` made says, also one of an earlier version."""
    match row:
        case (_, _, int(format_), [*names], int(dropped)):
            return CopyHead(format_, tuple(map(str, names)), dropped)
        case (_, _, int(format_), [*names]):
            return CopyHead(format_, tuple(map(str, names)))
        case (_, _, int(format_)):
            return CopyHead(format_)
    return CopyHead()


def snapshot_row(seq: int, data: bytes) -> Row:
    """The state after record ``seq``, as it is sealed and framed."""
    return SNAPSHOTS, seq, data


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


class Scan:
    """The rows of a file of the copy that are what was written, in its order; what is damaged is passed over.
    Memory is bounded by the longest row.

    ``whole``, once all were had: whether the file ends with an intact one; else one or more after it may be
    lost. A file that is not there has none.
    """

    def __init__(self, path: Path) -> None:
        self.whole = True
        self._path = path

    def __iter__(self) -> Iterator[Row]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:  # not mapped: a disk that cannot read is to be an error, not a signal
            self.whole = yield from _rows_of(file)


def rows_in(frames: bytes) -> Iterator[Row]:
    """The same of what a file of the copy may have in it."""
    return _rows_of(io.BytesIO(frames))


def _rows_of(file: IO[bytes]) -> Generator[Row, None, bool]:
    data, at, before, last = b"", 0, 0, 0
    while True:
        at, needed = _next_frame(data, at)
        if needed > len(data) and (more := file.read(max(_CHUNK_BYTES, needed - len(data)))):
            before, data, at = before + at, data[at:] + more, 0
        elif needed > len(data) and at >= len(data) - len(_MAGIC):
            break
        elif (packed := _framed_at(data, at)) is None:
            at += 1
        else:
            at += _HEAD.size + len(packed)
            last = before + at
            yield tuple(msgspec.msgpack.decode(packed))
    return last == before + len(data)


def _next_frame(data: bytes, at: int) -> tuple[int, int]:
    """Where in ``data`` the next frame begins, or might, and up to where it must be known."""
    found = data.find(_MAGIC, at)
    if found < 0:
        return max(at, len(data) - len(_MAGIC) + 1), len(data) + 1
    if found + _HEAD.size > len(data):
        return found, found + _HEAD.size
    length = _HEAD.unpack_from(data, found)[1]
    return found, found + _HEAD.size + (length if length <= _MOST_BYTES else 0)


def _framed_at(data: bytes, at: int) -> bytes | None:
    if at + _HEAD.size > len(data):
        return None
    magic, length, wanted = _HEAD.unpack_from(data, at)
    packed = data[at + _HEAD.size : at + _HEAD.size + length]
    intact = magic == _MAGIC and len(packed) == length and _seal(packed) == wanted
    return packed if intact else None


def written(rows: Iterable[Row]) -> bytes:
    """All of them as they lie in the copy."""
    return b"".join(map(framed, rows))
