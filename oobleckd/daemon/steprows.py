"""Reads steps of a job from the journal, by range: those that are in memory no more.

Owns the connection of each question, which reads beside the writer thread, and that a row which is not what
was written is taken from the copy. Owns no meaning of a row (``core.entries``), and no curve (``curves``).
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oobleckd.daemon import curves
from oobleckd.daemon.curves import CurveQuestion, FoundCurve
from oobleckd.daemon.records import Row, Scan
from oobleckd.daemon.segments import closed_segments
from oobleckd.daemon.tables import intact, opened

_RANGE = (
    "SELECT seq, job, round, step, outcome, loss, data, seal FROM steps "
    "WHERE job = ? AND step >= ? AND step <= ? "
    "AND outcome NOT IN ('repeated', 'evaluated') ORDER BY step, seq"
)
_EVALUATED = (
    "SELECT seq, job, round, step, outcome, loss, data, seal FROM steps "
    "WHERE job = ? AND step = ? AND outcome = 'evaluated' ORDER BY seq DESC LIMIT 1"
)
_NEWEST = "SELECT seq, job, round, step, outcome, loss, data, seal FROM steps ORDER BY seq DESC LIMIT ?"

_OLD = (
    "SELECT seq FROM steps WHERE job = ? AND seq < ? "
    "AND seq <= (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT 1 OFFSET 1)"
)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The steps in the journal ``path``. Its methods wait for the disk, and may be called by any thread.

    Raise sqlite3.Error, OSError.
    """

    path: Path

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        """At most ``limit`` entries of steps ``first`` to ``last`` (from 0) of a job, in order. ``last`` is
        of the history that goes on: of what was given up there may be more behind it.
        """
        found: list[bytes] = []
        newest: int | None = None
        with self._reading() as database:
            for columns in database.execute(_RANGE, (job, first, last)):
                step = columns[3]
                if step != newest and len(found) == limit:
                    break
                data = self._data(columns)
                if data is None:
                    continue
                if step == newest:  # of each step the last word counts
                    found.pop()
                newest = step
                found.append(data)
        return found

    def evaluations(self, job: str, steps: Sequence[int]) -> list[bytes]:
        """Of each evaluation of a job after so many ``steps`` the entry of its newest round."""
        with self._reading() as database:
            found = (database.execute(_EVALUATED, (job, step)).fetchone() for step in steps)
            rows = [self._data(columns) for columns in found if columns is not None]
        return [data for data in rows if data is not None]

    def newest(self, limit: int) -> list[bytes]:
        """The last ``limit`` entries of steps of all jobs, in order."""
        with self._reading() as database:
            found = [self._data(columns) for columns in database.execute(_NEWEST, (limit,))]
        return [data for data in reversed(found) if data is not None]

    def droppable(self, job: str) -> array[int]:
        """The numbers of records of steps of a job, but for the last one, up to the snapshot before the
        newest.
        """
        # Without the last one a replay of all records, as after most upgrades, would not know where the job
        # ended. (D-daemon-024)
        with self._reading() as database:
            (last,) = database.execute("SELECT max(seq) FROM steps WHERE job = ?", (job,)).fetchone()
            found = database.execute(_OLD, (job, last or 0))
            return array("q", (seq for (seq,) in found))

    def curve(self, question: CurveQuestion) -> FoundCurve:
        """The curve that is asked for."""
        with self._reading() as database:
            database.text_factory = _text
            return curves.curve(database, question)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(opened(self.path, read_only=True)) as database:
            database.execute("BEGIN")  # one state of it for all of a question
            yield database

    def _data(self, columns: tuple[Any, ...]) -> bytes | None:
        row = intact("steps", columns) or self._copied(columns[0])
        return row[-1] if row is not None else None

    def _copied(self, seq: int) -> Row | None:
        copy = self.path.with_suffix(".copy")
        files = [segment.path for segment in closed_segments(copy) if segment.first <= seq <= segment.last]
        rows = (row for path in [*files, copy] for row in Scan(path))
        return next((row for row in rows if row[0] == "steps" and row[1] == seq), None)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
