"""The tables of the journal, and reading them where bytes may have changed.

Owns the schema, the statements, what the journal says of itself (``meta``), and which errors of SQLite are
the file's fault. Who looks when and mends what is ``mend``.
"""

from __future__ import annotations

import heapq
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from oobleckd.daemon.records import SNAPSHOTS, Row, seal, sealed, snapshot_row, unsealed

FORMAT = 6
OLDER = (5, 4, 3)
SEALED = frozenset({4, 5, 6})
"""Formats whose records have seals."""
NAMED = 5
"""The first format of which every journal has a name."""
WITH_SNAPSHOTS = 6
"""The first format with snapshots of the state, and with a copy of several files."""
KEPT_SNAPSHOTS = 2
"""The newest one and the one before, as the newest may be what is damaged."""
NAMES = "names"
DROPPED = "dropped"
_LAST = 2**62

_CREATE = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL)",
    """CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL,
        seal BLOB NOT NULL)""",
    """CREATE TABLE steps (seq INTEGER PRIMARY KEY, job TEXT NOT NULL, round INTEGER NOT NULL,
        step INTEGER NOT NULL, outcome TEXT NOT NULL, loss REAL, data BLOB NOT NULL, seal BLOB NOT NULL)""",
    "CREATE INDEX steps_of_job ON steps (job, step)",
    "CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, data BLOB NOT NULL, seal BLOB NOT NULL)",
    """CREATE TABLE bins (job TEXT NOT NULL, first INTEGER NOT NULL, data BLOB NOT NULL, seal BLOB NOT NULL,
        PRIMARY KEY (job, first))""",
)
WRITE_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
INSERT = {
    "entries": "INTO entries VALUES (?, ?, ?, ?)",
    "steps": "INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    SNAPSHOTS: "INTO snapshots VALUES (?, ?, ?)",
}
RECORDS = ("entries", "steps")
_SELECT = {
    "entries": "SELECT seq, kind, data, seal FROM entries WHERE seq > ? AND seq <= ? ORDER BY seq",
    "steps": (
        "SELECT seq, job, round, step, outcome, loss, data, seal FROM steps WHERE seq > ? AND seq <= ? "
        "ORDER BY seq"
    ),
}
NEWEST = "SELECT max(seq) FROM (SELECT max(seq) AS seq FROM entries UNION ALL SELECT max(seq) FROM steps)"
IN_ORDER = (
    "SELECT seq, data FROM entries WHERE seq > ?1 UNION ALL SELECT seq, data FROM steps WHERE seq > ?1 "
    "ORDER BY seq"
)
_OF_THE_MACHINE = frozenset(
    {
        sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
    }
)  # fmt: skip


def create(database: sqlite3.Connection, meta: Mapping[str, str]) -> None:
    """The tables of a new journal, and what it says of itself besides its format."""
    for statement in _CREATE:
        database.execute(statement)
    database.execute("INSERT INTO meta VALUES ('format', ?)", (FORMAT,))
    database.executemany(WRITE_META, [(key, sealed(text)) for key, text in meta.items()])


def insert(database: sqlite3.Connection, row: Row, how: str = "INSERT") -> None:
    """Write ``row`` with its seal. ``how``: what SQL says where there is one with its number."""
    database.execute(f"{how} {INSERT[row[0]]}", (*row[1:], seal(row)))


def is_damage(error: sqlite3.Error) -> bool:
    """Whether it is the file's fault, and not that of a full disk, of its mode or of somebody who has it
    locked.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF not in _OF_THE_MACHINE


def is_broken(error: sqlite3.Error) -> bool:
    """Whether it says that the file is no sound database."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


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


def dropped_in(meta: Mapping[str, str]) -> int:
    """Up to which number steps may be missing that were kept for long enough."""
    found = meta.get(DROPPED, "")
    return int(found) if found.isdecimal() else 0


def format_of(path: Path) -> int | None:
    """What the file says of itself; None where it cannot be read."""
    try:
        with closing(sqlite3.connect(path)) as database:
            row = database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except (sqlite3.Error, UnicodeDecodeError):  # of a flipped bit in what SQLite says of itself
        return None
    return row[0] if row and isinstance(row[0], int) else None


