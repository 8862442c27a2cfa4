"""The journal: what the core has decided, durable in one SQLite file (WAL) before anybody is told.

Owns the state folder's lock, the file, its one writer thread, the way from older formats, and the behaviour
on a disk that fails: the thread keeps what it could not write, says so once, tries again until it succeeds,
and no future resolves before its entries are on disk. Every record has a seal and is in a second file once
more (``records``), by which what has changed since is found and mended at the start (``mend``). Owns no
meaning: entries are tagged structs of ``core.entries``. Steps have a table with columns of their own, so that
curves are cheap to query.

Errors::

    JournalError          the file cannot be opened or read
    ├── JournalLocked     another daemon has the state folder
    └── JournalClosed     closed before the entries could be written
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.daemon.mend import (
    INSERT,
    WRITE_META,
    mend,
    named,
    names_in,
    new_name,
    write_copy,
    write_database,
)
from oobleckd.daemon.records import RecordCopy, Row, format_row, seal, sealed, unsealed
from oobleckd.host.durable import sync_file
from oobleckd.host.urgency import as_urgent
from oobleckd.protocol.api import CurveBin
from oobleckd.protocol.unreadable import UNREADABLE

FORMAT = 5
_OLDER = (4, 3)
_PLACE = "place"
_LEAST_BYTES = 256 * 1024  # of a journal with nothing in it: the file, its log and the log's index
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_log = logging.getLogger(__name__)

_IN_ORDER = "SELECT seq, data FROM entries UNION ALL SELECT seq, data FROM steps ORDER BY seq"
_STEPS = (
    "SELECT data, max(seq) FROM steps WHERE job = ? AND step BETWEEN ? AND ? AND outcome != 'repeated' "
    "GROUP BY step ORDER BY step LIMIT ?"
)
_NEWEST = "SELECT max(seq) FROM (SELECT max(seq) AS seq FROM entries UNION ALL SELECT max(seq) FROM steps)"


class JournalError(Exception):
    """The journal cannot be used. ``hint`` says what to do next."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class JournalLocked(JournalError):
    """Another daemon works on this state folder."""


class JournalClosed(JournalError):
    """Closed while entries could not be written; nobody was told that they were."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """Columns of one committed round in the table of steps. A loss that is NaN becomes NULL there."""

    job: str
    round: int
    step: int
    outcome: str
    loss: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one transaction, and who waits for it."""

    rows: tuple[Row, ...]
    done: Future[None]


