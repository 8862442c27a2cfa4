"""CSV files: ``steps.csv``, ``evaluations.csv`` and ``incidents.csv``, as pandas and spreadsheets read them.

Owns columns and quoting. Numbers are written so that they are read as the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from oobleckd.sinks.base import EvaluationRecord, IncidentRecord, Record, StepRecord
from oobleckd.sinks.figures import INCIDENT_FIGURES, ROUTER_FIGURES, STEP_FIGURES, evaluation_names
from oobleckd.sinks.textfiles import Read, TextSink


class CsvSink(TextSink):
    """A header line, commas, ``.`` in numbers, LF at line ends; a figure that is missing is empty."""

    suffix = ".csv"

    def head(self, kind: type[Record]) -> str:
        """The names of the columns."""
        if kind is IncidentRecord:
            return _row(("step", "at", "id", *INCIDENT_FIGURES, "text"))
        return _row(("step", "at", *self._names(kind)))

    def line(self, record: Record) -> str:
        """Step and time first."""
        begin: tuple[int | float | str, ...] = (record.step, record.at)
        match record:
            case IncidentRecord(id=name, text=text):
                return _row((*begin, name, *(record.figures[each] for each in INCIDENT_FIGURES), text))
            case _:
                return _row((*begin, *(record.figures.get(each, "") for each in self._names(type(record)))))

    def parse(self, kind: type[Record], line: bytes) -> Read:
        """From the first columns, which are never quoted."""
        num = 3 if kind is IncidentRecord else 2
        step, at, *rest = line.decode().split(",", num)[:num]
        return Read(int(step), float(at), *rest)

    def _names(self, kind: type[Record]) -> tuple[str, ...]:
        if kind is EvaluationRecord:
            return evaluation_names(self.run.spec)
        assert kind is StepRecord
        # Of a job that asks for losses of routers: files that others began keep their columns.
        train = self.run.spec.train
        has_routers = train.router_aux_loss_coef or train.router_z_loss_coef
        return STEP_FIGURES + ROUTER_FIGURES if has_routers else STEP_FIGURES


def _row(cells: Iterable[int | float | str]) -> str:
    return ",".join(map(_cell, cells)) + "\n"


def _cell(value: float | str) -> str:
    if not isinstance(value, str):
        return repr(value)
    return f'"{value.replace(chr(34), chr(34) * 2)}"' if set(value) & set(',"\r\n') else value
