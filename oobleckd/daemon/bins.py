"""Curves of whole runs: bins of a thousand steps, kept as these are written.

Owns the table of bins, what is in one, and that it says what the steps of the history that goes on say. All
of it is derived: a bin that is missing or damaged is made anew from the rows of its steps. Bins outlive
those.
"""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass

import msgspec

from oobleckd.daemon.records import Row, seal
from oobleckd.protocol.api import CurveBin

WIDTH = 1000
_FEW = 10_000  # steps: as many are read one by one
_STORED = "bins"
_nan = math.nan


class _Measured(msgspec.Struct):
    """What is drawn of a record of a step."""

    loss: float = _nan
    step_s: float = _nan
    lr: float = _nan
    grad_norm: float = _nan


_measured = msgspec.msgpack.Decoder(_Measured).decode


class Spread(msgspec.Struct, array_like=True):
    """Of the values that are finite."""

    num: int = 0
    least: float = math.inf
    most: float = -math.inf
    sum: float = 0.0

    def add(self, value: float) -> None:
        """One more."""
        if math.isfinite(value):
            self.num += 1
            self.least, self.most, self.sum = min(self.least, value), max(self.most, value), self.sum + value

    def join(self, other: Spread) -> None:
        """All of the other's."""
        self.num += other.num
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.sum += other.sum

    @property
    def mean(self) -> float | None:
        """None where there is none."""
        return self.sum / self.num if self.num else None

    @property
    def min(self) -> float | None:
        """None where there is none."""
        return self.least if self.num else None

    @property
    def max(self) -> float | None:
        """None where there is none."""
        return self.most if self.num else None


class Bin(msgspec.Struct, array_like=True):
    """Steps ``first`` to ``last`` of a job, of which ``count`` are known."""

    first: int
    last: int = -1
    count: int = 0
    skipped: int = 0
    loss: Spread = msgspec.field(default_factory=Spread)
    step_s: Spread = msgspec.field(default_factory=Spread)
    grad_norm: Spread = msgspec.field(default_factory=Spread)
    lr: float = 0.0

    def add(self, step: int, outcome: str, data: bytes) -> None:
        """One more step, which comes after all in it."""
        told = _measured(data)
        self.last, self.count = step, self.count + 1
        self.skipped += outcome == "skipped"
        self.loss.add(told.loss)
        self.step_s.add(told.step_s)
        self.grad_norm.add(told.grad_norm)
        self.lr = told.lr if math.isfinite(told.lr) else self.lr

    def join(self, later: Bin) -> None:
        """The steps of a later one, too."""
        self.last, self.count, self.skipped = (
            later.last,
            self.count + later.count,
            self.skipped + later.skipped,
        )
        for mine, other in (
            (self.loss, later.loss), (self.step_s, later.step_s), (self.grad_norm, later.grad_norm)
        ):  # fmt: skip
            mine.join(other)
        self.lr = later.lr

    def shown(self) -> CurveBin:
        """For the API, which counts steps from 1."""
        return CurveBin(
            first=self.first + 1,
            last=self.last + 1,
            count=self.count,
            skipped=self.skipped,
            loss_min=self.loss.min,
            loss_mean=self.loss.mean,
            loss_max=self.loss.max,
            step_s_min=self.step_s.min or 0.0,
            step_s_mean=self.step_s.mean or 0.0,
            step_s_max=self.step_s.max or 0.0,
            lr=self.lr,
            grad_norm=self.grad_norm.mean,
        )


_bin_of = msgspec.msgpack.Decoder(Bin).decode


