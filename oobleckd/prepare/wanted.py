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

from oobleckd.prepare.arrows import check_column, no_column
from oobleckd.prepare.rows import columns_of
from oobleckd.prepare.sources import Kind, TextPiece, check_text, files_of, is_pattern, pieces_of, root_of
from oobleckd.prepare.tokenizer import TokenizerOf, tokenizer_of
from oobleckd.protocol.job import Data, Job
from oobleckd.tokens.dtypes import NAMED, smallest
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import FORMAT, Manifest, SourceFile, read_manifest
from oobleckd.words import count

_KINDS: dict[str, Kind] = {"jsonl": "jsonl", "text": "text", "parquet": "parquet", "arrow": "arrow"}
_NAME = re.compile(r"[0-9a-f]{32}")
_DIGITS = 32


class Stat(NamedTuple):
    """A file of the sources, as a look at it tells."""

    path: str
    size: int
    mtime_ns: int


class WantedData(NamedTuple):
    """``settings``: a digest of all but the sources that decides the tokens."""

    data: Data
    kind: Kind
    files: tuple[Stat, ...]
    tokenizer: TokenizerOf
    dtype: str
    cache: Path
    settings: str

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def pieces(self) -> list[TextPiece]:
        """What is tokenized at a time. Raises DataError."""
        return pieces_of(self.kind, [Path(file.path) for file in self.files])


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
    said = (FORMAT, kind, data.column, tokenizer.sha256, tokenizer.eos, tokenizer.bos, dtype, data.on_bad_row)
    settings = hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:_DIGITS]
    files = tuple(_stat(file.absolute()) for file in files_of(kind, data.path, cache))
    return WantedData(data, kind, files, tokenizer, dtype, cache, settings)


def look_at(wanted: WantedData) -> None:
    """Whether its first file has what is asked for, and text files look like text. Raises DataError."""
    if wanted.kind == "text":
        for file in wanted.files:
            check_text(Path(file.path))
        return
    if not wanted.num_bytes:
        return
    first = Path(next(file.path for file in wanted.files if file.size))
    column = wanted.data.column
    if wanted.kind != "jsonl":
        check_column(first, column, parquet=wanted.kind == "parquet")
    elif (names := columns_of(first)) and column not in names:
        raise no_column(first, column, names)


def find(wanted: WantedData) -> FoundFolder | None:
    """The folder that was made of these very files, by their paths, sizes and times; None where there is none
    that is whole.
    """
    # Reading all text takes minutes, and only its bytes say what it is. (D-data-014)
    for found in _prepared(wanted.cache):
        told = found.manifest
        same = tuple(Stat(file.path, file.size, file.mtime_ns) for file in told.sources) == wanted.files
        if same and told.settings == wanted.settings:
            return found
    return None


def digest_of(settings: str, sources: Sequence[SourceFile]) -> str:
    """Name of the folder: of the settings, and of the bytes of all files in their order."""
    whole = hashlib.sha256(settings.encode())
    for source in sources:
        whole.update(bytes.fromhex(source.sha256))
    return whole.hexdigest()[:_DIGITS]


def cache_of(data: Data) -> Path:
    """Where prepared data lies: beside the file or folder that is read, or in the folder that a pattern
    begins in.
    """
    if data.cache:
        return Path(data.cache).expanduser().absolute()
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


def _stat(file: Path) -> Stat:
    try:
        stat = file.stat()
    except OSError as error:
        raise DataError(f"data.path: {file}: {error.strerror}", "make it readable for this user") from error
    return Stat(str(file), stat.st_size, stat.st_mtime_ns)


def _dtype_of(data: Data, size: int) -> str:
    if data.dtype == "auto":
        return next(name for name, kind in NAMED.items() if kind == smallest(size))
    if size - 1 > np.iinfo(NAMED[data.dtype]).max:
        raise DataError(
            f"data.dtype: {data.dtype} has no room for a tokenizer of {count(size, 'token')}",
            "leave it out: the smallest that has is taken",
        )
    return data.dtype
