"""One piece of the sources, made into tokens: a file of numbers, and beside it what is known of them.

Owns the two files of a piece. Both are renamed into place, the numbers first: a piece whose ``.done`` is
there is whole, whoever made it. Which pieces there are, and what becomes of them, is ``build``'s.
"""

from __future__ import annotations

import hashlib
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oobleckd import __version__
from oobleckd.prepare.rows import TextRow, rows_of
from oobleckd.prepare.sources import Kind, Part, TextPiece
from oobleckd.tokens.dtypes import NAMED
from oobleckd.tokens.manifest import MAX_BAD_ROWS

_BATCH_ROWS, _BATCH_CHARS = 512, 4 << 20


class PieceSetup(msgspec.Struct, frozen=True):
    """What all pieces of a preparation have in common. ``folder``: where they go; ``eos``, ``bos``: -1 for
    none.
    """

    kind: Kind
    column: str
    tokenizer: str
    eos: int
    bos: int
    dtype: str
    skip: bool
    folder: str


class UnusableRow(msgspec.Struct, frozen=True):
    """Row ``row`` of part ``part`` of piece ``piece``, and what is wrong with it."""

    piece: int
    part: int
    row: int
    why: str


class PieceReport(msgspec.Struct, frozen=True):
    """What is known of a piece. ``mark``: what it was made of, and by what. ``rows``: of each part, those
    that hold nothing among them; ``seen``: of each part its file's size and mtime_ns; ``lengths``: tokens of
    each document, int32.
    """

    number: int
    mark: str
    tokens: int
    largest: int
    crc: int
    rows: tuple[int, ...]
    seen: tuple[tuple[int, int], ...]
    bad: tuple[UnusableRow, ...]
    num_bad: int
    lengths: bytes

    @property
    def num_documents(self) -> int:
        """Each has a length."""
        return len(self.lengths) // 4


class Bad(Exception):
    """A row of which nothing can be made, where none may be skipped."""

    def __init__(self, row: UnusableRow) -> None:
        super().__init__(row.why)
        self.row = row


def tokens_of(folder: Path, number: int) -> Path:
    """The file of numbers of a piece."""
    return folder / f"{number:07d}.bin"


def done_of(folder: Path, number: int) -> Path:
    """The file that says that a piece is whole."""
    return folder / f"{number:07d}.done"


def report_of(piece: TextPiece, setup: PieceSetup) -> PieceReport | None:
    """Of a piece that was made before; None where it was not, is not whole, or was cut in another way or made
    by another version.
    """
    folder = Path(setup.folder)
    try:
        report = msgspec.msgpack.decode(done_of(folder, piece.number).read_bytes(), type=PieceReport)
        size = tokens_of(folder, piece.number).stat().st_size
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    whole = size == report.tokens * NAMED[setup.dtype].itemsize
    return report if whole and report.mark == mark_of(piece, setup) else None


def mark_of(piece: TextPiece, setup: PieceSetup) -> str:
    """A digest of all that decides what comes of a piece, but for what is in its files."""
    said = msgspec.json.encode((piece, setup, _versions()))
    return hashlib.sha256(said).hexdigest()[:32]


def make(piece: TextPiece, setup: PieceSetup, tokenizer: Any, told: Callable[[int], None]) -> PieceReport:
    """Tokenize ``piece`` into its two files. ``told``: called with how much of its work is done.

    Raises Bad, DataError, OSError.
    """
    folder = Path(setup.folder)
    target = tokens_of(folder, piece.number)
    mine = f"{socket.gethostname()}.{os.getpid()}"
    part = target.with_name(f"{target.name}.{mine}.part")
    making = _Making(piece, setup, told)
    try:
        with part.open("wb") as file:
            for texts in making.batches():
                file.write(making.encoded(tokenizer, texts))
        part.replace(target)
        report = making.report()
        done = done_of(folder, piece.number)
        part = done.with_name(f"{done.name}.{mine}.part")
        part.write_bytes(msgspec.msgpack.encode(report))
        part.replace(done)
    finally:
        part.unlink(missing_ok=True)
    return report


@cache
def _versions() -> tuple[str, str]:
    return version("tokenizers"), __version__


def _seen(part: Part) -> tuple[int, int]:
    if part.etag:  # a store gives no other one
        return part.size, 0
    stat = Path(part.path).stat()
    return stat.st_size, stat.st_mtime_ns


class _Making:
    """A piece while it is made."""

    def __init__(self, piece: TextPiece, setup: PieceSetup, told: Callable[[int], None]) -> None:
        self._piece, self._setup, self._told = piece, setup, told
        self._dtype = NAMED[setup.dtype]
        self._first = [setup.bos] if setup.bos >= 0 else []
        self._last = [setup.eos] if setup.eos >= 0 else []
        self._lengths: list[int] = []
        self._rows: list[int] = []
        self._bad: list[UnusableRow] = []
        self._num_bad = self._tokens = self._crc = 0
        self._largest = -1

    def batches(self) -> Iterator[list[str]]:
        """Texts of rows that have some, so many at a time."""
        batch: list[str] = []
        chars = passed = 0
        for number, part in enumerate(self._piece.parts):
            rows = 0
            for row in rows_of(self._setup.kind, part, self._setup.column):
                rows = row.number + 1
                if row.problem:
                    self._refuse(number, row)
                    continue
                batch.append(row.text)
                chars += len(row.text)
                if len(batch) >= _BATCH_ROWS or chars >= _BATCH_CHARS:
                    yield batch
                    batch, chars = [], 0
                    self._told(passed + min(row.done, part.num_bytes))
            self._rows.append(rows)
            passed += part.num_bytes
        yield batch
        self._told(passed)

    def encoded(self, tokenizer: Any, texts: Sequence[str]) -> bytes:
        """Their numbers. A text without any is no document."""
        numbers: list[int] = []
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            if ids := encoding.ids:
                before = len(numbers)
                numbers += self._first
                numbers += ids
                numbers += self._last
                self._lengths.append(len(numbers) - before)
        if not numbers:
            return b""
        array = np.array(numbers, self._dtype)
        self._largest = max(self._largest, int(array.max()))
        self._tokens += len(numbers)
        data = array.tobytes()
        self._crc = zlib.crc32(data, self._crc)
        return data

    def report(self) -> PieceReport:
        """Once all batches are encoded."""
        return PieceReport(
            self._piece.number, mark_of(self._piece, self._setup), self._tokens, self._largest, self._crc,
            tuple(self._rows),
            tuple(_seen(part) for part in self._piece.parts), tuple(self._bad), self._num_bad,
            np.array(self._lengths, "<i4").tobytes(),
        )  # fmt: skip

    def _refuse(self, part: int, row: TextRow) -> None:
        bad = UnusableRow(self._piece.number, part, row.number, row.problem)
        if not self._setup.skip:
            raise Bad(bad)
        self._num_bad += 1
        if len(self._bad) < MAX_BAD_ROWS:
            self._bad.append(bad)
