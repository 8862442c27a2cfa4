"""The rows of a part of a source, one after another: what stands in their columns, or why nothing does.

Owns the formats that need no library: JSONL, plain or compressed, and text files, each of which is a row.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, UnsetType

from oobleckd.prepare import arrows
from oobleckd.prepare.columns import RowColumns
from oobleckd.prepare.objects import SourcePath, StoredObject, open_file, size_of
from oobleckd.prepare.sources import Kind, Part, problem_of_text
from oobleckd.protocol.unreadable import UNREADABLE, problem_of, shown
from oobleckd.tokens.errors import DataError
from oobleckd.words import size

MAX_DOCUMENT = 64 << 20
"""Bytes: a tokenizer takes a document whole, and some twenty times its size of memory."""
_BUFFER = 1 << 20
_NO_JSON = "is no JSON"
_BOM = b"\xef\xbb\xbf"


class SourceRow(NamedTuple):
    """Number ``number`` of its part (from 0), up to byte ``done`` of the part's work. ``values``: by column;
    ``problem``: what is wrong with it.
    """

    number: int
    values: Mapping[str, Any]
    done: int
    problem: str = ""


class RowProblem(ValueError):
    """What is wrong with a row. ``hint``: what to do where the row is right, and the job cannot read it: no
    such row is skipped.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


def rows_of(kind: Kind, part: Part, columns: RowColumns) -> Iterator[SourceRow]:
    """Raises DataError where the file cannot be read on."""
    path = part.file
    try:
        match kind:
            case "jsonl":
                yield from _json_lines(part, path, columns)
            case "text":
                yield _whole(path, *columns.text)
            case "parquet":
                yield from _table_rows(
                    part, columns, arrows.values_of_groups(path, part.begin, part.stop, columns)
                )
            case "arrow":
                yield from _table_rows(
                    part, columns, arrows.values_of_batches(path, part.begin, part.stop, columns)
                )
    except OSError as error:
        if error.strerror:
            raise DataError(f"{path}: {error.strerror}", "make it readable for this user") from error
        raise arrows.damaged(path, error) from error
    except (EOFError, zlib.error) as error:
        raise arrows.damaged(path, error) from error


def place_of(kind: Kind, part: Part, number: int, lines_before: int = 0) -> tuple[str, int]:
    """File and line (or row, from 1; 0 where the file is one) of a row of ``part``."""
    match kind:
        case "text":
            return part.path, 0
        case "jsonl":
            return part.path, lines_before + number + 1
        case "parquet" | "arrow":
            return part.path, part.first_row + number + 1


def lines_before(part: Part) -> int:
    """Lines of a JSONL file that begin before ``part``."""
    left, lines = part.begin, 0
    with open_file(part.file) as file:
        while left and (data := file.read(min(_BUFFER, left))):
            lines += data.count(b"\n")
            left -= len(data)
            last = data
    # The line that reaches into this part begins before it.
    return lines + (1 if part.begin and not last.endswith(b"\n") else 0)


def columns_of(path: SourcePath) -> Sequence[str]:
    """The keys of the first row of a JSONL file. Raises DataError."""
    try:
        with _opened(path) as (file, _):
            line = _first_line(file)
        if line.lstrip().startswith(b"["):
            raise DataError(
                f"data.path: {path} is one JSON array, and not an object a line",
                f"make lines of it: jq -c '.[]' {path.name} > {path.name.partition('.')[0]}.jsonl",
            )
        row = msgspec.json.decode(line) if line else {}
    except (OSError, EOFError, zlib.error) as error:
        raise arrows.damaged(path, error) from error
    except (*UNREADABLE, RecursionError):
        return ()  # whoever reads the row says what is wrong with it
    return list(row) if isinstance(row, dict) else ()


# --------------------------------------------------------------------------- JSONL


def _json_lines(part: Part, path: SourcePath, columns: RowColumns) -> Iterator[SourceRow]:
    shape = _shape(columns)
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(shape)
    with _opened(path) as (file, place):
        at, number = part.begin, -1
        if part.begin:  # a line belongs to the part in which it begins
            file.seek(part.begin - 1)
            at += _to_line_end(file) - 1
        plain = part.stop > 0
        while (not plain or at < part.stop) and (line := file.readline(MAX_DOCUMENT)):
            number += 1
            at += len(line)
            if len(line) == MAX_DOCUMENT and not line.endswith(b"\n"):
                at += _to_line_end(file)
                yield SourceRow(number, {}, place() - part.begin, f"is longer than {size(MAX_DOCUMENT)}")
            elif line.strip():
                values, problem = _decoded(
                    decoder, line.removeprefix(_BOM) if at == len(line) else line, columns
                )
                yield SourceRow(number, values, (at if plain else place()) - part.begin, problem)


