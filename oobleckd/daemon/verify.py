"""The program that looks at the old part of a journal while its daemon works: all records up to the newest
snapshot, in the database and in the closed files of the copy.

    python -m oobleckd.daemon.verify JOURNAL UNTIL [JOB...]

It runs beside everything else, with a bounded memory, and the database is read alone: what is damaged there
goes to standard output, with what the copy has in its place, and the daemon writes it (``verifying``). Closed
files of the copy are its own: one that lacks something or is damaged is written anew from the database, and
steps of the JOBs named, which were kept for long enough, leave them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from oobleckd.daemon.mend import side_by_side
from oobleckd.daemon.records import Row, format_row, framed, snapshot_row
from oobleckd.daemon.segments import ClosedFile, Copied, closed_name, closed_segments, look_into, records_of
from oobleckd.daemon.tables import FORMAT, Table, dropped_in, names_in, opened
from oobleckd.host.durable import move

_NICER_BY = 19
_MOST_ROWS = 20_000  # that are told at once: the rest is found the next time
_IN_ONE = 10_000  # records of a file that is written for what no file has


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """``wrong``: what SQLite says of the file. ``rows``: frames of what the database lacks; ``rewritten``:
    files of the copy; ``lost``: numbers of records that neither has.
    """

    num_rows: int = 0
    wrong: str = ""
    rows: bytes = b""
    num_damaged: int = 0
    rewritten: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()


class _Old:
    """The old part of one journal, being looked at. ``over``: jobs whose steps were kept for long enough."""

    def __init__(self, path: Path, table: Table, until: int, over: frozenset[str]) -> None:
        self._copy, self._table, self._until, self._over = path.with_suffix(".copy"), table, until, over
        table.read_meta(FORMAT)
        self._head = format_row(FORMAT, names_in(table.meta), dropped_in(table.meta))
        self._kept_from = min((seq for seq, _ in table.snapshots()), default=0)
        self._seen = 0  # the last number that was looked at
        self.num_rows, self.num_damaged = 0, 0
        self.frames: list[bytes] = []
        self.rewritten: list[str] = []
        self.lost: list[int] = []

    def look(self) -> None:
        """At all of it."""
        segments = [each for each in closed_segments(self._copy) if each.last <= self._until]
        for segment in segments:
            self._uncovered(segment.first - 1)
            self._segment(segment)
            self._seen = max(self._seen, segment.last)
        self._uncovered(self._until)

    def _segment(self, segment: ClosedFile) -> None:
        file = look_into(segment.path)
        stale = not file.head.format or not file.whole or any(seq < self._kept_from for seq in file.snapshots)
        num_left, last = 0, segment.first - 1
        rows = self._table.rows(segment.first - 1, segment.last)
        for seq, there, row, copied in side_by_side(rows, records_of(segment.path)):
            self.num_rows += 1
            self._missing(last, seq)
            last = seq
            if row is None and copied is not None and self._is_over(copied) and not there:
                stale = True
                continue
            num_left += 1
            if row is not None:
                stale |= copied != row
            elif copied is not None:
                self.num_damaged += 1
                self.frames += [framed(copied)] if len(self.frames) < _MOST_ROWS else []
            else:
                self.lost.append(seq)
        self._missing(last, segment.last + 1)
        if stale:
            self._write(segment, file, keep=num_left > 0)

    def _missing(self, last: int, seq: int) -> None:
        """Nothing is known of the numbers between: they are lost, unless they were kept for long enough."""
        first = max(last, dropped_in(self._table.meta)) + 1
        self.lost += range(first, min(seq, first + _MOST_ROWS))

    def _is_over(self, row: Row) -> bool:
        return row[0] == "steps" and row[2] in self._over

    def _write(self, segment: ClosedFile, file: Copied, *, keep: bool) -> None:
        self.rewritten.append(segment.path.name)
        if not keep:
            segment.path.unlink()
            return

        def rows() -> Iterator[Row]:
            yield self._head
            for seq, data in sorted(file.snapshots.items()):
                if seq >= self._kept_from:
                    yield snapshot_row(seq, data)
            mine = self._table.rows(segment.first - 1, segment.last)
            for _, there, row, copied in side_by_side(mine, records_of(segment.path)):
                found = row or copied
                if found is not None and (row is not None or there or not self._is_over(found)):
                    yield found

        _write_whole(segment.path, rows())

    def _uncovered(self, last: int) -> None:
        """Records after those that were looked at, up to number ``last``, are in no file of the copy."""
        for first in range(self._seen + 1, last + 1, _IN_ONE):
            until = min(first + _IN_ONE - 1, last)
            rows = [row for _, row in self._table.rows(first - 1, until) if row is not None]
            if rows:
                path = closed_name(self._copy, first, until)
                _write_whole(path, [self._head, *rows])
                self.rewritten.append(path.name)


def _write_whole(path: Path, rows: Iterator[Row] | list[Row]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as file:
            file.writelines(map(framed, rows))
            os.fchmod(file.fileno(), 0o640)
            file.flush()
            os.fsync(file.fileno())
        move(part, path)
    finally:
        part.unlink(missing_ok=True)


def verify(path: Path, until: int, over: frozenset[str] = frozenset()) -> Verified:
    """Look at the records of the journal ``path`` up to number ``until``. Raises OSError, sqlite3.Error where
    the machine is at fault.
    """
    with closing(opened(path, read_only=True)) as database:
        table = Table(database)
        old = _Old(path, table, until, over)
        table.check()
        if table.wrong:  # what is not found in such a file may be there
            return Verified(wrong=table.wrong)
        old.look()
    return Verified(
        num_rows=old.num_rows,
        rows=b"".join(old.frames),
        num_damaged=old.num_damaged,
        rewritten=tuple(old.rewritten),
        lost=tuple(old.lost[:_MOST_ROWS]),
    )


def main() -> None:
    """Say on standard output what was found, for the daemon."""
    os.nice(_NICER_BY)
    path, until, *over = sys.argv[1:]
    found = verify(Path(path), int(until), frozenset(over))
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
