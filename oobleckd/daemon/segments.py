"""The copy of the journal: a file with the newest snapshot of the state and all records after it, and one for
each range of older records.

Owns their names, their order, and writing them. What is in the present one is neither synced nor waited for:
the copy is there for a disk or a memory that changes bits, and for pages that are lost, not for the loss of
power, against which the journal itself is synced. At a snapshot the present file is closed under a name with
its range, and a new one takes its place; closed ones are written by nobody but ``verify``, in a process of
its own.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from oobleckd.daemon.records import HEAD, SNAPSHOTS, CopyHead, Row, Scan, framed, head_in, written
from oobleckd.host.durable import move

_CLOSED = re.compile(r"(\d+)-(\d+)(?:\.\d+)?")
_log = logging.getLogger(__name__)


class ClosedFile(NamedTuple):
    """A closed file with the records of these numbers."""

    first: int
    last: int
    path: Path


def closed_segments(copy: Path) -> list[ClosedFile]:
    """Those beside the present file, in the order of their numbers."""
    found = []
    for path in copy.parent.glob(f"{copy.name}.*"):
        match = _CLOSED.fullmatch(path.name.removeprefix(f"{copy.name}."))
        if match:
            found.append(ClosedFile(int(match[1]), int(match[2]), path))
    return sorted(found)


def closed_name(copy: Path, first: int, last: int) -> Path:
    """A name for a file with these records that nothing has."""
    name = f"{copy.name}.{first:012}-{last:012}"
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(path for each in names if not (path := copy.with_name(each)).exists())


@dataclass(slots=True)
class Copied:
    """What the present file of the copy has besides its records: ``snapshots`` by number; ``first`` and
    ``last`` are the numbers of its records (0: there are none).
    """

    head: CopyHead = field(default_factory=CopyHead)
    snapshots: dict[int, bytes] = field(default_factory=dict)
    first: int = 0
    last: int = 0
    num_rows: int = 0
    whole: bool = True

    @property
    def empty(self) -> bool:
        """Whether nothing in it says what was decided."""
        return not (self.num_rows or self.snapshots)


def look_into(path: Path) -> Copied:
    """What is in a file of the copy."""
    found, scan = Copied(), Scan(path)
    for row in scan:
        if row[0] == HEAD:
            found.head = head_in(row)
        elif row[0] == SNAPSHOTS:
            found.snapshots[row[1]] = row[2]
        else:
            found.first, found.last = found.first or row[1], max(found.last, row[1])
            found.num_rows += 1
    found.whole = scan.whole
    return found


def records_in(copy: Path, present: Copied, after: int = 0) -> Iterator[Row]:
    """All intact records of the copy after number ``after``, in order, each once. ``present``: what
    ``look_into`` says of the present file.
    """
    files = [segment for segment in closed_segments(copy) if segment.last > after]
    if present.num_rows:
        files.append(ClosedFile(present.first, present.last, copy))
    newest = after
    for group in _overlapping(sorted(files)):
        for row in heapq.merge(*(records_of(segment.path) for segment in group), key=lambda row: int(row[1])):
            if row[1] > newest:
                newest = row[1]
                yield row


def records_of(path: Path) -> Iterator[Row]:
    """The intact records in a file of the copy."""
    return (row for row in Scan(path) if row[0] not in {HEAD, SNAPSHOTS})


def _overlapping(segments: Iterable[ClosedFile]) -> Iterator[list[ClosedFile]]:
    """Those whose ranges overlap together, of ``segments`` in order."""
    group: list[ClosedFile] = []
    for segment in segments:
        if group and segment.first > max(each.last for each in group):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def new_of(copy: Path) -> Path:
    """What a new file is called before it has its name."""
    return copy.with_name(f"{copy.name}.new")


def write_copy(copy: Path, rows: Iterable[Row]) -> None:
    """A new file of the copy with ``rows``, complete under another name before it has its own. Raises
    OSError.
    """
    new = new_of(copy)
    try:
        with new.open("wb") as file:
            file.writelines(map(framed, rows))
            os.fchmod(file.fileno(), 0o640)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        new.unlink(missing_ok=True)
        raise
    move(new, copy)


def close_present(copy: Path, first: int, last: int) -> None:
    """The present file becomes that of these records; there is none until one is written. Raises OSError."""
    move(copy, closed_name(copy, first, last))


class RecordCopy:
    """The present file, which records are added to. A disk that takes no more of it is said once, and
    holds nobody up. ``first``: the number that its records begin with.
    """

    def __init__(self, path: Path, head: Row, first: int) -> None:
        self._fd = _opened(path)
        self._path, self.first, self._failing = path, first, False
        if not os.fstat(self._fd).st_size:
            self.append([head])

    def append(self, rows: Iterable[Row]) -> None:
        """Write ``rows``, which are on disk."""
        data = written(rows)
        try:
            complete = os.write(self._fd, data) == len(data)
        except OSError as error:
            complete = False
            self._failed(error)
        self._failing = not complete

    def cut(self, last: int, beginning: Sequence[Row]) -> None:
        """Close the file, whose newest record is ``last``, and go on in a new one with this ``beginning``.
        Where the disk does not take it, the file goes on as it is.
        """
        # Each step alone leaves what a start can go on from: without a present file it is written anew, and
        # what is beside it under the name of a new one is removed. (D-daemon-021)
        new = new_of(self._path)
        try:
            fd = _opened(new, os.O_TRUNC)
        except OSError as error:
            self._failed(error)
            return
        try:
            _write(fd, written(beginning))
            with suppress(FileNotFoundError):  # somebody removed it: this is the next one all the same
                self._path.rename(closed_name(self._path, self.first, last))
            new.rename(self._path)
        except OSError as error:
            os.close(fd)
            with suppress(OSError):
                new.unlink(missing_ok=True)
            self._failed(error)
            return
        os.close(self._fd)
        self._fd, self.first = fd, last + 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            _log.warning("the journal's copy %s cannot be written: %s", self._path, error)
        self._failing = True


def _write(fd: int, data: bytes) -> None:
    if os.write(fd, data) != len(data):
        raise OSError("the disk took only a part")


def _opened(path: Path, how: int = 0) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | how, 0o640)