def _shape(columns: RowColumns) -> type[msgspec.Struct]:
    """A row of which all other columns are passed over."""
    kinds: dict[str, Any] = {
        **dict.fromkeys(columns.text, str),
        **dict.fromkeys(columns.lists, list[dict[str, Any]]),
        **dict.fromkeys(columns.more, Any),
    }
    fields = [(f"column{number}", kind | UnsetType, UNSET) for number, kind in enumerate(kinds.values())]
    names = {f"column{number}": name for number, name in enumerate(kinds)}
    return msgspec.defstruct("Row", fields, rename=names, frozen=True)


def _decoded(
    decoder: msgspec.json.Decoder[Any], line: bytes, columns: RowColumns
) -> tuple[Mapping[str, Any], str]:
    try:
        row = decoder.decode(line)
    except (*UNREADABLE, RecursionError) as error:
        return {}, _why(line, columns, error)
    there = zip((*columns.needed, *columns.more), msgspec.structs.astuple(row), strict=True)
    values = {name: value for name, value in there if value is not UNSET}
    missing = next((name for name in columns.needed if name not in values), None)
    return (values, "") if missing is None else ({}, f"has no column {missing!r}")


def _why(line: bytes, columns: RowColumns, error: Exception) -> str:
    """What is wrong with a row, for people."""
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return f"not UTF-8 at byte {wrong.start:,}"
    try:
        row = msgspec.json.decode(line)
    except UNREADABLE as wrong:
        said = problem_of(wrong)
        return (
            f"not JSON{said.removeprefix(_NO_JSON)}" if said.startswith(_NO_JSON) else f"not JSON: it {said}"
        )
    except RecursionError:
        return "not JSON: too deep"
    if not isinstance(row, dict):
        return f"no object, but {shown(row)}"
    return next(_misfits(row, columns), problem_of(error))


def _misfits(row: Mapping[str, Any], columns: RowColumns) -> Iterator[str]:
    """Which columns are of another kind than is wanted."""
    for name in columns.text:
        if name in row and not isinstance(row[name], str):
            yield f"its {name!r} is no text, but {shown(row[name])}"
    for name in columns.lists:
        said = row.get(name, [])
        if not isinstance(said, list):
            yield f"its {name!r} is no list, but {shown(said)}"
        elif odd := [each for each in said if not isinstance(each, dict)]:
            yield f"its {name!r} has {shown(odd[0])} where a table is to be"


@contextmanager
def _opened(path: SourcePath) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """A file as it was before it was compressed, and how many of its own bytes have been read."""
    if path.name.endswith(".zst"):
        data, place = arrows.open_zst(path)
        with io.BufferedReader(data, _BUFFER) as text:
            yield text, place
        return
    with open_file(path, _BUFFER) as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast("IO[bytes]", unpacked), file.tell
        else:
            yield file, file.tell


def _first_line(file: IO[bytes]) -> bytes:
    while line := file.readline(MAX_DOCUMENT):
        if line.strip():
            return line.removeprefix(_BOM)
    return b""


def _to_line_end(file: IO[bytes]) -> int:
    """Read on to behind the line; how many bytes."""
    passed = 0
    while data := file.readline(_BUFFER):
        passed += len(data)
        if data.endswith(b"\n"):
            break
    return passed


# --------------------------------------------------------------------------- others


def _whole(path: SourcePath, column: str) -> SourceRow:
    num_bytes = size_of(path)
    if num_bytes > MAX_DOCUMENT:
        return SourceRow(0, {}, num_bytes, f"is longer than {size(MAX_DOCUMENT)}")
    with open_file(path) as file:
        data = file.read()
    # Of files in folders this is known before one of them is read.
    if isinstance(path, StoredObject) and (problem := problem_of_text(data)):
        return SourceRow(0, {}, num_bytes, problem)
    try:
        return SourceRow(0, {column: data.decode("utf-8-sig")}, num_bytes)
    except UnicodeDecodeError as error:
        return SourceRow(0, {}, num_bytes, f"not UTF-8 at byte {error.start:,}")


def _table_rows(
    part: Part, columns: RowColumns, batches: Iterable[Iterable[Mapping[str, Any]]]
) -> Iterator[SourceRow]:
    needed = columns.needed
    for number, values in enumerate(values for batch in batches for values in batch):
        done = part.num_bytes * (number + 1) // part.num_rows if part.num_rows else 0
        if missing := [name for name in needed if values[name] is None]:
            where = "there" if len(needed) == 1 else f"in {missing[0]!r}"
            yield SourceRow(number, {}, done, f"has nothing {where} (null)")
        elif any(len(values[name]) > MAX_DOCUMENT for name in columns.text):
            yield SourceRow(number, {}, done, f"is longer than {size(MAX_DOCUMENT)}")
        else:
            yield SourceRow(number, values, done)
