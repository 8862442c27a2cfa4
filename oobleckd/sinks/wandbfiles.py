"""What W&B's own files say of a run: the rows that its program has written, whether or not they were sent.

Owns the format of ``run-ID.wandb``, which the wandb package writes and has no reader of: LevelDB's log, whose
records are ``wandb_internal.Record``. Nothing is written here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.sinks.base import OutputContents

_MAGIC, _HEAD_BYTES, _BLOCK = b":W&B", 7, 32 * 1024
_PIECE = struct.Struct("<IHB")  # checksum, bytes, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
AT = "_timestamp"


def folders_of(root: Path) -> list[Path]:
    """The folders of a run below ``root``, in the order in which they were begun."""
    found = [each for each in (root / "wandb").glob("*run-*") if each.is_dir() and not each.is_symlink()]
    return sorted(found, key=lambda each: each.name.removeprefix("offline-"))


def read(folders: list[Path]) -> OutputContents:
    """The rows in all of ``folders``. A later one takes up the run where it begins: what earlier ones have
    from that step on was given up.
    """
    written = OutputContents()
    for folder in folders:
        for file in sorted(folder.glob("*.wandb")):
            first = True
            for record in records(file):
                kind = record.WhichOneof("record_type")
                if kind == "history":
                    row = row_of(record.history)
                    if first:
                        written.cut(int(row["_step"]))
                        first = False
                    _note(written, row)
                elif kind == "alert":
                    name, _, step = record.alert.title.rpartition(" at step ")
                    written.incidents[name.rpartition(" ")[2]] = int(step)
    return written


def _note(written: OutputContents, row: dict[str, Any]) -> None:
    step, at = int(row["_step"]), float(row[AT])
    if any(name.startswith("train/") for name in row):
        written.steps.add(step, at)
    evaluated_at = row.get("eval/at")
    if evaluated_at is not None:
        written.evaluations.add(step, float(evaluated_at))


def row_of(history: Any) -> dict[str, Any]:
    """A row by its keys."""
    return {
        item.key or "/".join(item.nested_key): msgspec.json.decode(_finite(item.value_json))
        for item in history.item
    }


def _finite(text: str) -> str:
    """W&B writes NaN and Infinity as JavaScript has them, and JSON has neither."""
    return f'"{text}"' if text in {"NaN", "Infinity", "-Infinity"} else text


def records(file: Path) -> Iterator[Any]:
    """The whole records of a file, as ``wandb_internal.Record``; it ends where one is torn."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for data in _framed(file.read_bytes()):
        yield Record.FromString(data)


def _framed(data: bytes) -> Iterator[bytes]:
    if not data.startswith(_MAGIC):
        return
    at, parts = _HEAD_BYTES, b""
    while at + _PIECE.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _PIECE.size:  # a block ends with zeros where no head has room
            at += left
            continue
        checksum, size, kind = _PIECE.unpack_from(data, at)
        piece = data[at + _PIECE.size : at + _PIECE.size + size]
        if len(piece) < size or zlib.crc32(bytes([kind]) + piece) != checksum:
            return
        at += _PIECE.size + size
        parts = piece if kind in {_FULL, _FIRST} else parts + piece
        if kind in {_FULL, _LAST}:
            yield parts


def is_open(folder: Path) -> bool:
    """Whether a process of this user has a file open in ``folder``: a writer that outlives who started it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            for fd in (process / "fd").iterdir():
                with suppress(OSError):
                    if fd.readlink().is_relative_to(folder):
                        return True
    return False
