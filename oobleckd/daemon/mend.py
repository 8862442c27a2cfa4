"""Finds a journal whose bytes have changed before it is read, mends it from its copy, and keeps the damaged
file for people.

Owns the look at every record before a daemon starts, and what replaces a file that is damaged. Both files
have every record, each with a seal, so what is damaged in one is taken from the other. What neither has is
lost, with all that came after it, and the daemon goes on from what the workers hold (``core.machine``).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from oobleckd.daemon.records import (
    Row,
    ends_whole,
    format_row,
    framed,
    head_of,
    rows_in,
    seal,
    sealed,
    unsealed,
)
from oobleckd.host.durable import move, sync_file

TABLES = {
    "entries": "CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL, seal "
    "BLOB NOT NULL)",
    "steps": (
        "CREATE TABLE steps (seq INTEGER PRIMARY KEY, job TEXT NOT NULL, round INTEGER NOT NULL, step "
        "INTEGER NOT NULL, "
        "outcome TEXT NOT NULL, loss REAL, data BLOB NOT NULL, seal BLOB NOT NULL)"
    ),
}
INDEX = "CREATE INDEX steps_of_job ON steps (job, step)"
META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL)"
WRITE_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
NAMES = "names"
SEALED = frozenset({4, 5})
"""Formats whose records have seals."""
NAMED = 5
"""The first format of which every journal has a name."""
_TRACES = ("identity", "transport.secret")  # of an earlier incarnation of a daemon in the state folder
INSERT = {
    "entries": "INSERT INTO entries VALUES (?, ?, ?, ?)",
    "steps": "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
}
_SELECT = {
    "entries": "SELECT seq, kind, data, seal FROM entries ORDER BY seq",
    "steps": "SELECT seq, job, round, step, outcome, loss, data, seal FROM steps ORDER BY seq",
}
_OF_THE_MACHINE = frozenset(
    {
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
    }
)  # fmt: skip
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """What was found, for people, where the damaged files lie (None: nothing was left of them), and whether
    records are gone for good, as far as anybody can know.
    """

    what: str
    aside: Path | None
    lost: bool


@dataclass(slots=True)
class _Found:
    """Of a database: its intact rows by number, what it says of itself, and what is wrong with it."""

    rows: dict[int, Row] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    wrong: str = ""


def mend(path: Path, copy: Path, newest_format: int) -> Damage | None:
    """Look at all records of the journal ``path``, of ``newest_format`` or another one with seals, and mend
    it in its own format if need be. Raises OSError, sqlite3.Error where even a new file cannot be written.
    """
    for left in (_new(path), path.with_name(f"{_new(path).name}-journal"), _new(copy)):
        left.unlink(missing_ok=True)  # of a start that was cut short, by a full disk for one
    data = copy.read_bytes() if copy.exists() else b""
    copied = rows_in(data)
    said, named_there = head_of(copied)
    if not path.exists():
        return _from_copy(path, copy, said or newest_format, named_there, copied, torn=not ends_whole(data))
    told = format_of(path)
    if told is not None and not {told, said} & SEALED:
        return None  # of another version
    format_ = next((each for each in (told, said) if each in SEALED), newest_format)
    found = _look(path, format_)
    known = copied | found.rows
    newest = max(known, default=0)
    whole = [known[seq] for seq in range(1, _first_gap(known))]
    names = names_in(found.meta) or named_there
    if not found.wrong and len(found.rows) == newest == len(whole):
        if copied.keys() != found.rows.keys() or (said, named_there) != (format_, names):
            if whole and not copied:
                _log.warning("the journal's copy %s was gone, and is written anew", copy)
            write_copy(copy, whole, format_, names)
        return None
    if format_ >= NAMED and not names:
        names = (new_name(),)
    aside = _set_aside(path)
    write_database(path, whole, format_, {**found.meta, **named(names)})
    write_copy(copy, whole, format_, names)
    what = found.wrong or f"records after number {len(found.rows)} were gone"
    # Two files lose nothing to one flip anywhere. Where both lack an end, what devices hold came of
    # decisions that nobody knows, and jobs roll back. (D-daemon-008, D-daemon-009)
    lost = newest > len(whole) or not copied or not ends_whole(data)
    return _said(path, whole, Damage(what, aside, lost))


def _from_copy(
    path: Path, copy: Path, format_: int, names: Sequence[str], copied: dict[int, Row], *, torn: bool
) -> Damage | None:
    """There is no journal: one of what its copy has (``torn``: whose end is none). It is the first start
    where nothing else is there either.
    """
    if format_ not in SEALED:
        raise sqlite3.DatabaseError(f"it is gone, and its copy {copy.name} has format {format_}")
    whole = [copied[seq] for seq in range(1, _first_gap(copied))]
    left = any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-shm"))
    aside = _set_aside(path) if left else None
    if copied or names:
        names = names or (new_name(),)
        write_database(path, whole, format_, named(names))
        write_copy(copy, whole, format_, names)
        if not copied and not left:
            return None  # nothing was ever written
        lost = torn or max(copied, default=0) > len(whole)
        return _said(path, whole, Damage("the file was gone", aside, lost))
    garbled = copy.exists() and copy.stat().st_size
    if garbled:
        aside = free_name(copy, "damaged")
        copy.replace(aside)
    elif not left and not any((path.parent / trace).exists() for trace in _TRACES):
        return None
    what = f"the file was gone, and {'nothing in its copy can be read' if garbled else 'its copy with it'}"
    return _said(path, [], Damage(what, aside, lost=True))


def _said(path: Path, whole: list[Row], damage: Damage) -> Damage:
    kept = f"; the damaged file is {damage.aside}" if damage.aside is not None else ""
    _log.error("the journal %s was damaged (%s); it has %d records again, %s%s", path, damage.what,
        len(whole),
               "and more are lost" if damage.lost else "which are all", kept)  # fmt: skip
    return damage


def write_database(path: Path, rows: list[Row], format_: int, meta: Mapping[str, str]) -> None:
    """A new journal with ``rows``, complete under another name before it has its own. ``meta``: what it says
    of itself, besides its format.
    """
    new = _new(path)
    new.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as database:
            database.execute("BEGIN")
            for statement in (META, *TABLES.values(), INDEX):
                database.execute(statement)
            database.execute("INSERT INTO meta VALUES ('format', ?)", (format_,))
            for key, text in meta.items():
                database.execute(WRITE_META, (key, sealed(text)))
            for row in rows:
                database.execute(INSERT[row[0]], (*row[1:], seal(row)))
            database.execute("COMMIT")
        new.chmod(0o640)
        sync_file(new)
    except (OSError, sqlite3.Error):
        new.unlink(missing_ok=True)
        raise
    for suffix in ("-wal", "-shm"):  # of the file before: they must never meet the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    move(new, path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def new_name() -> str:
    """A name that no other journal has."""
    # Ids counted from one journal alone, so two daemons, or one whose journal was lost, wrote into one
    # folder and pruned each other's checkpoints. (D-checkpoints-013)
    return secrets.token_hex(16)


def named(names: Sequence[str]) -> dict[str, str]:
    """What a journal that has ``names`` says of itself."""
    return {NAMES: ",".join(names)} if names else {}


def names_in(meta: Mapping[str, str]) -> tuple[str, ...]:
    """The names of a journal, the present one first; none where it has none that can be read."""
    return tuple(filter(None, meta.get(NAMES, "").split(",")))


def format_of(path: Path) -> int | None:
    """What the file says of itself; None where it cannot be read."""
    try:
        with closing(sqlite3.connect(path)) as database:
            row = database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.Error:
        return None
    return row[0] if row and isinstance(row[0], int) else None


def _look(path: Path, format_: int) -> _Found:
    found = _Found()
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.text_factory = bytes
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != b"ok":
                found.wrong = verdict.decode(errors="replace")
            for table in TABLES:
                _look_at_table(database, table, found)
            _look_at_meta(database, format_, found)
            database.execute("BEGIN IMMEDIATE")  # a header that forbids writing shows here
            database.execute("UPDATE meta SET value = value")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        if not _is_damage(error):
            raise
        found.wrong = found.wrong or str(error)
    return found


def _look_at_meta(database: sqlite3.Connection, format_: int, found: _Found) -> None:
    for key, value in database.execute("SELECT key, value FROM meta"):
        if key == b"format":
            continue
        text = unsealed(value.decode(errors="replace") if isinstance(value, bytes) else value)
        if text:
            found.meta[key.decode(errors="replace")] = text
        else:
            found.wrong = "what it says of itself is not what was written"
    if database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone() != (format_,):
        found.wrong = "the number of its format is not what was written"
    elif format_ >= NAMED and not names_in(found.meta):
        found.wrong = "its name is gone"


def _look_at_table(database: sqlite3.Connection, table: str, found: _Found) -> None:
    try:
        for columns in database.execute(_SELECT[table]):
            row = _row(table, columns)
            if row is None:
                found.wrong = f"a record of {table} is not what was written"
            else:
                found.rows[row[1]] = row
    except sqlite3.Error as error:  # what comes after it in this table cannot be read
        if not _is_damage(error):
            raise
        found.wrong = str(error)


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether it is the file's fault, and not that of a full disk, of its mode or of somebody who has it
    locked.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF not in _OF_THE_MACHINE


def _row(table: str, columns: tuple[object, ...]) -> Row | None:
    """A row as it was sealed; None if it was not."""
    *values, sealed = columns
    data = values.pop()
    try:
        texts = [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError:
        return None
    row = (table, *texts, data)
    return row if isinstance(data, bytes) and isinstance(row[1], int) and seal(row) == sealed else None


def _first_gap(rows: dict[int, Row]) -> int:
    """The first number, from 1 on, that is not there."""
    seq = 1
    while seq in rows:
        seq += 1
    return seq


def _set_aside(path: Path) -> Path:
    """Keep a damaged database and what belongs to it under another name. The file itself stays until the new
    one takes its place, so that a start that is cut short begins again with all there is.
    """
    aside = free_name(path, "damaged")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            shutil.copyfile(part, aside.with_name(aside.name + suffix))
    return aside


def free_name(path: Path, what: str) -> Path:
    """A name beside ``path``, of something that it was before, which nothing has."""
    number = 1
    while path.with_name(f"{path.name}.{what}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{what}-{number}")


def write_copy(copy: Path, rows: list[Row], format_: int, names: Sequence[str]) -> None:
    """A new copy, of a journal with ``rows``, complete under another name before it has its own."""
    new = _new(copy)
    with new.open("wb") as file:
        file.writelines(map(framed, [format_row(format_, names), *rows]))
        os.fchmod(file.fileno(), 0o640)
        file.flush()
        os.fsync(file.fileno())
    move(new, copy)
