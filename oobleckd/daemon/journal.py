"""The journal: what the core has decided, durable in one SQLite file (WAL) before anybody is told.

Owns the state folder's lock, the file, its one writer thread, and the behaviour on a disk that fails: the
thread keeps what it could not write, says so once, tries again until it succeeds, and no future resolves
before its entries are on disk. Every record has a seal (``records``) and is in a second set of files once
more (``segments``), by which what has changed since is found and mended, at the start (``mend``) and while
the daemon works (``verify``). From time to time it is given the state that all records so far come to, and a
start reads the newest of these snapshots and what came after it. Owns no meaning: entries are tagged structs
of ``core.entries``, a snapshot is ``core.snapshot``'s. Steps have a table with columns of their own, so that
they are read by range (``steprows``), and curves of them (``curves``).

Errors::

    JournalError          the file cannot be opened or read
    ├── JournalLocked     another daemon has the state folder
    └── JournalClosed     closed before the entries could be written
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import math
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.daemon.bins import Bins
from oobleckd.daemon.curves import CurveQuestion
from oobleckd.daemon.mend import CHECK, Decode, Ground, OtherFormat, mend
from oobleckd.daemon.records import Row, format_row, sealed, snapshot_row
from oobleckd.daemon.segments import RecordCopy
from oobleckd.daemon.steprows import StepRows
from oobleckd.daemon.tables import (
    DROPPED,
    FORMAT,
    IN_ORDER,
    KEPT_SNAPSHOTS,
    OLDER,
    WRITE_META,
    insert,
    is_broken,
    named,
    names_in,
    new_name,
)
from oobleckd.host.urgency import as_urgent
from oobleckd.protocol.jobviews import CurveBin
from oobleckd.protocol.unreadable import UNREADABLE

_PLACE = "place"
_LEAST_BYTES = 256 * 1024  # of a journal with nothing in it: the file, its log and the log's index
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_OLDER_SNAPSHOTS = (
    "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)"
)
_DELETE = ("DELETE FROM entries WHERE seq = ?", "DELETE FROM steps WHERE seq = ?")
_AT_ONCE = 500  # records that are written or removed in one turn beside those that somebody waits for
_log = logging.getLogger(__name__)


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
class Start:
    """What a daemon starts from: the state in the newest snapshot (None: there is none that can be read), and
    the entries after it, which may be had once.
    """

    state: Any
    entries: Iterable[Any]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one transaction, and who waits for it."""

    rows: tuple[Row, ...]
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _State:
    """A snapshot of the state after record ``seq``."""

    seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Work:
    """Something else that the writer thread does between records: ``act`` says whether it is done, or is to
    have another turn.
    """

    act: Callable[[], bool]
    done: Future[None]