@dataclass(slots=True)
class Bins:
    """The table, for who writes the steps. ``add`` each in its transaction, ``flush`` before the commit;
    ``forget`` where that failed.
    """

    _open: dict[str, Bin]
    _changed: set[str]

    def __init__(self) -> None:
        self._open, self._changed = {}, set()

    def add(self, database: sqlite3.Connection, row: Row) -> None:
        """A record that was inserted."""
        if row[0] != "steps":
            return
        _, _, job, _, step, outcome, _, data = row
        if outcome in {"repeated", "evaluated"}:
            return
        known = self._open.get(job)
        if known is not None and step == known.last + 1 and step < known.first + WIDTH:
            known.add(step, outcome, data)
        elif known is not None and step == known.last + 1:
            self._write(database, job)
            self._open[job] = Bin(step - step % WIDTH)
            self._open[job].add(step, outcome, data)
        # The first since the start, or after a rollback: what was drawn of later steps does not count. Rows
        # say it, so no other record need be understood here. (D-daemon-023)
        else:
            first = step - step % WIDTH
            database.execute("DELETE FROM bins WHERE job = ? AND first > ?", (job, first))
            self._open[job] = of_rows(database, job, first, step + 1)
        self._changed.add(job)

    def flush(self, database: sqlite3.Connection) -> None:
        """Write those that have changed."""
        for job in sorted(self._changed):
            self._write(database, job)
        self._changed.clear()

    def forget(self) -> None:
        """What was added may not be in the table: look there again."""
        self._open.clear()
        self._changed.clear()

    def _write(self, database: sqlite3.Connection, job: str) -> None:
        _store(database, job, self._open[job])


def _store(database: sqlite3.Connection, job: str, made: Bin) -> None:
    data = msgspec.msgpack.encode(made)
    row = (_STORED, job, made.first, data)
    database.execute("INSERT OR REPLACE INTO bins VALUES (?, ?, ?, ?)", (*row[1:], seal(row)))


def of_rows(database: sqlite3.Connection, job: str, first: int, until: int) -> Bin:
    """The bin of steps ``first`` up to ``until``, which is not in it, from their rows."""
    made = Bin(first)
    for step, outcome, data in _latest(database, job, first, until):
        made.add(step, outcome, data)
    return made


def _latest(database: sqlite3.Connection, job: str, first: int, until: int) -> list[tuple[int, str, bytes]]:
    """Of each step the newest row."""
    found = database.execute(
        "SELECT step, outcome, data FROM steps WHERE job = ? AND step >= ? AND step < ? "
        "AND outcome NOT IN ('repeated', 'evaluated') ORDER BY step, seq",
        (job, first, until),
    )
    return [*{step: (step, outcome, data) for step, outcome, data in found}.values()]


def stored(database: sqlite3.Connection, job: str, first: int) -> Bin | None:
    """The bin that begins there; None where there is none that is what was written."""
    found = database.execute(
        "SELECT data, seal FROM bins WHERE job = ? AND first = ?", (job, first)
    ).fetchone()
    return _intact(job, first, *found) if found else None


def _intact(job: str, first: int, data: bytes, sealed: bytes) -> Bin | None:
    return _bin_of(data) if seal((_STORED, job, first, data)) == sealed else None


def copy_of(database: sqlite3.Connection, older: sqlite3.Connection) -> None:
    """Take over those of ``older`` that are what was written, and that ``database`` has no rows for."""
    for job, first, data, sealed in older.execute("SELECT job, first, data, seal FROM bins"):
        name = job.decode(errors="replace") if isinstance(job, bytes) else job
        row = (_STORED, name, first, data)
        if isinstance(data, bytes) and seal(row) == sealed:
            database.execute("INSERT OR IGNORE INTO bins VALUES (?, ?, ?, ?)", (*row[1:], sealed))


def curve(database: sqlite3.Connection, job: str, until: int, num_bins: int) -> list[CurveBin]:
    """At most ``num_bins`` bins of equal width over the steps below ``until``."""
    assert num_bins > 0
    if until <= _FEW:
        return _of_few(database, job, until, -(-until // num_bins))
    width = -(-until // (num_bins * WIDTH)) * WIDTH
    known: dict[int, Bin] = {}
    for first, data, sealed in database.execute(
        "SELECT first, data, seal FROM bins WHERE job = ? AND first < ? ORDER BY first", (job, until)
    ):
        found = _intact(job, first, data, sealed)
        if found is not None and found.last < until:
            known[first] = found
    made: list[Bin] = []
    for first in range(0, until, WIDTH):
        each = known.get(first) or of_rows(database, job, first, min(first + WIDTH, until))
        if not each.count:
            continue
        if made and first // width == made[-1].first // width:
            made[-1].join(each)
        else:
            made.append(each)
    return [each.shown() for each in made]


def _of_few(database: sqlite3.Connection, job: str, until: int, width: int) -> list[CurveBin]:
    made: list[Bin] = []
    for step, outcome, data in _latest(database, job, 0, until):
        if not made or step // width != made[-1].first // width:
            made.append(Bin(step - step % width))
        made[-1].add(step, outcome, data)
    return [each.shown() for each in made]
