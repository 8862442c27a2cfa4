"""State folders, jobs and digests that earlier versions wrote (tests/data), in a folder of the test's own.

Their paths begin with ``/tests-data``. In text that is replaced; records of a journal are decoded, and packed
and sealed anew, as their format would have it: that is why what formats 3 and 4 look like stands here once
more, and does not change with the product.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import struct
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

DATA = Path(__file__).parents[1] / "data"
ROOT = "/tests-data"
# Arithmetic that every x86-64 processor of the last ten years does alike; the digests are of it.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
DIGESTS: dict[str, dict[str, str]] = json.loads((DATA / "digests.json").read_text(encoding="utf-8"))


def inputs(root: Path) -> None:
    """What the jobs read, in ``root``."""
    for name in ("text.txt", "tokens.bin"):
        shutil.copy(DATA / name, root)
    shutil.copytree(DATA / "qwen2", root / "qwen2")
    shutil.copytree(DATA / "prepared", root / "prepared")


def job_text(name: str, root: Path) -> str:
    """The job.toml of one of the jobs, whose inputs are in ``root``."""
    return moved((DATA / "jobs" / f"{name}.toml").read_text(encoding="utf-8"), root)


def state_folder(name: str, root: Path) -> Path:
    """A daemon's state folder, as ``root``/state/daemon."""
    folder = root / "state" / "daemon"
    folder.parent.mkdir(parents=True)
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder.parent, filter="data")
    (folder.parent / name).rename(folder)
    for manifest in folder.rglob("manifest.json"):
        manifest.write_text(moved(manifest.read_text(encoding="utf-8"), root), encoding="utf-8")
    _move_journal(folder, root)
    return folder


def digest_of(losses: Sequence[str], folder: Path) -> dict[str, str]:
    """The entry of ``DIGESTS`` for losses as hex floats, and the checkpoint in ``folder``."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    tensors = sorted(item for bucket in manifest["buckets"] for item in bucket["tensors"].items())
    return {
        "losses": hashlib.sha256("\n".join(losses).encode()).hexdigest(),
        "tensors": hashlib.sha256("\n".join(f"{key} {value}" for key, value in tensors).encode()).hexdigest(),
        "last_loss": losses[-1],
    }


def moved(text: str, root: Path) -> str:
    """``text`` with paths in ``root``."""
    return text.replace(f"{ROOT}/", f"{root}/")


def _move_journal(folder: Path, root: Path) -> None:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as database:
        (format_,) = database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        columns = {"entries": "seq, kind, data", "steps": "seq, job, round, step, outcome, loss, data"}
        rows = [
            (table, *row)
            for table, names in columns.items()
            for row in database.execute(f"SELECT {names} FROM {table} ORDER BY seq").fetchall()
        ]
        rows = [(*row[:-1], _moved_data(row[-1], root)) for row in rows]
        with database:
            for row in rows:
                sealed = ", seal = ?" if format_ == 4 else ""
                values = (row[-1], *([_seal(msgspec.msgpack.encode(row))] if sealed else []), row[1])
                database.execute(f"UPDATE {row[0]} SET data = ?{sealed} WHERE seq = ?", values)
    if format_ == 4:
        frames = [("format", 0, 4), *sorted(rows, key=lambda row: int(row[1]))]
        (folder / "journal.copy").write_bytes(b"".join(map(_framed, frames)))


def _moved_data(data: bytes, root: Path) -> bytes:
    return msgspec.msgpack.encode(_moved_value(msgspec.msgpack.decode(data), root))


def _moved_value(value: Any, root: Path) -> Any:
    match value:
        case str():
            return moved(value, root)
        case bytes():  # JSON of a change
            return moved(value.decode(), root).encode()
        case list():
            return [_moved_value(each, root) for each in value]
        case dict():
            return {key: _moved_value(each, root) for key, each in value.items()}
        case _:
            return value


def _seal(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=8).digest()


def _framed(row: tuple[Any, ...]) -> bytes:
    packed = msgspec.msgpack.encode(row)
    return struct.pack("<4sI8s", b"\xf6oob", len(packed), _seal(packed)) + packed