@dataclass(slots=True)
class Table:
    """A database that is looked at: what it says of itself, and the first thing that is wrong with it.

    ``sealed``: whether its records have seals.
    """

    database: sqlite3.Connection
    sealed: bool = True
    meta: dict[str, str] = field(default_factory=dict)
    wrong: str = ""

    def check(self) -> None:
        """Have SQLite look at all of it."""
        with self.guarded():
            (verdict,) = self.database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict not in {b"ok", "ok"}:
                self.blame(verdict.decode(errors="replace") if isinstance(verdict, bytes) else str(verdict))

    def check_writing(self) -> None:
        """A header that forbids writing shows here."""
        with self.guarded():
            self.database.execute("BEGIN IMMEDIATE")
            self.database.execute("UPDATE meta SET value = value")
            self.database.execute("ROLLBACK")

    def read_meta(self, format_: int) -> None:
        """What it says of itself, as far as it is what was written."""
        with self.guarded():
            for key, value in self.database.execute("SELECT key, value FROM meta WHERE key != 'format'"):
                text = unsealed(value.decode(errors="replace") if isinstance(value, bytes) else value)
                if text:
                    self.meta[key.decode(errors="replace") if isinstance(key, bytes) else key] = text
                else:
                    self.blame("what it says of itself is not what was written")
            found = self.database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
            if found != (format_,):
                self.blame("the number of its format is not what was written")
            elif format_ >= NAMED and not names_in(self.meta):
                self.blame("its name is gone")

    def snapshots(self) -> Iterator[tuple[int, bytes]]:
        """Those that are what was written, the newest first."""
        with self.guarded():
            found = self.database.execute("SELECT seq, data, seal FROM snapshots ORDER BY seq DESC")
            for seq, data, seal_ in found:
                if isinstance(data, bytes) and seal(snapshot_row(seq, data)) == seal_:
                    yield seq, data
                else:
                    self.blame("a snapshot of the state is not what was written")

    def rows(self, after: int = 0, until: int = _LAST) -> Iterator[tuple[int, Row | None]]:
        """All records in the order of their numbers; None for one that is not what was written."""
        yield from heapq.merge(
            *(self._rows(name, after, until) for name in RECORDS), key=lambda each: each[0]
        )

    def _rows(self, name: str, after: int, until: int) -> Iterator[tuple[int, Row | None]]:
        query = _SELECT[name] if self.sealed else _SELECT[name].replace(", seal FROM", " FROM")
        with self.guarded():  # what comes after damage in this table cannot be read
            for found in self.database.execute(query, (after, until)):
                row = intact(name, found) if self.sealed else _unsealed_row(name, found)
                if row is None:
                    self.blame(f"a record of {name} is not what was written")
                yield found[0], row

    def blame(self, what: str) -> None:
        """Say ``what`` is wrong, unless something was before."""
        self.wrong = self.wrong or what

    def guarded(self) -> _Guard:
        """A block in which damage of the file is noted; all else is raised."""
        return _Guard(self)


@dataclass(slots=True)
class _Guard:
    table: Table

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, UnicodeDecodeError):  # of a flipped bit in what SQLite says of it
            self.table.blame("what it says of itself is not what was written")
            return True
        if isinstance(error, sqlite3.Error) and is_damage(error):
            self.table.blame(str(error))
            return True
        return False


def opened(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """The database as who looks for damage reads it."""
    where = f"{path.resolve().as_uri()}?mode=ro" if read_only else path.resolve().as_uri()
    database = sqlite3.connect(where, uri=True, isolation_level=None)
    database.text_factory = bytes  # a flipped bit makes a text of a blob, of the same bytes
    return database


def intact(table: str, columns: tuple[object, ...]) -> Row | None:
    """A row as it was sealed; None if it was not."""
    row = _unsealed_row(table, columns[:-1])
    if row is None or seal(row) == columns[-1]:
        return row
    # SQLite gives back 0.0 for -0.0, which an earlier version sealed.
    signed = (*row[:6], -0.0, *row[7:]) if table == "steps" and row[6] == 0.0 else row
    return signed if seal(signed) == columns[-1] else None


def _unsealed_row(table: str, columns: Iterable[object]) -> Row | None:
    *values, data = columns
    try:
        texts = [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError:
        return None
    row = (table, *texts, data)
    return row if isinstance(data, bytes) and isinstance(row[1], int) else None
