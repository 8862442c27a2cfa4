"""Files of lines, one a record: appended in one go, synced, and cut back where a line is torn or given up.

Owns what CSV and JSON lines have in common: three files a job, and where each line ends.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oobleckd.sinks.base import (
    EvaluationRecord,
    IncidentRecord,
    OutputContents,
    Record,
    Sink,
    SinkRun,
    StepRecord,
)

NAMES: dict[type[Record], str] = {
    StepRecord: "steps", EvaluationRecord: "evaluations", IncidentRecord: "incidents",
}  # fmt: skip


class Read(NamedTuple):
    """What says which record a line is. ``id``: of an incident."""

    step: int
    at: float
    id: str = ""


class LineFile:
    """The file at ``path``. ``head``: its first line, "" for none. After ``open`` no line is torn."""

    def __init__(self, path: Path, head: str = "") -> None:
        self.path, self._head = path, head.encode()
        self._fd = -1
        self._ends, self._steps = array("q"), array("q")  # of each record: where its line ends, and its step

    def open(self) -> list[bytes]:
        """Its lines but for the head."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o644)
        data = self.path.read_bytes()
        if not data.startswith(self._head):  # torn in its first line, or of other columns: it comes anew
            data = b""
        if not data:
            os.ftruncate(self._fd, 0)
            self._put(self._head)
            return []
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(self._fd, len(whole))
        return whole[len(self._head) :].splitlines(keepends=True)

    def note(self, step: int, num_bytes: int) -> None:
        """A record of ``step`` is the next ``num_bytes`` long."""
        self._ends.append(self._end + num_bytes)
        self._steps.append(step)

    def cut_here(self) -> None:
        """Drop what comes after the records noted so far."""
        os.ftruncate(self._fd, self._end)

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Add lines, each with its step, and have them on the disk. Raises OSError."""
        self._put(b"".join(line for _, line in lines))
        for step, line in lines:
            self.note(step, len(line))

    def cut(self, first: int) -> int:
        """Drop all lines from the first one of step ``first`` or later on; how many are left."""
        left = next((index for index, step in enumerate(self._steps) if step >= first), len(self._steps))
        del self._steps[left:]
        del self._ends[left:]
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        return left

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else len(self._head)

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]
        os.fsync(self._fd)


class TextSink(Sink):
    """``steps``, ``evaluations`` and ``incidents`` with ``suffix`` in the folder, each record a line."""

    suffix: str

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        self._files = {
            kind: LineFile(run.folder / f"{name}{self.suffix}", self.head(kind))
            for kind, name in NAMES.items()
        }
        self._read: dict[type[Record], list[Read]] = {kind: [] for kind in NAMES}

    @abstractmethod
    def head(self, kind: type[Record]) -> str:
        """The first line of a file, with its end; "" for none."""

    @abstractmethod
    def line(self, record: Record) -> str:
        """A record, with its end."""

    @abstractmethod
    def parse(self, kind: type[Record], line: bytes) -> Read:
        """Which record a line is. Raises ValueError where it is none."""

    def open(self) -> OutputContents:
        """Read the three files, and drop what is torn."""
        for kind, file in self._files.items():
            for line in file.open():
                try:
                    found = self.parse(kind, line)
                except ValueError:  # after a loss of power: what was not synced may be anything
                    file.cut_here()
                    break
                file.note(found.step, len(line))
                self._read[kind].append(found)
        return self._written()

    def write(self, records: Sequence[Record]) -> None:
        """Steps last: what belongs to them is there by then."""
        for kind in (IncidentRecord, EvaluationRecord, StepRecord):
            mine = [record for record in records if isinstance(record, kind)]
            if mine:
                self._files[kind].append([(record.step, self.line(record).encode()) for record in mine])
                self._read[kind] += [Read(each.step, each.at, getattr(each, "id", "")) for each in mine]

    def rewind(self, first: int) -> OutputContents:
        """Cut the files."""
        for kind, file in self._files.items():
            del self._read[kind][file.cut(first) :]
        return self._written()

    def close(self, *, over: bool) -> None:
        """Close the files."""
        del over
        for file in self._files.values():
            file.close()

    def _written(self) -> OutputContents:
        found = OutputContents()
        for each in self._read[StepRecord]:
            found.steps.add(each.step, each.at)
        for each in self._read[EvaluationRecord]:
            found.evaluations.add(each.step, each.at)
        found.incidents = {each.id: each.step for each in self._read[IncidentRecord]}
        return found
