"""One piece of the sources, made into tokens: a file of numbers, of chats one of bits for what the loss asks
for, and beside them what is known of both.

Owns the files of a piece. All are renamed into place, the numbers first: a piece whose ``.done`` is there is
whole, whoever made it. Which pieces there are, and what becomes of them, is ``build``'s.
"""

from __future__ import annotations

import hashlib
import io
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd import __version__
from oobleckd.prepare.chats import ChatSetup, RowText, reader_of
from oobleckd.prepare.opening import see_all_characters
from oobleckd.prepare.rows import RowProblem, SourceRow, rows_of
from oobleckd.prepare.sources import Kind, Part, TextPiece
from oobleckd.tokens.asked import AskedWriter
from oobleckd.tokens.dtypes import NAMED
from oobleckd.tokens.manifest import MAX_BAD_ROWS

if TYPE_CHECKING:
    from oobleckd.prepare.chat_template import Span

_BATCH_ROWS, _BATCH_CHARS = 64, 1 << 18  # what is known of their tokens stays in the cache


class PieceSetup(msgspec.Struct, frozen=True):
    """What all pieces of a preparation have in common. ``folder``: where they go; ``eos``, ``bos``: -1 for
    none; ``chat``: None of text.
    """

    kind: Kind
    column: str
    tokenizer: str
    eos: int
    bos: int
    dtype: str
    skip: bool
    folder: str
    chat: ChatSetup | None = None


class UnusableRow(msgspec.Struct, frozen=True):
    """Row ``row`` of part ``part`` of piece ``piece``, and what is wrong with it. ``hint``: what to do where
    the row is right, and the job cannot read it.
    """

    piece: int
    part: int
    row: int
    why: str
    hint: str = ""


