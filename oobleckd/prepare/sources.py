"""The files that a job's ``[data]`` names, in the order in which they are read, and the pieces that they are
tokenized in.

Both are functions of the files alone: two processes, two nodes, or a second try after a kill cut alike. Owns
which files are refused by their names. What is in a row is ``rows``'.
"""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from oobleckd.prepare.arrows import batches_of, open_parquet
from oobleckd.prepare.objects import (
    SourcePath,
    StoredObject,
    is_pattern_of,
    is_url,
    objects_of,
    open_file,
    root_of_url,
    size_of,
)
from oobleckd.tokens.errors import DataError
from oobleckd.words import count

Kind = Literal["jsonl", "text", "parquet", "arrow"]
PIECE_BYTES = 8 << 20
"""Of the source. A process tokenizes so much in some seconds: what a kill costs."""
_MAX_PARTS = 4096
_STREAMED = (".gz", ".zst")  # cannot be begun in the middle
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": ("",),
}
"""Of the files that are taken from a folder."""
_ARROW_STATE, _ARROW_SPLITS = "state.json", "dataset_dict.json"
_HEAD_BYTES = 8192


class Part(msgspec.Struct, frozen=True):
    """Rows of one file: from byte ``begin`` to ``stop`` of a JSONL file, so many row groups or record batches
    of Parquet and Arrow, else the whole file. ``num_bytes``: how much work it is. ``first_row`` and
    ``num_rows`` are of Parquet and Arrow (0: not counted before). ``etag`` and ``size``: of an object in a
    store.
    """

    path: str
    begin: int
    stop: int
    num_bytes: int
    first_row: int = 0
    num_rows: int = 0
    etag: str = ""
    size: int = 0

    @property
    def file(self) -> SourcePath:
        """What it is part of."""
        return StoredObject(self.path, self.size, self.etag) if self.etag else Path(self.path)


class TextPiece(msgspec.Struct, frozen=True):
    """What one process tokenizes at a time."""

    number: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """How much work it is."""
        return sum(part.num_bytes for part in self.parts)


# --------------------------------------------------------------------------- files


def root_of(path: str) -> Path:
    """The file or folder that ``path`` is, or the folder that a pattern begins in."""
    plain = Path(path).expanduser()
    if not is_pattern(path):
        return plain
    fixed = []
    for name in plain.parts:
        if glob.has_magic(name):
            break
        fixed.append(name)
    return Path(*fixed)


def is_pattern(path: str) -> bool:
    """Whether ``path`` is a glob, and no file of such a name."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def files_of(kind: Kind, path: str, cache: Path) -> list[SourcePath]:
    """All files, or objects of a store, of ``path``: itself, those in a folder, or those that a pattern
    finds. None of those in ``cache``, where prepared data lies. Raises DataError.
    """
    if is_url(path):
        return _listed_objects(kind, path)
    try:
        return _listed(kind, path, cache)
    except OSError as error:
        raise _unreadable(error, path) from error


def _listed_objects(kind: Kind, url: str) -> list[SourcePath]:
    found, root = list[SourcePath](objects_of(url)), root_of_url(url)
    if is_pattern_of(url):
        if not found:
            raise _no_match(url)
        return found
    if [str(file) for file in found] == [root]:
        return found
    if not found:
        raise DataError(
            f"data.path: {url} does not exist: it is no object, and none lies below it",
            "see that bucket and key are written as they are there",
        )
    if kind == "arrow":
        return _saved(root, [file for file in found if str(file) == f"{root}/{file.name}"])
    return _of_kind(kind, root, found)


def _listed(kind: Kind, path: str, cache: Path) -> list[SourcePath]:
    root = root_of(path)
    if is_pattern(path):
        found = (Path(name) for name in _matching(str(Path(path).expanduser())))
        files = sorted((file for file in found if file.is_file()), key=Path.as_posix)
        if matching := [file for file in files if cache not in file.parents]:
            return [*matching]
        raise _no_match(path)
    if not root.is_dir():
        if not root.exists():
            raise DataError(f"data.path: {root} does not exist", "relative paths start at the current folder")
        return [root]
    if kind == "arrow":
        return _saved(str(root), [file for file in root.iterdir() if file.is_file()])
    files = sorted((file for file in root.rglob("*") if file.is_file()), key=Path.as_posix)
    return _of_kind(kind, str(root), [file for file in files if cache not in file.parents])


def _no_match(path: str) -> DataError:
    return DataError(f"data.path: {path} matches no file", "`**` goes through folders: corpus/**/*.txt")


def _of_kind(kind: Kind, root: str, there: Iterable[SourcePath]) -> list[SourcePath]:
    """Those of all in ``root`` that ``kind`` is made of. Raises DataError."""
    files = [file for file in there if file.name.endswith(_SUFFIXES[kind])]
    if not files:
        what = "file" if kind == "text" else f"{' or '.join(_SUFFIXES[kind][:2])} file"
        raise DataError(
            f"data.path: {root} has no {what}", "name a folder that has some, a file, or a pattern"
        )
    if kind != "text":
        return files
    hidden = [file for file in files if any(part.startswith(".") for part in _below(root, file))]
    if hidden:
        more = f" (and {count(len(hidden) - 1, 'other file')})" if len(hidden) > 1 else ""
        raise DataError(
            f"data.path: {hidden[0]} is hidden{more}",
            f'leave it out with a pattern, such as data.path = "{root}/**/*.txt"',
        )
    return files


def _matching(pattern: str) -> Iterator[str]:
    """Unlike pathlib's, this ``*`` is no hidden file."""
    return glob.iglob(pattern, recursive=True)  # noqa: PTH207


