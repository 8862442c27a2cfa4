"""What a job wants prepared: its files, tokenizer and settings; and the folder that has them, if one does.

Owns the digests. That of the sources' bytes costs reading them all, so a folder is found without: by the
paths, sizes and times of the files that its manifest names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from oobleckd.prepare.arrows import check_columns, no_column
from oobleckd.prepare.chats import ChatSetup, RowReader, check_templates, reader_of
from oobleckd.prepare.objects import SourcePath, StoredObject, is_url
from oobleckd.prepare.rows import RowProblem, columns_of, place_of, rows_of
from oobleckd.prepare.sources import Kind, TextPiece, check_text, files_of, is_pattern, pieces_of, root_of
from oobleckd.prepare.tokenizer import TokenizerOf, special_of, templates_of, tokenizer_of, words_of
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import Data
from oobleckd.tokens.dtypes import NAMED, smallest
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import FORMAT, FORMAT_OF_CHATS, Manifest, SourceFile, read_manifest
from oobleckd.words import count

_KINDS: dict[str, Kind] = {"jsonl": "jsonl", "text": "text", "parquet": "parquet", "arrow": "arrow"}
BAD_ROW = 'mend it, or set data.on_bad_row = "skip": such rows are left out then, and counted'
_NAME = re.compile(r"[0-9a-f]{32}")
_DIGITS = 32


class Stat(NamedTuple):
    """A file of the sources, as a look at it tells. ``etag``: of an object in a store, which tells no
    ``mtime_ns``.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str = ""

    @property
    def file(self) -> SourcePath:
        """What it was looked at."""
        return StoredObject(self.path, self.size, self.etag) if self.etag else Path(self.path)


class WantedData(NamedTuple):
    """``settings``: a digest of all but the sources that decides the tokens; ``chat``: None of text."""

    data: Data
    kind: Kind
    files: tuple[Stat, ...]
    tokenizer: TokenizerOf
    dtype: str
    cache: Path
    settings: str
    chat: ChatSetup | None

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def pieces(self) -> list[TextPiece]:
        """What is tokenized at a time. Raises DataError."""
        return pieces_of(self.kind, [stat.file for stat in self.files])


class FoundFolder(NamedTuple):
    """A prepared folder."""

    folder: Path
    manifest: Manifest


def wanted_of(job: Job) -> WantedData:
    """What ``job`` wants; looks at names and sizes, and at the tokenizer. Raises DataError."""
    data = job.data
    assert data.is_prepared
    kind = _KINDS[data.kind]
    cache = cache_of(data)
    tokenizer = tokenizer_of(job)
    dtype = _dtype_of(data, tokenizer.size)
    chat = _chat_of(job, tokenizer)
    said: tuple[object, ...] = (
        FORMAT if chat is None else FORMAT_OF_CHATS, kind, data.column, tokenizer.sha256, tokenizer.eos,
        tokenizer.bos, dtype, data.on_bad_row, *([] if chat is None else [chat]),
    )  # fmt: skip
    settings = hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:_DIGITS]
    files = tuple(_stat(file) for file in files_of(kind, data.path, cache))
    return WantedData(data, kind, files, tokenizer, dtype, cache, settings, chat)


def look_at(wanted: WantedData) -> None:
    """Whether its first file has what is asked for, and text files look like text. Raises DataError."""
    if wanted.kind == "text":
        for number, stat in enumerate(wanted.files):
            # A request for each object; whoever reads one finds out as well.
            if number == 0 or not stat.etag:
                check_text(stat.file)
        return
    if not wanted.num_bytes:
        return
    first = next(stat.file for stat in wanted.files if stat.size)
    reader = reader_of(wanted.data.column, wanted.chat)
    if wanted.kind != "jsonl":
        check_columns(first, reader.columns, parquet=wanted.kind == "parquet")
    elif (names := columns_of(first)) and not set(reader.columns.needed) <= set(names):
        raise no_column(first, reader.columns, names)
    if wanted.chat is not None and wanted.data.on_bad_row == "fail" and isinstance(first, Path):
        _look_at_chat(wanted.kind, first, reader)


