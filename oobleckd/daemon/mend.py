"""A journal whose bytes have changed: found before it is read, mended from its copy, and kept aside for people.

Owns the look at every record before a daemon starts, and what replaces a file that is damaged. Both files have every record, each with a seal, so what is
damaged in one is taken from the other. What neither has is lost, with all that came after it, and the daemon
goes on from what the workers hold (``core.machine``).
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from oobleckd.daemon.records import FORMAT_ROW, Row, format_row, framed, rows_in, seal
from oobleckd.protocol.durable import sync_directory

TABLES = {
    "entries": "CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL, seal BLOB NOT NULL)",
    "steps": (
        "CREATE TABLE steps (seq INTEGER PRIMARY KEY, job TEXT NOT NULL, round INTEGER NOT NULL, step INTEGER NOT NULL, "
        "outcome TEXT NOT NULL, loss REAL, data BLOB NOT NULL, seal BLOB NOT NULL)"
    ),
}
INDEX = "CREATE INDEX steps_of_job ON steps (job, step)"
META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL)"
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
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
    }
)  # fmt: skip
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """What was found, for people, where the damaged files lie, and whether records are gone for good, as far as anybody can know."""

    what: str
    aside: Path
    lost: bool


@dataclass(slots=True)
class _Found:
    """Of a database: its intact rows by number, and what is wrong with it."""

    rows: dict[int, Row] = field(default_factory=dict)
    wrong: str = ""


def mend(path: Path, copy: Path, format_: int) -> Damage | None:
    """Look at all records of the journal ``path`` of this ``format_`` and mend it if need be. Raises OSError, sqlite3.Error where even a new file
    cannot be written.
    """
    copied = rows_in(copy.read_bytes()) if copy.exists() else {}
    if not path.exists():
        if copied:
            copy.replace(_free_name(copy, "old"))  # somebody took the journal away: a new one begins
        return None
    said = copied.pop(FORMAT_ROW, ("", 0, 0))[2]
    if _format_of(path) not in {None, format_} and said != format_:
        return None  # of another version
    found = _look(path, format_)
    known = copied | found.rows
    newest = max(known, default=0)
    whole = [known[seq] for seq in range(1, _first_gap(known))]
    if not found.wrong and len(found.rows) == newest == len(whole):
        if copied.keys() != found.rows.keys() or said != format_:
            write_copy(copy, whole, format_)
        return None
    aside = _set_aside(path)
    write_database(path, whole, format_)
    write_copy(copy, whole, format_)
    what = found.wrong or f"records after number {len(found.rows)} were gone"
    damage = Damage(what, aside, newest > len(whole) or not copied)
    _log.error("the journal %s was damaged (%s); it has %d records again, %s; the damaged file is %s",
               path, what, len(whole), "and more are lost" if damage.lost else "which are all", aside)  # fmt: skip
    return damage


def write_database(path: Path, rows: list[Row], format_: int) -> None:
    """A new journal with ``rows``, complete under another name before it has its own."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with closing(sqlite3.connect(new, isolation_level=None)) as database:
        database.execute("BEGIN")
        for statement in (META, *TABLES.values(), INDEX):
            database.execute(statement)
        database.execute("INSERT INTO meta VALUES ('format', ?)", (format_,))
        for row in rows:
            database.execute(INSERT[row[0]], (*row[1:], seal(row)))
        database.execute("COMMIT")
    new.chmod(0o640)
    for suffix in ("-wal", "-shm"):  # of the file before: they must never meet the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    new.replace(path)
    sync_directory(path.parent)


def _format_of(path: Path) -> int | None:
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
            if database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone() != (format_,):
                found.wrong = "the number of its format is not what was written"
            database.execute("BEGIN IMMEDIATE")  # a header that forbids writing shows here
            database.execute("UPDATE meta SET value = value")
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        if not _is_damage(error):
            raise
        found.wrong = found.wrong or str(error)
    return found


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
    """Whether it is the file's fault, and not that of a full disk, of its mode or of somebody who has it locked."""
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
    """Keep a damaged database and what belongs to it under another name. The file itself stays until the new one takes its place, so that a
    start that is cut short begins again with all there is.
    """
    aside = _free_name(path, "damaged")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            shutil.copyfile(part, aside.with_name(aside.name + suffix))
    return aside


def _free_name(path: Path, what: str) -> Path:
    number = 1
    while path.with_name(f"{path.name}.{what}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{what}-{number}")


def write_copy(copy: Path, rows: list[Row], format_: int) -> None:
    """A new copy, of a journal with ``rows``, complete under another name before it has its own."""
    new = copy.with_name(f"{copy.name}.new")
    with new.open("wb") as file:
        file.writelines(map(framed, [format_row(format_), *rows]))
        os.fchmod(file.fileno(), 0o640)
    new.replace(copy)
