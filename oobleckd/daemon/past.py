"""The past on disk, for replay: snapshots and the changes between them, bounded in bytes and age.

Owns one SQLite file beside the journal, its writer thread, and what becomes of a disk that fails: what could
not be written is dropped, said once, and the next batch is tried again; a damaged or removed file is begun
anew. Nothing waits for it and nothing depends on it. Owns neither what a snapshot holds nor when there is one
(``recorder``).

Rows are compressed msgpack, but for changes, whose raw parts are JSON.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from oobleckd.core.samples import Sample
from oobleckd.core.schedules import sampled_view
from oobleckd.host.urgency import behind
from oobleckd.protocol.api import API_VERSION
from oobleckd.protocol.changes import Change
from oobleckd.protocol.jobviews import StepView
from oobleckd.protocol.text import shown_json
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.protocol.watch import Past, ScheduleView, Snapshot

FORMAT = 1
FILE = "past.sqlite"
DAMAGED = "past.sqlite.damaged"
MAX_CHANGES = 20_000
"""In one answer: what follows them is asked for next."""
# Compressed, a thousand nodes take some tens of kilobytes each half minute. Changes are JSON, since they
# carry raw JSON. (D-watching-007)
_LEVEL = 1  # of compression: a tenth of the bytes at 100 MB/s
_PRUNED = 0.9  # of the bound are left where it was reached, so that not every batch prunes
_PRUNE_EVERY_S = 60.0
_SAY_AGAIN_S = 600.0  # a disk that fails now and then is one event, not hundreds
_AT_ONCE = 32
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, first REAL NOT NULL, last REAL NOT NULL,
    bytes INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS rows_of_kind ON rows (kind, last);
CREATE INDEX IF NOT EXISTS rows_by_age ON rows (last);
"""
_log = logging.getLogger(__name__)

_changes_of = msgspec.json.Decoder(tuple[Change, ...]).decode

Shape = TypeVar("Shape")