class Journal:
    """The journal of one state folder, opened and locked by the constructor.

    ``step_of`` gives the columns of an entry that is a step, None for all others. ``on_trouble`` is called
    from the writer thread with a sentence when writing starts to fail, and with "" when it works again.
    Raises JournalError, JournalLocked.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step_of: Callable[[msgspec.Struct], StepRow | None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self.path = folder.resolve() / "journal.sqlite"
        self.num_errors = 0
        self.trouble = ""
        self._step_of = step_of
        self._on_trouble = on_trouble
        try:
            self._lock_fd = _lock(folder)
        except OSError as error:
            if _is_full(folder, error):
                raise _unusable(self.path, error) from error
            raise
        try:
            copy = self.path.with_suffix(".copy")
            self.damage = mend(self.path, copy, FORMAT)
            self._database = _open(self.path, copy)
            self._meta = _meta_of(self._database)
            self._copy = RecordCopy(copy, FORMAT, self.names)
            self._next_seq = int(self._database.execute(_NEWEST).fetchone()[0] or 0) + 1
            self._inode = self.path.stat().st_ino
        except (OSError, sqlite3.Error, JournalError) as error:
            os.close(self._lock_fd)
            raise _unusable(self.path, error) from error
        self._condition = threading.Condition()
        self._waiting: list[_Batch] = []
        self._closing = False
        self._thread = threading.Thread(target=as_urgent(self._run), name="journal", daemon=True)
        self._thread.start()

    def read(self, kind: Any) -> list[Any]:
        """All entries on disk in order, decoded as the union ``kind``. Raises JournalError."""
        decoder = msgspec.msgpack.Decoder(kind)
        try:
            with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as database:
                database.text_factory = bytes  # a flipped bit makes a text of a blob, of the same bytes
                return [decoder.decode(data) for _, data in database.execute(_IN_ORDER)]
        except (sqlite3.Error, *UNREADABLE) as error:
            raise _unusable(self.path, error) from error

    @property
    def names(self) -> tuple[str, ...]:
        """What this journal is known by where its jobs have written, the present name first: random, and
        nobody else's.
        """
        return names_in(self._meta)

    @property
    def place(self) -> str:
        """What was last kept by ``settle``; "" where nothing was."""
        return self._meta.get(_PLACE, "")

    def settle(self, place: str) -> None:
        """Keep ``place``, which says where this journal lies. Before anything is appended. Raises
        JournalError.
        """
        if place != self.place:
            self._keep({_PLACE: place})

    def rename(self) -> None:
        """Give it a new name, as another journal may go on under the one that it has. Before anything is
        appended. Raises JournalError.
        """
        # With the old name kept, two daemons would share folders again as soon as somebody adopts a copy of
        # one that still runs. (D-checkpoints-015)
        self._keep(named((new_name(), *self.names)))
        self._copy.append([format_row(FORMAT, self.names)])

    def _keep(self, meta: dict[str, str]) -> None:
        try:
            with closing(sqlite3.connect(self.path)) as database, database:
                database.execute("PRAGMA synchronous = FULL")
                database.executemany(WRITE_META, [(key, sealed(text)) for key, text in meta.items()])
        except sqlite3.Error as error:
            raise JournalError(
                f"the journal {self.path} cannot be written: {error}", "is there space on its disk?"
            ) from error
        self._meta |= meta

    def append(self, entries: Sequence[msgspec.Struct]) -> Future[None]:
        """Write ``entries`` in one transaction, from any thread; the future resolves when they are on disk.

        It fails with JournalClosed alone, when ``close`` comes while the disk fails.
        """
        done: Future[None] = Future()
        with self._condition:
            if self._closing:
                raise JournalClosed("the journal is closed")
            rows = tuple(self._row(self._next_seq + i, entry) for i, entry in enumerate(entries))
            self._next_seq += len(rows)
            self._waiting.append(_Batch(rows, done))
            self._condition.notify()
        return done

    def keep_state(self, data: bytes) -> None:
        """Keep a snapshot of the state after all entries that were appended."""

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        """Entries of steps ``first`` to ``last`` of ``job``, so many at most, in order: of each the newest.
        For any thread.
        """
        with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as database:
            database.text_factory = bytes
            return [data for data, _ in database.execute(_STEPS, (job, first, last, limit))]

    def curve(self, job: str, until: int, num_bins: int) -> list[CurveBin]:  # noqa: ARG002
        """Steps of ``job`` before ``until``, in so many bins at most. For any thread."""
        return []

    def close(self) -> None:
        """Write what waits (one last try on a failing disk) and give the state folder free."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        self._database.close()
        self._copy.close()
        os.close(self._lock_fd)

    def _row(self, seq: int, entry: msgspec.Struct) -> Row:
        data = msgspec.msgpack.encode(entry)
        step = self._step_of(entry)
        if step is None:
            return "entries", seq, type(entry).__name__, data
        loss = None if math.isnan(step.loss) else step.loss
        return "steps", seq, step.job, step.round, step.step, step.outcome, loss, data

    # ------------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing)
                batches, self._waiting = self._waiting, []
            if not batches:
                return
            self._write(batches)

    def _write(self, batches: list[_Batch]) -> None:
        """Write all that has gathered in one transaction, and try until it is on disk."""
        attempt = 0
        while True:
            # Asked before the attempt: the one that follows "closing" is the last.
            last = self._closing
            try:
                self._transact(batches)
            except sqlite3.Error as error:
                self._failed(error)
                if last:
                    gone = JournalClosed(f"the journal was closed while it could not be written: {error}")
                    for batch in batches:
                        batch.done.set_exception(gone)
                    return
                self._pause(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                attempt += 1
            else:
                self._succeeded()
                for batch in batches:
                    batch.done.set_result(None)
                return

    def _transact(self, batches: list[_Batch]) -> None:
        self._check_in_place()
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")  # the last attempt failed even in this
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            for batch in batches:
                for row in batch.rows:
                    self._database.execute(INSERT[row[0]], (*row[1:], seal(row)))
        # Not synced: a second sync would double the wait after a failure, and power loss is what the first
        # file is synced against. The copy is for bits that flip, which SQLite does not find. (D-daemon-008)
        self._copy.append(row for batch in batches for row in batch.rows)

    def _check_in_place(self) -> None:
        """A file that was removed under us still takes writes, and nobody would ever read them."""
        try:
            found = self.path.stat().st_ino
        except OSError as error:
            raise sqlite3.OperationalError(f"it was removed while in use: {error}") from error
        if found != self._inode:
            raise sqlite3.OperationalError("another file was put in its place while in use")

    def _failed(self, error: sqlite3.Error) -> None:
        self.num_errors += 1
        if not self.trouble:
            self.trouble = f"the journal {self.path} cannot be written: {error}"
            _log.error("%s; nothing is acknowledged until it can", self.trouble)
            self._on_trouble(self.trouble)

    def _succeeded(self) -> None:
        if self.trouble:
            self.trouble = ""
            _log.warning("the journal %s can be written again; nothing was lost", self.path)
            self._on_trouble("")

    def _pause(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._closing, seconds)


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise JournalError(
            f"the state folder {folder} cannot be used: {error}", "name another with --state-dir"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise JournalLocked(
            f"another oobleckd (pid {holder}) works on {folder}",
            "stop that one first, or name another folder with --state-dir",
        ) from error
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _open(path: Path, copy: Path) -> sqlite3.Connection:
    if not path.exists():
        write_database(path, [], FORMAT, named((new_name(),)))
    _upgrade(path, copy)
    # The constructor's thread opens it; from then on the writer thread has it, until it has ended.
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    # FULL: in WAL mode the log is synced at every commit, which is the promise of ``append``.
    database.execute("PRAGMA synchronous = FULL")
    return database


def _meta_of(database: sqlite3.Connection) -> dict[str, str]:
    """What the journal says of itself, as far as it is what was written."""
    found = database.execute("SELECT key, value FROM meta WHERE key != 'format'").fetchall()
    return {key: text for key, value in found if (text := unsealed(value))}


def _upgrade(path: Path, copy: Path) -> None:
    """Bring a journal of an older format to the present one; the old file stays beside it. Raises
    JournalError for any other.

    Format 3 had no seals, and 4 no name.
    """
    with closing(sqlite3.connect(path)) as database:
        (found,) = database.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if found == FORMAT:
            return
        if found not in _OLDER:
            raise JournalError(
                f"{path} has format {found}, this version reads {FORMAT}, {' and '.join(map(str, _OLDER))}",
                "use the version of oobleckd that wrote it, or another state folder",
            )
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        entries = database.execute("SELECT 'entries', seq, kind, data FROM entries").fetchall()
        steps = database.execute(
            "SELECT 'steps', seq, job, round, step, outcome, loss, data FROM steps"
        ).fetchall()
        meta = _meta_of(database)
    before = path.with_name(f"{path.name}.format-{found}")
    shutil.copyfile(path, before)
    sync_file(before)
    rows = sorted([*entries, *steps], key=lambda row: int(row[1]))
    names = names_in(meta) or (new_name(),)
    write_database(path, rows, FORMAT, named(names))
    write_copy(copy, rows, FORMAT, names)
    _log.warning("%s was brought from format %d to %d; as it was it is %s", path, found, FORMAT, before)


def _unusable(path: Path, error: Exception) -> JournalError:
    if isinstance(error, JournalError):
        return error
    if _is_full(path.parent, error):
        hint = "make room on that file system (`df -h`, `df -i`), and start again: nothing is lost"
        return JournalError(f"there is no room for the journal {path}: {error}", hint)
    return JournalError(
        f"the journal {path} cannot be read: {error}",
        "restore it from a copy, or start with another state folder",
    )


def _is_full(folder: Path, error: Exception) -> bool:
    """Whether ``error`` comes of a disk that is full: SQLite says that of its files by a dozen codes."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    if not isinstance(error, sqlite3.OperationalError):
        return False
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return True
    try:
        left = os.statvfs(folder)
    except OSError:
        return False
    return left.f_bavail * left.f_frsize < _LEAST_BYTES
