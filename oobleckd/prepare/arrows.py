"""Parquet and Arrow files, by pyarrow (the extra ``oobleckd[data]``), which is imported when the first one is
opened.

Owns their columns and batches of text. Which of them a piece has is ``sources``'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

from oobleckd.prepare.objects import RANGE_BYTES, SourcePath, StoredObject, open_file, open_places
from oobleckd.tokens.errors import DataError, MissingPackage
from oobleckd.words import count

if TYPE_CHECKING:
    from oobleckd.prepare.columns import RowColumns

_FILE = b"ARROW1"
_COLUMN = "set data.column to the one with the text"
_FORMAT = (
    "rename them: a chat has `messages`, with a role and content each; a completion `prompt` and `completion`"
)
_MAX_NAMED = 12
ROWS = 512
"""Of a Parquet file are decoded at a time."""


def arrow(module: str, what: str) -> Any:
    """A module of pyarrow, which reads ``what``. Raises DataError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{what} is read by pyarrow, which is not installed", "pip install 'oobleckd[data]'"
        ) from error


def open_zst(path: SourcePath) -> tuple[Any, Callable[[], int]]:
    """What ``path`` was before zstd, and how many of its own bytes have been read. Raises DataError."""
    arrows = arrow("pyarrow", str(path))
    file = (
        arrows.PythonFile(open_file(path), "r")
        if isinstance(path, StoredObject)
        else arrows.OSFile(str(path))
    )
    return arrows.CompressedInputStream(file, "zstd"), file.tell


def open_parquet(path: SourcePath) -> Any:
    """Raises DataError."""
    parquet = arrow("pyarrow.parquet", str(path))
    try:
        return _stored_parquet(path) if isinstance(path, StoredObject) else parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


@lru_cache(1)  # a footer is some requests, and each row group asks for it
def _stored_parquet(file: StoredObject) -> Any:
    parquet = import_module("pyarrow.parquet")
    return parquet.ParquetFile(open_places(file), buffer_size=RANGE_BYTES)


def check_columns(path: SourcePath, columns: RowColumns, *, parquet: bool) -> None:
    """Whether ``path``, of Parquet or of Arrow, has the columns that a row needs. Raises DataError."""
    schema = open_parquet(path).schema_arrow if parquet else _reader(path)[0]
    kinds = dict(zip(schema.names, schema.types, strict=True))
    for column in columns.needed:
        if column not in kinds:
            raise no_column(path, columns, list(kinds))
        if not (_is_text if column in columns.text else _is_tables)(kinds[column]):
            what = "text" if column in columns.text else "list of tables"
            raise DataError(
                f"{_key_of(columns)}: {column!r} of {path} is of {kinds[column]}, and no {what}",
                _hint_of(columns),
            )


def no_column(path: SourcePath, columns: RowColumns, there: Sequence[str]) -> DataError:
    """Of a file that has other columns than it needs."""
    column = next(name for name in columns.needed if name not in there)
    more = f" and {count(len(there) - _MAX_NAMED, 'other column')}" if len(there) > _MAX_NAMED else ""
    named = f"{', '.join(sorted(there)[:_MAX_NAMED])}{more}"
    return DataError(
        f"{_key_of(columns)}: {path} has no column {column!r}; it has {named}", _hint_of(columns)
    )


def _key_of(columns: RowColumns) -> str:
    """The key of a job that says which columns these are."""
    return "data.column" if len(columns.needed) == len(columns.text) == 1 else "data.format"


def _hint_of(columns: RowColumns) -> str:
    return _COLUMN if _key_of(columns) == "data.column" else _FORMAT


def _is_text(kind: Any) -> bool:
    types = import_module("pyarrow").types
    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner))


def _is_tables(kind: Any) -> bool:
    types = import_module("pyarrow").types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind)
    return bool(is_list and types.is_struct(kind.value_type))


def batches_of(path: SourcePath) -> Iterator[Any]:
    """The record batches of an Arrow file, a stream as ``datasets`` writes it or one with a footer; mapped,
    not read. Raises DataError.
    """
    try:
        yield from _reader(path)[1]
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def values_of_batches(
    path: SourcePath, begin: int, stop: int, columns: RowColumns
) -> Iterator[Iterable[Mapping[str, Any]]]:
    """Rows of record batches ``begin`` to ``stop``, by column. Raises DataError."""
    check_columns(path, columns, parquet=False)
    for batch in islice(batches_of(path), begin, stop):
        for first in range(0, batch.num_rows, ROWS):
            yield _rows(batch.slice(first, ROWS), columns)


def values_of_groups(
    path: SourcePath, begin: int, stop: int, columns: RowColumns
) -> Iterator[Iterable[Mapping[str, Any]]]:
    """Rows of row groups ``begin`` to ``stop``, by column. Raises DataError."""
    check_columns(path, columns, parquet=True)
    file = open_parquet(path)
    names = [name for name in (*columns.needed, *columns.more) if name in file.schema_arrow.names]
    try:
        for batch in file.iter_batches(ROWS, row_groups=list(range(begin, stop)), columns=names):
            yield _rows(batch, columns)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def _rows(batch: Any, columns: RowColumns) -> Iterator[Mapping[str, Any]]:
    """A batch as tables. A table's missing keys are nulls in a column of them, so a null is no value."""
    names = [name for name in (*columns.needed, *columns.more) if name in batch.schema.names]
    values = [batch.column(name).to_pylist() for name in names]
    if columns.lists or columns.more:
        values = [[_plain(value) for value in column] for column in values]
    return (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))


def _plain(value: Any) -> Any:
    """As JSON would have it, without nulls inside."""
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items() if each is not None}
        case list():
            return [_plain(each) for each in value]
        case None | bool() | int() | float() | str():
            return value
        case _:  # a time, say
            return str(value)


def _reader(path: SourcePath) -> tuple[Any, Iterator[Any]]:
    """Schema and batches."""
    arrows = arrow("pyarrow", str(path))
    try:
        if isinstance(path, StoredObject):
            mapped = arrows.PythonFile(open_file(path), "r")
        else:
            mapped = arrows.memory_map(str(path))
        if mapped.read(len(_FILE)) == _FILE:
            file = arrows.ipc.open_file(mapped)
            return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
        mapped.seek(0)
        stream = arrows.ipc.open_stream(mapped)
        return stream.schema, iter(stream)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def damaged(path: SourcePath, error: Exception) -> DataError:
    """Of a file that its library cannot read."""
    if isinstance(error, DataError):
        return error
    said = str(error).split("\n", maxsplit=1)[0].rstrip(".")
    return DataError(f"{path} cannot be read: {said}", "it was cut, or is of another format: make it anew")