def _below(root: str, file: SourcePath) -> Sequence[str]:
    """The names from ``root`` to ``file``."""
    return file.relative_to(root).parts if isinstance(file, Path) else file.url[len(root) + 1 :].split("/")


def check_text(file: SourcePath) -> None:
    """Raises DataError where ``file`` has what no text has."""
    try:
        with open_file(file) as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError as error:
        raise _unreadable(error, str(file)) from error
    if problem := problem_of_text(head):
        raise DataError(
            f"data.path: {file} {problem}",
            f'leave it out with a pattern, such as data.path = "{file.parent}/*.txt"',
        )


def problem_of_text(head: bytes) -> str:
    """What no text has at its begin; "" where it has none of that."""
    zero = head.find(0, 0, _HEAD_BYTES)
    return f"is no text: it has a zero at byte {zero:,}" if zero >= 0 else ""


def _saved(root: str, there: Iterable[SourcePath]) -> list[SourcePath]:
    """The Arrow files among those in a folder that ``datasets`` saved, in its order, or else all in it.
    Raises DataError.
    """
    named = {file.name: file for file in there}
    if _ARROW_SPLITS in named:
        names = ", ".join(map(str, _json(named[_ARROW_SPLITS]).get("splits", ())))
        raise DataError(f"data.path: {root} has several splits: {names}", f"name one, such as {root}/train")
    if _ARROW_STATE in named:
        told = _json(named[_ARROW_STATE])
        if told.get("_indices_files"):
            raise DataError(
                f"data.path: {root} has its rows in an order that lies in another file",
                "save it anew: `dataset.flatten_indices().save_to_disk(folder)`",
            )
        files = [each["filename"] for each in told.get("_data_files", ())]
    else:
        files = sorted(name for name in named if name.endswith(_SUFFIXES["arrow"]))
    missing = [name for name in files if name not in named]
    if not files or missing:
        what = f"lacks {missing[0]}, which {_ARROW_STATE} names" if missing else "has no .arrow file"
        raise DataError(f"data.path: {root} {what}", "name a folder of `datasets.save_to_disk`")
    return [named[name] for name in files]


def _json(file: SourcePath) -> dict[str, Any]:
    try:
        with open_file(file) as opened:
            told = json.loads(opened.read())
    except (ValueError, RecursionError) as error:
        raise DataError(f"data.path: {file} is no JSON", "save the data set anew") from error
    return told if isinstance(told, dict) else {}


def _unreadable(error: OSError, path: str) -> DataError:
    return DataError(
        f"data.path: {error.filename or path}: {error.strerror or error}", "make it readable for this user"
    )


# --------------------------------------------------------------------------- pieces


def pieces_of(kind: Kind, files: Iterable[SourcePath]) -> list[TextPiece]:
    """All rows of ``files``, in pieces of ``PIECE_BYTES`` where parts are not larger. Raises DataError."""
    pieces: list[TextPiece] = []
    parts: list[Part] = []
    held = 0
    for part in _parts(kind, files):
        if parts and (held + part.num_bytes > PIECE_BYTES or len(parts) == _MAX_PARTS):
            pieces.append(TextPiece(len(pieces), tuple(parts)))
            parts, held = [], 0
        parts.append(part)
        held += part.num_bytes
    return [*pieces, TextPiece(len(pieces), tuple(parts))] if parts else pieces


def _parts(kind: Kind, files: Iterable[SourcePath]) -> Iterator[Part]:
    for file in files:
        for part in _parts_of(kind, file):
            if isinstance(file, StoredObject):
                yield msgspec.structs.replace(part, etag=file.etag, size=file.size)
            else:
                yield part


def _parts_of(kind: Kind, file: SourcePath) -> Iterator[Part]:
    if size := size_of(file):
        match kind:
            case "jsonl" if not file.name.endswith(_STREAMED):
                for begin in range(0, size, PIECE_BYTES):
                    stop = min(begin + PIECE_BYTES, size)
                    yield Part(str(file), begin, stop, stop - begin)
            case "jsonl" | "text":
                yield Part(str(file), 0, 0, size)
            case "parquet":
                yield from _row_groups(file)
            # Where nothing is mapped, its batches are known once all of it was read. (D-data-019)
            case "arrow" if isinstance(file, StoredObject):
                yield Part(str(file), 0, sys.maxsize, size)
            case "arrow":
                yield from _batches(file)


def _row_groups(file: SourcePath) -> Iterator[Part]:
    metadata = open_parquet(file).metadata
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        yield Part(str(file), number, number + 1, max(1, group.total_byte_size), first, group.num_rows)
        first += group.num_rows


def _batches(file: Path) -> Iterator[Part]:
    begin, first, rows, held, number = 0, 0, 0, 0, -1
    for number, batch in enumerate(batches_of(file)):
        rows += batch.num_rows
        held += batch.nbytes
        if held >= PIECE_BYTES:
            yield Part(str(file), begin, number + 1, held, first, rows)
            begin, first, rows, held = number + 1, first + rows, 0, 0
    if begin <= number:
        yield Part(str(file), begin, number + 1, max(1, held), first, rows)
