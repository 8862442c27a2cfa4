"""What an output lacks of a job, asked from the daemon's API.

Owns the comparison of an output with the history of a job: whatever died or was restarted meanwhile, and
however often the job went back, what the journal has now is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from oobleckd.client import Client
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.jobviews import JobView, StepView
from oobleckd.sinks import figures
from oobleckd.sinks.base import (
    EvaluationRecord,
    IncidentRecord,
    OutputContents,
    Record,
    StepMarks,
    StepRecord,
)

PAGE = 1000
View = TypeVar("View", StepView, EvaluationView)
_ORDER = {IncidentRecord: 0, StepRecord: 1, EvaluationRecord: 2}


class Missing(NamedTuple):
    """What to do next: forget all from step ``rewind`` on (None: nothing), else write ``records``, after
    which there may be more.
    """

    rewind: int | None
    records: tuple[Record, ...]


@dataclass(slots=True)
class JobFeed:
    """Of the job that ``job`` was the newest view of."""

    client: Client
    job: JobView

    def missing(self, written: OutputContents) -> Missing:
        """What comes after ``written``. Raises ClientError."""
        # The newest that was written is asked for with what follows it: a job that went back, and came past
        # this step again between two questions, would show in neither answer. (D-sinks-002)
        steps = self.client.some_steps(self.job.id, _last(written.steps), PAGE + 1)
        evaluations: tuple[EvaluationView, ...] = ()
        if self.job.spec.eval_sources:
            asked = _last(written.evaluations)
            evaluations = self.client.some_evaluations(self.job.id, asked, PAGE + 1)
        first = min(
            (
                step
                for step in (
                    self._first_other(written.steps, steps, self._step),
                    self._first_other(written.evaluations, evaluations, self._evaluation),
                )
                if step is not None
            ),
            default=None,
        )
        if first is not None:
            return Missing(first, ())
        new = _after(written.steps, steps)
        until = new[-1].step if new else _last(written.steps)
        later = [view for view in _after(written.evaluations, evaluations) if view.step <= until]
        records: list[Record] = [figures.step_record(view, self.job.spec) for view in new]
        records += map(figures.evaluation_record, later)
        records += self._incidents(written)
        # An evaluation follows the step after which it is, and precedes the next one.
        records.sort(key=lambda record: (record.step, _ORDER[type(record)]))
        return Missing(None, tuple(records))

    def _first_other(
        self, marks: StepMarks, views: Sequence[View], ask: Callable[[int], Sequence[View]]
    ) -> int | None:
        """The first step of ``marks`` that is of another history than what the daemon has; None where none
        is. ``views``: what it has from the last one on.
        """
        if not len(marks) or not self._is_other(marks[len(marks) - 1], views):
            return None
        # Histories share their beginning, and nothing after it.
        low, high = 0, len(marks) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_other(marks[middle], ask(marks[middle][0])):
                high = middle
            else:
                low = middle + 1
        return marks[low][0]

    def _is_other(self, mark: tuple[int, float], views: Sequence[StepView | EvaluationView]) -> bool:
        """Whether what was written is none that the daemon has, by what it has from there on. What it keeps
        no more, of a job that is over, was its own.
        """
        step, at = mark
        if not views:
            return self.job.finished_at is None
        return views[0].step == step and views[0].at != at

    def _incidents(self, written: OutputContents) -> list[Record]:
        if self.job.incidents <= len(written.incidents):
            return []
        return [
            figures.incident_record(view)
            for view in self.client.incidents()
            if view.job == self.job.id and not view.open and view.id not in written.incidents
        ]

    def _step(self, step: int) -> tuple[StepView, ...]:
        return self.client.some_steps(self.job.id, step, 1)

    def _evaluation(self, step: int) -> tuple[EvaluationView, ...]:
        return self.client.some_evaluations(self.job.id, step, 1)


def _last(marks: StepMarks) -> int:
    """The newest step that was written, 0 for none."""
    return marks[len(marks) - 1][0] if len(marks) else 0


def _after(marks: StepMarks, views: Sequence[View]) -> list[View]:
    return [view for view in views if not len(marks) or view.step > _last(marks)]