class PieceReport(msgspec.Struct, frozen=True):
    """What is known of a piece. ``mark``: what it was made of, and by what. ``rows``: of each part, those
    that hold nothing among them; ``seen``: of each part its file's size and mtime_ns; ``lengths``: tokens of
    each document, int32. Of chats ``asked``: tokens that the loss asks for; ``loss_crc``: of their bits.
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
    asked: int = 0
    loss_crc: int = 0

    @property
    def num_documents(self) -> int:
        """Each has a length."""
        return len(self.lengths) // 4


class Bad(Exception):
    """A row of which nothing can be made, where it may not be skipped."""

    def __init__(self, row: UnusableRow) -> None:
        super().__init__(row.why)
        self.row = row


def tokens_of(folder: Path, number: int) -> Path:
    """The file of numbers of a piece."""
    return folder / f"{number:07d}.bin"


def loss_of(folder: Path, number: int) -> Path:
    """The file of bits of a piece of chats."""
    return folder / f"{number:07d}.loss"


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
        sizes = [tokens_of(folder, piece.number).stat().st_size]
        wanted = [report.tokens * NAMED[setup.dtype].itemsize]
        if setup.chat is not None:
            sizes.append(loss_of(folder, piece.number).stat().st_size)
            wanted.append(-(-report.tokens // 8))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return report if sizes == wanted and report.mark == mark_of(piece, setup) else None


def mark_of(piece: TextPiece, setup: PieceSetup) -> str:
    """A digest of all that decides what comes of a piece, but for what is in its files."""
    said = msgspec.json.encode((piece, setup, _versions()))
    return hashlib.sha256(said).hexdigest()[:32]


def make(piece: TextPiece, setup: PieceSetup, tokenizer: Any, told: Callable[[int], None]) -> PieceReport:
    """Tokenize ``piece`` into its files. ``told``: called with how much of its work is done.

    Raises Bad, DataError, OSError.
    """
    folder = Path(setup.folder)
    making = _Making(piece, setup, tokenizer, told)
    with _whole(tokens_of(folder, piece.number)) as file:
        for data in making.tokens():
            file.write(data)
    if setup.chat is not None:
        with _whole(loss_of(folder, piece.number)) as file:
            file.write(making.loss())
    report = making.report()
    with _whole(done_of(folder, piece.number)) as file:
        file.write(msgspec.msgpack.encode(report))
    return report


@contextmanager
def _whole(target: Path) -> Iterator[IO[bytes]]:
    """A file that is ``target`` once all is written, and nothing before."""
    part = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@cache
def _versions() -> tuple[str, str]:
    import tokenizers  # not where a folder is only looked for

    return tokenizers.__version__, __version__


def _seen(part: Part) -> tuple[int, int]:
    if part.etag:  # a store gives no other one
        return part.size, 0
    stat = Path(part.path).stat()
    return stat.st_size, stat.st_mtime_ns


class _Waiting(NamedTuple):
    """A document that is to be tokenized: of row ``row`` of part ``part``."""

    document: RowText
    part: int
    row: int


class _Making:
    """A piece while it is made."""

    def __init__(
        self, piece: TextPiece, setup: PieceSetup, tokenizer: Any, told: Callable[[int], None]
    ) -> None:
        self._piece, self._setup, self._tokenizer, self._told = piece, setup, tokenizer, told
        self._reader = reader_of(setup.column, setup.chat)
        self._dtype = NAMED[setup.dtype]
        self._first = [setup.bos] if setup.bos >= 0 else []
        self._last = [setup.eos] if setup.eos >= 0 else []
        self._begin = _begin_of(setup, tokenizer)
        self._lengths: list[int] = []
        self._asked: list[npt.NDArray[np.bool_]] = []
        self._rows: list[int] = []
        self._bad: list[UnusableRow] = []
        self._num_bad = self._tokens = self._crc = 0
        self._largest, self._loss = -1, b""
        if setup.chat is not None:
            see_all_characters(tokenizer)

    def tokens(self) -> Iterator[bytes]:
        """Numbers of all documents, so many at a time."""
        for batch in self._batches():
            numbers = self._of_text(batch) if self._setup.chat is None else self._of_chats(batch)
            if not numbers:
                continue
            array = np.array(numbers, self._dtype)
            self._largest = max(self._largest, int(array.max()))
            self._tokens += len(numbers)
            data = array.tobytes()
            self._crc = zlib.crc32(data, self._crc)
            yield data

    def loss(self) -> bytes:
        """What the loss asks for, of all tokens. Once they are through."""
        bits = io.BytesIO()
        writer = AskedWriter(bits)
        for asked in self._asked:
            writer.add(asked)
        writer.end()
        self._loss = bits.getvalue()
        return self._loss

    def report(self) -> PieceReport:
        """Once all is written."""
        bad = sorted(self._bad, key=lambda each: (each.part, each.row))
        return PieceReport(
            self._piece.number, mark_of(self._piece, self._setup), self._tokens, self._largest, self._crc,
            tuple(self._rows),
            tuple(_seen(part) for part in self._piece.parts), tuple(bad), self._num_bad,
            np.array(self._lengths, "<i4").tobytes(),
            sum(int(asked.sum()) for asked in self._asked), zlib.crc32(self._loss),
        )  # fmt: skip

    def _batches(self) -> Iterator[list[_Waiting]]:
        """Documents of rows that have some, so many at a time."""
        batch: list[_Waiting] = []
        chars = passed = 0
        for number, part in enumerate(self._piece.parts):
            rows = 0
            for row in rows_of(self._setup.kind, part, self._reader.columns):
                rows = row.number + 1
                documents = self._documents(number, row)
                batch += (_Waiting(document, number, row.number) for document in documents)
                chars += sum(len(document.text) for document in documents)
                if len(batch) >= _BATCH_ROWS or chars >= _BATCH_CHARS:
                    yield batch
                    batch, chars = [], 0
                    self._told(passed + min(row.done, part.num_bytes))
            self._rows.append(rows)
            passed += part.num_bytes
        yield batch
        self._told(passed)

    def _documents(self, part: int, row: SourceRow) -> list[RowText]:
        """Of a row that is right."""
        if row.problem:
            self._refuse(part, row.number, row.problem)
            return []
        try:
            return list(self._reader.texts(row.values))
        except RowProblem as error:
            self._refuse(part, row.number, error.problem, error.hint)
            return []

    def _of_text(self, batch: Sequence[_Waiting]) -> list[int]:
        """Numbers of documents, of which the loss asks for all. A text without any is no document."""
        numbers: list[int] = []
        texts = [waiting.document.text for waiting in batch]
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            if ids := encoding.ids:
                before = len(numbers)
                numbers += self._first
                numbers += ids
                numbers += self._last
                self._lengths.append(len(numbers) - before)
        return numbers

    def _of_chats(self, batch: Sequence[_Waiting]) -> list[int]:
        """The same, of which the loss asks for some."""
        numbers: list[int] = []
        texts = [waiting.document.text for waiting in batch]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for waiting, encoding in zip(batch, encodings, strict=True):
            ids = [*self._first, *encoding.ids, *self._last]
            asked = np.concatenate(
                [
                    np.zeros(len(self._first), np.bool_),
                    reached(encoding.offsets, waiting.document.asked),
                    np.ones(len(self._last), np.bool_),
                ]
            )
            if problem := self._problem_of(ids, asked):
                self._refuse(waiting.part, waiting.row, problem)
                continue
            numbers += ids
            self._lengths.append(len(ids))
            self._asked.append(asked)
        return numbers

    def _problem_of(self, ids: Sequence[int], asked: npt.NDArray[np.bool_]) -> str:
        if not asked[1:].any():  # nothing stands before the first one
            return "has no token that the loss asks for"
        if self._begin >= 0 and ids[:2] == [self._begin] * 2:
            return f"begins with {self._tokenizer.id_to_token(self._begin)!r} twice: the text has it already"
        return ""

    def _refuse(self, part: int, row: int, problem: str, hint: str = "") -> None:
        bad = UnusableRow(self._piece.number, part, row, problem, hint)
        if hint or not self._setup.skip:
            raise Bad(bad)
        self._num_bad += 1
        if len(self._bad) < MAX_BAD_ROWS:
            self._bad.append(bad)


def _begin_of(setup: PieceSetup, tokenizer: Any) -> int:
    """The beginning of text of chats, which their template writes; else what is put before each document."""
    word = setup.chat.words.get("bos_token") if setup.chat is not None else None
    number = tokenizer.token_to_id(word) if word is not None else None
    return setup.bos if number is None else int(number)


def reached(offsets: Sequence[tuple[int, int]], spans: Sequence[Span] | None) -> npt.NDArray[np.bool_]:
    """Of tokens that have the characters at ``offsets``, whether one of these is in ``spans`` (None: all
    are).
    """
    if spans is None:
        return np.ones(len(offsets), np.bool_)
    # One that begins before them, with a blank that the prompt ends with, is the first that the model is to
    # say: transformers counts it, too. (D-data-024)
    first, stop = np.array(offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(offsets), np.bool_)
    for begin, end in spans:
        found |= (first < end) & (stop > begin)
    return found