class PastError(Exception):
    """There is nothing to show: what, and what to do about it."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class PastBatch:
    """What is written together; ``samples``: steps to be written op by op. ``reached`` resolves when it and
    all before it is written, or was dropped.
    """

    snapshot: Snapshot | None = None
    changes: Sequence[Change] = ()
    samples: Sequence[Sample] = ()
    reached: Future[None] | None = None


@dataclass(slots=True)
class _Row:
    kind: str
    first: float
    last: float
    data: bytes


@dataclass(slots=True)
class PastStore:
    """The file in ``folder``, of at most ``max_bytes`` and ``max_s`` seconds back.

    ``on_trouble`` is called from the writer thread with a sentence when writing starts to fail, and with ""
    when it works again. ``trouble`` is that sentence. Never raises, but ``read``.
    """

    folder: Path
    max_bytes: int
    max_s: float
    on_trouble: Callable[[str], None]
    trouble: str = ""
    num_errors: int = 0
    _waiting: list[PastBatch] = field(default_factory=list)
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _database: sqlite3.Connection | None = None
    _inode: int = 0
    _num_bytes: int = 0
    _pruned_at: float = 0.0
    _said: bool = False
    _silent_until: float = 0.0
    _thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / FILE

    def start(self) -> None:
        """Begin to write."""
        # A file of its own that nobody waits for: the journal is what decisions rest on, and a picture of
        # the past must not be able to fill, slow or damage it. (D-watching-006)
        self._thread = threading.Thread(target=behind(self._run), name="past", daemon=True)
        self._thread.start()

    def put(self, batch: PastBatch) -> None:
        """Have ``batch`` written soon, from any thread. Where the disk is much too slow the oldest that wait
        are dropped.
        """
        with self._condition:
            if self._closing:
                if batch.reached is not None:
                    _resolve(batch.reached)
                return
            self._waiting.append(batch)
            if len(self._waiting) > _AT_ONCE:
                self._drop_oldest()
            self._condition.notify()

    def reached(self) -> Future[None]:
        """Resolves when all that was put before is written, or dropped."""
        mark: Future[None] = Future()
        self.put(PastBatch(reached=mark))
        return mark

    def close(self) -> None:
        """Write what waits, once, and end."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _drop_oldest(self) -> None:
        at = next((i for i, batch in enumerate(self._waiting) if batch.reached is None), None)
        if at is not None:
            del self._waiting[at]

    # ------------------------------------------------------------------- reading, from any thread

    def read(self, at: float, span_s: float) -> Past:
        """As of ``read_past``, here and now."""
        return read_past(self.path, at, span_s)

    # ------------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing)
                batches, self._waiting = self._waiting, []
            if not batches:
                break
            self._write(batches)
        self._forget()

    def _write(self, batches: Sequence[PastBatch]) -> None:
        try:
            self._transact([row for batch in batches for row in _rows(batch)])
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
        except Exception:  # noqa: BLE001 - the thread's boundary: who waits for a mark must get it
            _log.exception("replay: %d batches are lost", len(batches))
        else:
            self._succeeded()
        for batch in batches:
            if batch.reached is not None:
                _resolve(batch.reached)

    def _transact(self, rows: Sequence[_Row]) -> None:
        if not rows:
            return
        database = self._opened()
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(
                "INSERT INTO rows (kind, first, last, bytes, data) VALUES (?, ?, ?, ?, ?)",
                [(row.kind, row.first, row.last, len(row.data), row.data) for row in rows],
            )
            self._num_bytes += sum(len(row.data) for row in rows)
            self._prune(database, max(row.last for row in rows))

    def _prune(self, database: sqlite3.Connection, now: float) -> None:
        """Rows that are too old, and the oldest of too many. Pages that they leave are used again, so the
        file stays as it is.
        """
        if self._num_bytes <= self.max_bytes and abs(now - self._pruned_at) < _PRUNE_EVERY_S:
            return
        self._pruned_at = now
        (cut,) = database.execute("SELECT max(id) FROM rows WHERE last < ?", (now - self.max_s,)).fetchone()
        over = self._num_bytes - _PRUNED * self.max_bytes
        if self._num_bytes > self.max_bytes:
            for row, size in database.execute("SELECT id, bytes FROM rows ORDER BY id"):
                cut, over = max(row, cut or 0), over - size
                if over <= 0:
                    break
        if cut is not None:
            database.execute("DELETE FROM rows WHERE id <= ?", (cut,))
            self._num_bytes = _bytes_in(database)

    def _opened(self) -> sqlite3.Connection:
        """The file, made where it is not there any more, and set aside where it cannot be used. Raises
        OSError, sqlite3.Error.
        """
        if self._database is not None and not self._in_place():
            self._forget()
        if self._database is None:
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            try:
                self._database = _open(self.path)
            except sqlite3.OperationalError:
                raise  # the disk's trouble, and not the file's
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
                self._database = _open(self.path)
            self._inode = self.path.stat().st_ino
            self._num_bytes = _bytes_in(self._database)
        return self._database

    def _in_place(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _set_aside(self, error: Exception) -> None:
        _log.warning("%s cannot be used: %s; it is begun anew, and kept as %s", self.path, error, DAMAGED)
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(self.folder / DAMAGED)
        for more in ("-wal", "-shm"):
            self.path.with_name(FILE + more).unlink(missing_ok=True)

    def _forget(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):  # of a file that is damaged or gone
                database.close()

    def _failed(self, error: sqlite3.Error | OSError) -> None:
        self.num_errors += 1
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        self._forget()
        if damaged:
            with contextlib.suppress(OSError):  # the next batch finds out
                self._set_aside(error)
        if not self.trouble:
            self.trouble = f"the past in {self.path} cannot be written: {error}; replay has a gap"
            _log.warning("%s", self.trouble)
            if time.monotonic() >= self._silent_until:
                self._silent_until, self._said = time.monotonic() + _SAY_AGAIN_S, True
                self.on_trouble(self.trouble)

    def _succeeded(self) -> None:
        if self.trouble:
            self.trouble = ""
            if self._said:
                self._said = False
                self.on_trouble("")


def _resolve(mark: Future[None]) -> None:
    if mark.set_running_or_notify_cancel():  # who waited may have gone
        mark.set_result(None)


def _rows(batch: PastBatch) -> Iterator[_Row]:
    if batch.changes:
        times = [change.at for change in batch.changes]
        yield _Row(
            "changes", min(times), max(times), zlib.compress(msgspec.json.encode(batch.changes), _LEVEL)
        )
    for schedule in map(sampled_view, batch.samples):
        yield _Row("schedule", schedule.at, schedule.at + schedule.span_s, _packed(schedule))
    if batch.snapshot is not None:
        yield _Row("snapshot", batch.snapshot.at, batch.snapshot.at, _packed(batch.snapshot))


def _packed(value: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value), _LEVEL)


def _unpacked(data: bytes, shape: type[Shape]) -> Shape:
    return msgspec.msgpack.decode(zlib.decompress(data), type=shape)


