"""What a sink is: the interface of those that are built in, and of those of other packages (docs/sinks.md).

Owns the records that a sink gets, and what it tells of its output. Which records it gets, and when, is
``writer``'s; how an output looks is each sink's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobsinks import SinkTable


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step, numbered from 1, of which the daemon heard ``at`` (POSIX seconds). ``figures``: by
    their names in ``figures.STEP_FIGURES``.
    """

    step: int
    at: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation after ``step`` steps. ``figures``: ``SOURCE/loss`` and ``SOURCE/perplexity``."""

    step: int
    at: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class IncidentRecord:
    """A recovery that is over: ``step`` was interrupted. ``text`` is a sentence."""

    step: int
    at: float
    id: str
    text: str
    figures: Mapping[str, float]


Record = StepRecord | EvaluationRecord | IncidentRecord


class StepMarks:
    """Which steps an output has, ascending, and what tells apart two trainings of the same one: when the
    daemon heard of it.
    """

    def __init__(self) -> None:
        self._steps, self._ats = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self._steps[index], self._ats[index]

    def add(self, step: int, at: float) -> None:
        """One more. What is there from ``step`` on is of a history that was given up, and goes."""
        self.cut(step)
        self._steps.append(step)
        self._ats.append(at)

    def cut(self, first: int) -> None:
        """Forget all from step ``first`` on."""
        index = bisect_left(self._steps, first)
        del self._steps[index:]
        del self._ats[index:]


@dataclass(slots=True)
class OutputContents:
    """What an output has. ``incidents``: id -> step."""

    steps: StepMarks = field(default_factory=StepMarks)
    evaluations: StepMarks = field(default_factory=StepMarks)
    incidents: dict[str, int] = field(default_factory=dict)

    def add(self, records: Iterable[Record]) -> None:
        """Note ``records``."""
        for record in records:
            match record:
                case StepRecord():
                    self.steps.add(record.step, record.at)
                case EvaluationRecord():
                    self.evaluations.add(record.step, record.at)
                case IncidentRecord():
                    self.incidents[record.id] = record.step

    def cut(self, first: int) -> None:
        """Forget all from step ``first`` on."""
        self.steps.cut(first)
        self.evaluations.cut(first)
        self.incidents = {name: step for name, step in self.incidents.items() if step < first}


@dataclass(frozen=True, slots=True)
class SinkRun:
    """What a sink is told of the job ``id`` whose figures it writes, into ``folder`` (which is there, and its
    own). ``spec``: the job.toml; ``table``: its ``[[sink]]`` of this kind.
    """

    id: str
    spec: Job
    table: SinkTable
    folder: Path
    submitted_at: float


class Sink(ABC):
    """Where the figures of one job go. All its methods are called by one thread, in which it may wait for as
    long as it takes: it holds up nobody else, and gets what it missed.

    An exception closes the sink, and it is made anew after a while; what its output has it tells by ``open``
    then. So a sink keeps no position beside its output that could say something else.
    """

    def __init__(self, run: SinkRun) -> None:
        self.run = run

    @abstractmethod
    def open(self) -> OutputContents:
        """What the output has already, read from it; called once, before all else. What is half written is
        mended here.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Add ``records``, in order of their steps. They are there, whatever dies, when it returns; or they
        are missing in what the next ``open`` finds.
        """

    @abstractmethod
    def rewind(self, first: int) -> OutputContents:
        """Forget all from step ``first`` on: the job went back, and they come anew. What is left then (less
        is fine: it comes again).
        """

    @abstractmethod
    def close(self, *, over: bool) -> None:
        """Let go of the output; ``over``: the job has ended, and all of it is written."""