class Journal:
    """The journal of one state folder, opened and locked by the constructor.

    ``step_of`` gives the columns of an entry that is a step, None for all others. ``on_trouble`` is called
    from the writer thread with a sentence when writing starts to fail, and with "" when it works again.
    ``decode`` gives the state in a snapshot, None where it cannot be read. ``num_read``: records that were
    read at the start, in both files. Raises JournalError, JournalLocked.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step_of: Callable[[msgspec.Struct], StepRow | None],
        on_trouble: Callable[[str], None],
        decode: Decode = lambda _data: None,
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
            self._ground = ground = mend(self.path, self.path.with_suffix(".copy"), decode)
            self.damage, self.num_read = ground.damage, ground.num_rows
            self._meta, self._dropped = ground.meta, ground.dropped
            self._database = _open(self.path)
            self._copy = RecordCopy(self.path.with_suffix(".copy"), self._head(), ground.first)
            self._next_seq = ground.newest + 1
            self._kept_seq = ground.seq
            self._inode = self.path.stat().st_ino
        except (OSError, sqlite3.Error, OtherFormat) as error:
            os.close(self._lock_fd)
            raise _unusable(self.path, error) from error
        self._rows = StepRows(self.path)
        self._bins = Bins()
        self._condition = threading.Condition()
        self._waiting: list[_Batch | _State | _Work] = []
        self._closing = False
        self._thread = threading.Thread(target=as_urgent(self._run), name="journal", daemon=True)
        self._thread.start()

    def start(self, kind: Any) -> Start:
        """What a daemon starts from, entries decoded as the union ``kind``. Once, before anything is
        appended. Raises JournalError, as the entries do.
        """
        ground, self._ground = self._ground, Ground()
        if not ground.seq:
            return Start(None, self._entries(kind, 0))
        decode = msgspec.msgpack.Decoder(kind).decode
        try:
            return Start(ground.state, [decode(row[-1]) for row in ground.rows])
        except UNREADABLE as error:
            raise _unusable(self.path, error) from error

    def read(self, kind: Any) -> list[Any]:
        """All entries on disk in order, decoded as the union ``kind``. Raises JournalError."""
        return [*self._entries(kind, 0)]

    def _entries(self, kind: Any, after: int) -> Iterator[Any]:
        decode = msgspec.msgpack.Decoder(kind).decode
        try:
            with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as database:
                database.text_factory = bytes  # a flipped bit makes a text of a blob, of the same bytes
                for _, data in database.execute(IN_ORDER, (after,)):
                    yield decode(data)
        except (sqlite3.Error, *UNREADABLE) as error:
            raise _unusable(self.path, error) from error

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        """Entries of steps that are on disk, as ``StepRows.steps`` says: by any thread."""
        return self._rows.steps(job, first, last, limit)

    def evaluations(self, job: str, steps: Sequence[int]) -> list[bytes]:
        """Entries of evaluations, as ``StepRows.evaluations``."""
        return self._rows.evaluations(job, steps)

    def newest_steps(self, limit: int) -> list[bytes]:
        """The last entries of steps of all jobs that are on disk, in order."""
        return self._rows.newest(limit)

    def curve(self, question: CurveQuestion) -> list[CurveBin]:
        """The curve that is asked for: by any thread. Bins that were made from rows are stored, unasked."""
        found = self._rows.curve(question)
        left = iter(found.renewed)

        def act() -> bool:
            made = [*itertools.islice(left, _AT_ONCE)]
            self._bins.renew(self._database, question.job, made)
            return len(made) < _AT_ONCE

        if found.renewed:
            self._asked(act)
        return found.bins

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
        self._copy.append([self._head()])

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

    def _head(self) -> Row:
        return format_row(FORMAT, self.names, self._dropped)

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
        """Keep ``data``, a snapshot of the state that all entries appended so far come to. From any thread;
        nobody waits for it, and a disk that does not take it has the one before.
        """
        with self._condition:
            if self._closing or self._next_seq - 1 <= self._kept_seq:
                return
            self._kept_seq = self._next_seq - 1
            self._waiting.append(_State(self._kept_seq, data))
            self._condition.notify()

    @property
    def closed_until(self) -> int:
        """Up to which number records are in closed files of the copy, which ``verify`` looks at."""
        return self._copy.first - 1

    def restore(self, rows: Sequence[Row]) -> Future[None]:
        """Write old ``rows`` anew, which are not what was written any more; as they were in the copy."""
        left = deque(rows)

        def act() -> bool:
            for row in [left.popleft() for _ in range(min(len(left), _AT_ONCE))]:
                for delete in _DELETE:
                    self._database.execute(delete, (row[1],))
                insert(self._database, row)
            return not left

        return self._asked(act)

    def drop_steps(self, jobs: Sequence[str]) -> Future[None]:
        """Forget the steps of ``jobs``, which are over, but for the last record of each: that says where it
        ended. What is needed where the newest snapshot is damaged stays. Reads the file before it returns.
        """
        left = itertools.chain.from_iterable([self._rows.droppable(job) for job in jobs])

        def act() -> bool:
            seqs = [*itertools.islice(left, _AT_ONCE)]
            if seqs:
                self._dropped = max(self._dropped, *seqs)
                self._meta[DROPPED] = str(self._dropped)
                self._database.execute(WRITE_META, (DROPPED, sealed(self._meta[DROPPED])))
                self._database.executemany(_DELETE[1], [(seq,) for seq in seqs])
            return len(seqs) < _AT_ONCE

        return self._asked(act)

    def _asked(self, act: Callable[[], bool]) -> Future[None]:
        work = _Work(act, Future())
        self._put(work)
        return work.done

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
        loss = None if math.isnan(step.loss) else step.loss + 0.0  # -0.0 would come back as another number
        return "steps", seq, step.job, step.round, step.step, step.outcome, loss, data

    # ------------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing)
                batches, self._waiting = self._waiting, []
            if not batches:
                return
            # What gathered is one transaction, but for a snapshot: that is of what was written before it.
            for _, group in itertools.groupby(batches, type):
                same = [*group]
                self._write([each for each in same if isinstance(each, _Batch)])
                self._keep_states([each for each in same if isinstance(each, _State)])
                self._work([each for each in same if isinstance(each, _Work)])

    def _write(self, batches: list[_Batch]) -> None:
        """Write all that has gathered in one transaction, and try until it is on disk."""
        attempt = 0
        while batches:
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
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for batch in batches:
                    for row in batch.rows:
                        insert(self._database, row)
                        self._bins.add(self._database, row)
                self._bins.flush(self._database)
        except BaseException:
            self._bins.forget()
            raise
        # Not synced: a second sync would double the wait after a failure, and power loss is what the first
        # file is synced against. The copy is for bits that flip, which SQLite does not find. (D-daemon-008)
        self._copy.append(row for batch in batches for row in batch.rows)

    def _keep_states(self, states: list[_State]) -> None:
        """Keep the newest of ``states``, and begin a new file of the copy with it."""
        if not states:
            return
        newest = states[-1]
        row = snapshot_row(newest.seq, newest.data)
        try:
            self._check_in_place()
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                insert(self._database, row, "INSERT OR REPLACE")
                self._database.execute(_OLDER_SNAPSHOTS, (KEPT_SNAPSHOTS,))
        except sqlite3.Error as error:
            # It is never the only truth: the records are, and what is read at a start is more by these.
            _log.warning("no snapshot of the state after record %d: %s", newest.seq, error)
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            return
        self._copy.cut(newest.seq, [self._head(), row])

    def _work(self, works: list[_Work]) -> None:
        for work in works:
            try:
                self._check_in_place()
                with self._database:
                    self._database.execute("BEGIN IMMEDIATE")
                    done = work.act()
            except (sqlite3.Error, OSError) as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                work.done.set_exception(error)
                continue
            if done:
                work.done.set_result(None)
            else:
                self._put(work)

    def _put(self, work: _Work) -> None:
        """Behind all that waits: records come first."""
        with self._condition:
            if self._closing:
                work.done.set_exception(JournalClosed("the journal is closed"))
                return
            self._waiting.append(work)
            self._condition.notify()

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
            if is_broken(error):  # a start looks at all of it, and makes a new file
                with suppress(OSError):
                    self.path.with_name(CHECK).touch()
                self.trouble += "; restart the daemon, and it is mended from its copy"
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


def _open(path: Path) -> sqlite3.Connection:
    # The constructor's thread opens it; from then on the writer thread has it, until it has ended.
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    # FULL: in WAL mode the log is synced at every commit, which is the promise of ``append``.
    database.execute("PRAGMA synchronous = FULL")
    return database


def _unusable(path: Path, error: Exception) -> JournalError:
    if isinstance(error, OtherFormat):
        others = f"{', '.join(map(str, OLDER[:-1]))} and {OLDER[-1]}"
        return JournalError(
            f"{path} has format {error.found}, this version reads {FORMAT}, {others}",
            "use the version of oobleckd that wrote it, or another state folder",
        )
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
