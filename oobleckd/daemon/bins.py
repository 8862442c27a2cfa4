"""Bins of steps, which curves are made of (``curves``), kept as the steps are written.

Owns the table of bins, how wide they are, what is in one, and that it says what the steps of the history that
goes on say. All of it is derived: a bin that is missing or damaged is made anew from the rows of its steps.
Bins outlive those.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from oobleckd.daemon.records import Row, seal
from oobleckd.protocol.jobviews import CurveBin

BLOCK = 1000
"""The widest bin. A version before had all so wide, so no bin lies in two blocks of that many steps."""
_WIDTHS = ((10_000, 20), (100_000, 100))  # of bins before that step
_FORM = 1  # of what is in a bin; 0: all were ``BLOCK`` wide, without samples and the spread of learning rates
_STORED = "bins"
_nan = math.nan


class _Measured(msgspec.Struct):
    """What is drawn of a record of a step."""

    loss: float = _nan
    step_s: float = _nan
    lr: float = _nan
    grad_norm: float = _nan
    samples: int = 0


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
    """Steps ``first`` to ``last`` of a job, of which ``count`` are known. ``lr``: of the last one;
    ``samples``: of steps whose time is known; ``samples_per_s``: of single steps.
    """

    first: int
    last: int = -1
    count: int = 0
    skipped: int = 0
    loss: Spread = msgspec.field(default_factory=Spread)
    step_s: Spread = msgspec.field(default_factory=Spread)
    grad_norm: Spread = msgspec.field(default_factory=Spread)
    lr: float = 0.0
    lrs: Spread = msgspec.field(default_factory=Spread)
    samples: int = 0
    samples_per_s: Spread = msgspec.field(default_factory=Spread)
    form: int = 0

    @classmethod
    def at(cls, first: int) -> Bin:
        """One with nothing in it."""
        return cls(first, form=_FORM)

    @property
    def is_old(self) -> bool:
        """Whether an earlier version wrote it: all of a block, and not all of what a curve shows."""
        return self.form < _FORM

    def add(self, step: int, outcome: str, data: bytes) -> None:
        """One more step, which comes after all in it."""
        told = _measured(data)
        self.last, self.count = step, self.count + 1
        self.skipped += outcome == "skipped"
        self.loss.add(told.loss)
        self.step_s.add(told.step_s)
        self.grad_norm.add(told.grad_norm)
        self.lrs.add(told.lr)
        self.lr = told.lr if math.isfinite(told.lr) else self.lr
        if told.samples and 0.0 < told.step_s < math.inf:
            self.samples += told.samples
            self.samples_per_s.add(told.samples / told.step_s)

    def join(self, later: Bin) -> None:
        """The steps of a later one, too."""
        self.last, self.count, self.skipped, self.samples = (
            later.last,
            self.count + later.count,
            self.skipped + later.skipped,
            self.samples + later.samples,
        )
        for mine, other in (
            (self.loss, later.loss), (self.step_s, later.step_s), (self.grad_norm, later.grad_norm),
            (self.lrs, later.lrs), (self.samples_per_s, later.samples_per_s),
        ):  # fmt: skip
            mine.join(other)
        self.lr = later.lr

    def shown(self, sequence: int) -> CurveBin:
        """For the API, which counts steps from 1. ``sequence``: tokens of a sample."""
        rates = self.samples_per_s
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
            grad_norm_min=self.grad_norm.min,
            grad_norm_max=self.grad_norm.max,
            lr_min=self.lrs.min,
            lr_max=self.lrs.max,
            tokens_per_s=self.samples * sequence / self.step_s.sum if self.samples else 0.0,
            tokens_per_s_min=(rates.min or 0.0) * sequence,
            tokens_per_s_max=(rates.max or 0.0) * sequence,
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
        if known is not None and step == known.last + 1 and step < known.first + width_at(known.first):
            known.add(step, outcome, data)
        elif known is not None and step == known.last + 1:
            self._write(database, job)
            self._open[job] = Bin.at(start_of(step))
            self._open[job].add(step, outcome, data)
        # The first since the start, or after a rollback: what was drawn of later steps does not count. Rows
        # say it, so no other record need be understood here. (D-daemon-023)
        else:
            first = start_of(step)
            database.execute("DELETE FROM bins WHERE job = ? AND first > ?", (job, first))
            self._open[job] = of_rows(database, job, first, step + 1)
        self._changed.add(job)

    def flush(self, database: sqlite3.Connection) -> None:
        """Write those that have changed."""
        for job in sorted(self._changed):
            self._write(database, job)
        self._changed.clear()

    def renew(self, database: sqlite3.Connection, job: str, made: Iterable[Bin]) -> None:
        """Write whole bins of a job that were ``made`` from its rows, where there are none of this form."""
        known = self._open.get(job)
        for each in made:
            # Since they were made the job may have gone back: what was drawn of later steps does not count.
            if known is not None and each.first >= known.first:
                continue
            found = stored(database, job, each.first)
            if found is None or found.is_old:
                _store(database, job, each)

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


def width_at(step: int) -> int:
    """How many steps are in the bin that ``step`` is in."""
    # With one width for all, a curve of a few thousand steps had a few columns. (D-curves-001)
    return next((width for before, width in _WIDTHS if step < before), BLOCK)


def start_of(step: int) -> int:
    """The first step of the bin that ``step`` is in."""
    return step - step % width_at(step)


def of_rows(database: sqlite3.Connection, job: str, first: int, until: int) -> Bin:
    """The bin of steps ``first`` up to ``until``, which is not in it, from their rows."""
    made = Bin.at(first)
    for step, outcome, data in latest(database, job, first, until):
        made.add(step, outcome, data)
    return made


def latest(database: sqlite3.Connection, job: str, first: int, until: int) -> list[tuple[int, str, bytes]]:
    """Of each step from ``first`` to before ``until`` the newest row: step, outcome, data."""
    found = database.execute(
        "SELECT step, outcome, data FROM steps WHERE job = ? AND step >= ? AND step < ? "
        "AND outcome NOT IN ('repeated', 'evaluated') ORDER BY step, seq",
        (job, first, until),
    )
    return [*{step: (step, outcome, data) for step, outcome, data in found}.values()]


def stored(database: sqlite3.Connection, job: str, first: int) -> Bin | None:
    """The bin that begins there; None where there is none that is what was written."""
    return {each.first: each for each in stored_in(database, job, first, first + 1)}.get(first)


def stored_in(database: sqlite3.Connection, job: str, first: int, until: int) -> list[Bin]:
    """Those that begin from ``first`` to before ``until`` and are what was written, in order."""
    found = database.execute(
        "SELECT first, data, seal FROM bins WHERE job = ? AND first >= ? AND first < ? ORDER BY first",
        (job, first, until),
    )
    return [_bin_of(data) for at, data, sealed in found if seal((_STORED, job, at, data)) == sealed]


def copy_of(database: sqlite3.Connection, older: sqlite3.Connection) -> None:
    """Take over those of ``older`` that are what was written, and that ``database`` has no rows for."""
    for job, first, data, sealed in older.execute("SELECT job, first, data, seal FROM bins"):
        name = job.decode(errors="replace") if isinstance(job, bytes) else job
        row = (_STORED, name, first, data)
        if isinstance(data, bytes) and seal(row) == sealed:
            database.execute("INSERT OR IGNORE INTO bins VALUES (?, ?, ?, ?)", (*row[1:], sealed))