def _bytes_in(database: sqlite3.Connection) -> int:
    (total,) = database.execute("SELECT total(bytes) FROM rows").fetchone()
    return int(total)


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))
    database = sqlite3.connect(path, isolation_level=None, timeout=1.0)
    try:
        _prepare(database)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection) -> None:
    """Make the tables where they are missing. Raises sqlite3.DatabaseError where they are another
    version's.
    """
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(_SCHEMA)
    database.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (FORMAT,))
    (found,) = database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if found != FORMAT:
        raise sqlite3.DatabaseError(f"it has format {found}, this version writes {FORMAT}")


# --------------------------------------------------------------------------- reading


def read_past(path: Path, at: float, span_s: float) -> Past:
    """The last snapshot before ``at`` and what follows it for ``span_s`` seconds from ``at`` on. Raises
    PastError.
    """
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=1.0)) as database:
            return _read(database, at, at + span_s)
    except (sqlite3.Error, OSError, zlib.error, *UNREADABLE) as error:
        raise PastError(
            f"the past in {path} cannot be read: {problem_of(error)}",
            "it is begun anew by itself; ask again later",
        ) from error


class PastText(NamedTuple):
    """A ``Past`` as JSON, up to the steps, and what is needed to add these: ``job`` was active and had
    ``step`` steps, and the snapshot is of ``at`` and ``seq``.
    """

    begins: float
    at: float
    seq: int
    job: str
    step: int
    data: bytes

    def whole(self, steps: Sequence[StepView], before: Sequence[Change]) -> bytes:
        """The JSON of all."""
        rest = msgspec.json.encode({"steps": steps, "before": before, "apiVersion": API_VERSION})
        return b"%s,%s" % (self.data[:-1], rest[1:])


def past_text(path: Path, at: float, span_s: float) -> PastText:
    """The same, written out. Raises PastError."""
    past = read_past(path, at, span_s)
    snapshot = past.snapshot
    deployed = [job for job in snapshot.jobs if job.pipelines]
    shown = next(iter(deployed or snapshot.jobs[-1:]), None)
    parts = {name: getattr(past, name) for name in ("begins", "until", "snapshot", "changes", "schedules")}
    return PastText(
        past.begins,
        snapshot.at,
        snapshot.seq,
        shown.id if shown is not None else "",
        shown.step if shown is not None else 0,
        shown_json(msgspec.json.encode(parts)),
    )


def _read(database: sqlite3.Connection, at: float, until: float) -> Past:
    begins, newest = database.execute(
        "SELECT min(last), max(last) FROM rows WHERE kind = 'snapshot'"
    ).fetchone()
    if begins is None:
        raise PastError("nothing is recorded yet", "the first snapshot comes within a minute of the start")
    (data,) = database.execute(
        "SELECT data FROM rows WHERE kind = 'snapshot' AND last <= ? ORDER BY last DESC, id DESC LIMIT 1",
        (max(at, begins),),
    ).fetchone()
    snapshot = _unpacked(data, Snapshot)
    (written,) = database.execute("SELECT max(last) FROM rows").fetchone()
    until = min(max(until, snapshot.at), max(written, newest))
    changes = _changes(database, snapshot, until)
    if len(changes) == MAX_CHANGES:
        until = changes[-1].at
    return Past(begins, until, snapshot, changes, _schedules(database, snapshot.at, until))


def _changes(database: sqlite3.Connection, snapshot: Snapshot, until: float) -> tuple[Change, ...]:
    """What follows ``snapshot``; notices of the shell have no number of their own and are told by
    their time.
    """
    found: list[Change] = []
    for (data,) in database.execute(
        "SELECT data FROM rows WHERE kind = 'changes' AND last >= ? AND first <= ? ORDER BY id",
        (snapshot.at, until),
    ):
        for change in _changes_of(zlib.decompress(data)):
            follows = change.at >= snapshot.at if change.kind == "daemon" else change.seq > snapshot.seq
            if follows and change.at <= until and len(found) < MAX_CHANGES:
                found.append(change)
    return tuple(found)


def _schedules(database: sqlite3.Connection, since: float, until: float) -> tuple[ScheduleView, ...]:
    """Those from ``since`` on, and the last one before it."""
    before = database.execute(
        "SELECT data FROM rows WHERE kind = 'schedule' AND last < ? ORDER BY last DESC LIMIT 1", (since,)
    ).fetchall()
    rows = database.execute(
        "SELECT data FROM rows WHERE kind = 'schedule' AND last >= ? AND first <= ? ORDER BY first",
        (since, until),
    ).fetchall()
    return tuple(_unpacked(data, ScheduleView) for (data,) in (*before, *rows))
