"""A job as the daemon's API tells of it, whose history a test makes: steps, evaluations, rollbacks.

A typed stand-in for ``Client``, for what decides about outputs; the whole way through a daemon is
``tests/loopback/test_evaluations.py``'s. It owns no behaviour but the history's.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from oobleckd.client import Client
from oobleckd.protocol.evalviews import EvaluationView, SourceLoss
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import Job, parse_job, table_of
from oobleckd.protocol.jobsinks import SinkTable
from oobleckd.protocol.jobviews import JobView, StepView
from oobleckd.sinks.base import OutputContents, Sink, SinkRun
from oobleckd.sinks.feed import JobFeed
from tests.helpers.api_server import job_view
from tests.helpers.cluster import tiny_job
from tests.helpers.tfevents import scalars

EVERY = 4


class Committed(Client):
    """``job`` has been evaluated on "held" after each fourth step."""

    def __init__(self, *kinds: str) -> None:
        super().__init__("/nowhere")
        self.all_steps: list[StepView] = []
        self.all_evaluations: list[EvaluationView] = []
        self.all_incidents: list[IncidentView] = []
        self.state, self.epoch, self._now = "running", 1, 1000.0
        self.spec = spec_of(*kinds)

    @property
    def view(self) -> JobView:
        return job_view(
            id="tiny-1",
            spec=self.spec,
            state=self.state,
            step=len(self.all_steps),
            epoch=self.epoch,
            incidents=len(self.all_incidents),
            submitted_at=900.0,
            finished_at=self._now if self.state == "done" else None,
        )

    def commit(self, count: int) -> None:
        """Train so many steps."""
        for _ in range(count):
            self._now += 0.1 + 1e-7
            step, loss = len(self.all_steps) + 1, 1.0 / (len(self.all_steps) + 1)
            self.all_steps.append(
                StepView(step, loss, loss.hex(), 0.5, 1e-3, 12, "", "applied", self.epoch, self._now, 0.1)
            )
            if step % EVERY == 0:
                self._now += 0.01
                found = SourceLoss("held", 2.0 / step, (2.0 / step).hex(), 7.5, 640)
                self.all_evaluations.append(
                    EvaluationView(step, 2.0 / step, (found,), self.epoch, self._now, 0.01)
                )

    def roll_back(self, step: int) -> None:
        """The state after ``step`` steps is what goes on; the incident is over."""
        interrupted = len(self.all_steps) + 1
        self.epoch += 1
        self.all_steps = self.all_steps[:step]
        self.all_evaluations = [each for each in self.all_evaluations if each.step <= step]
        name = f"inc-{len(self.all_incidents) + 1}"
        self.all_incidents.append(
            IncidentView(
                name, "tiny-1", "node-2 lost", ("node-2",), self._now, self.epoch, interrupted, False, (),
                1.5, 'its "last" copy, gone', steps_lost=interrupted - 1 - step,
            )
        )  # fmt: skip

    def jobs(self) -> tuple[JobView, ...]:
        return (self.view,)

    def some_steps(self, job: str, since: int, most: int) -> tuple[StepView, ...]:
        return tuple(each for each in self.all_steps if each.step >= since)[:most]

    def some_evaluations(self, job: str, since: int, most: int) -> tuple[EvaluationView, ...]:
        return tuple(each for each in self.all_evaluations if each.step >= since)[:most]

    def incidents(self) -> tuple[IncidentView, ...]:
        return tuple(self.all_incidents)


def spec_of(*kinds: str) -> Job:
    """A job that writes into sinks of ``kinds``."""
    source = {"name": "held", "kind": "text", "path": "/text"}
    table = table_of(tiny_job("tiny", eval={"every": EVERY, "sequences": 20, "source": [source]}))
    return parse_job(table | {"sink": [{"kind": kind} for kind in kinds]})


def run_of(history: Committed, kind: str, folder: Path) -> SinkRun:
    """What the sink of ``kind`` is told."""
    folder.mkdir(exist_ok=True)
    return SinkRun("tiny-1", history.spec, SinkTable(kind=kind), folder, 900.0)


def catch_up(sink: Sink, history: Committed, written: OutputContents | None = None) -> OutputContents:
    """Give a sink what it lacks, as a writer does."""
    found = sink.open() if written is None else written
    while True:
        missing = JobFeed(history, history.view).missing(found)
        if missing.rewind is not None:
            found = sink.rewind(missing.rewind)
        elif missing.records:
            sink.write(missing.records)
            found.add(missing.records)
        else:
            return found


# ---------------------------------------------------------------------- outputs, as their users read them


def read_steps(kind: str, folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all rows, as somebody else's reader has them."""
    match kind:
        case "csv":
            return [(int(row["step"]), float(row["loss"])) for row in _rows(folder / "steps.csv")]
        case "jsonl":
            return [(row["step"], row["loss"]) for row in _lines(folder / "steps.jsonl")]
        case _:
            return scalars(folder, "train/loss")


def read_evaluations(kind: str, folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all evaluations on "held"."""
    match kind:
        case "csv":
            rows = _rows(folder / "evaluations.csv")
            return [(int(row["step"]), float(row["held/loss"])) for row in rows]
        case "jsonl":
            return [(row["step"], row["held/loss"]) for row in _lines(folder / "evaluations.jsonl")]
        case _:
            return scalars(folder, "eval/held/loss")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wanted_steps(history: Committed) -> list[tuple[int, float]]:
    return [(each.step, each.loss) for each in history.all_steps]


def wanted_evaluations(history: Committed) -> list[tuple[int, float]]:
    return [(each.step, each.losses[0].loss) for each in history.all_evaluations]
