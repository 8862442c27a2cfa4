"""JSON lines: ``steps.jsonl``, ``evaluations.jsonl`` and ``incidents.jsonl``, an object a line.

Owns the objects: what ``figures`` names, beside ``step`` and ``at``. What is no finite number is null, as
JSON has none.
"""

from __future__ import annotations

import msgspec

from oobleckd.sinks.base import IncidentRecord, Record
from oobleckd.sinks.textfiles import Read, TextSink


class _Line(msgspec.Struct):
    """What a line says of itself."""

    step: int
    at: float
    id: str = ""


_decode = msgspec.json.Decoder(_Line).decode


class JsonLinesSink(TextSink):
    """UTF-8, LF at line ends."""

    suffix = ".jsonl"

    def head(self, kind: type[Record]) -> str:
        """There is none."""
        del kind
        return ""

    def line(self, record: Record) -> str:
        """Step and time first."""
        row: dict[str, float | str] = {"step": record.step, "at": record.at}
        if isinstance(record, IncidentRecord):
            row |= {"id": record.id, **record.figures, "text": record.text}
        else:
            row |= record.figures
        return msgspec.json.encode(row).decode() + "\n"

    def parse(self, kind: type[Record], line: bytes) -> Read:
        """From its keys."""
        del kind
        found = _decode(line)
        return Read(found.step, found.at, found.id)