def _look_at_chat(kind: Kind, file: Path, reader: RowReader) -> None:
    """Whether the template takes the first row: one that takes none is found before all is read."""
    part = pieces_of(kind, [file])[0].parts[0]
    for row in rows_of(kind, part, reader.columns):
        if row.problem:
            return  # whoever prepares it says so
        try:
            list(reader.texts(row.values))
        except RowProblem as error:
            path, line = place_of(kind, part, row.number)
            raise DataError(f"{path}:{line}: {error.problem}", error.hint or BAD_ROW) from error
        return


def find(wanted: WantedData) -> FoundFolder | None:
    """The folder that was made of these very files, by their paths, sizes and times; None where there is none
    that is whole.
    """
    # Reading all text takes minutes, and only its bytes say what it is. (D-data-014)
    for found in _prepared(wanted.cache):
        told = found.manifest
        seen = (Stat(file.path, file.size, file.mtime_ns, file.etag) for file in told.sources)
        same = tuple(seen) == wanted.files
        if same and told.settings == wanted.settings:
            return found
    return None


def digest_of(settings: str, sources: Sequence[SourceFile]) -> str:
    """Name of the folder: of the settings, and of the bytes of all files in their order; of an object in a
    store what it says of itself stands for them.
    """
    whole = hashlib.sha256(settings.encode())
    for source in sources:
        # Nobody reads a bucket twice, once for its digest. (D-data-018)
        told = msgspec.json.encode((source.path, source.size, source.etag)) if source.etag else b""
        whole.update(told or bytes.fromhex(source.sha256))
    return whole.hexdigest()[:_DIGITS]


def cache_of(data: Data) -> Path:
    """Where prepared data lies: beside the file or folder that is read, or in the folder that a pattern
    begins in.
    """
    if data.cache:
        return Path(data.cache).expanduser().absolute()
    if is_url(data.path):
        raise DataError(
            f"data.cache: is missing, and beside {data.path} nothing can be trained on",
            "name a folder for the tokens, seen by every node under the same path",
        )
    root = root_of(data.path).absolute()
    return (root if is_pattern(data.path) else root.parent) / "prepared"


def is_name(name: str) -> bool:
    """Whether a folder of the cache may be a prepared one."""
    return _NAME.fullmatch(name) is not None


def _prepared(cache: Path) -> Iterator[FoundFolder]:
    try:
        folders = sorted(path for path in cache.iterdir() if is_name(path.name))
    except OSError:
        return
    for folder in folders:
        try:
            yield FoundFolder(folder, read_manifest(folder))
        except DataError:
            continue


def _stat(file: SourcePath) -> Stat:
    if isinstance(file, StoredObject):
        return Stat(file.url, file.size, 0, file.etag)
    file = file.absolute()
    try:
        stat = file.stat()
    except OSError as error:
        raise DataError(f"data.path: {file}: {error.strerror}", "make it readable for this user") from error
    return Stat(str(file), stat.st_size, stat.st_mtime_ns)


def _chat_of(job: Job, tokenizer: TokenizerOf) -> ChatSetup | None:
    """How chats of ``job`` become text; None of text. Raises DataError."""
    data = job.data
    match data.format:
        case "text":
            return None
        case "completion":
            return ChatSetup("completion")
        case "chat":
            folder = tokenizer.file.parent
            templates, words = templates_of(job, folder), words_of(folder)
            setup = ChatSetup(
                "chat", data.chat.roles, data.chat.unroll, templates,
                {name: word for name, word in words.items() if word is not None}, special_of(tokenizer.file),
            )  # fmt: skip
            check_templates(setup, folder, words.keys())
            return setup


def _dtype_of(data: Data, size: int) -> str:
    if data.dtype == "auto":
        return next(name for name, kind in NAMED.items() if kind == smallest(size))
    if size - 1 > np.iinfo(NAMED[data.dtype]).max:
        raise DataError(
            f"data.dtype: {data.dtype} has no room for a tokenizer of {count(size, 'token')}",
            "leave it out: the smallest that has is taken",
        )
    return data.dtype
