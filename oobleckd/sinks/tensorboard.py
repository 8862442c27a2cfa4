"""TensorBoard's event files: one a job, which TensorBoard reads while it grows.

Owns tags, and the file: what is in it is read back from it at the start, a record that is torn is cut off,
and steps that are given up are purged as TensorBoard has it (``SessionLog.START`` with the first of them).
Records and messages are TensorBoard's own; neither TensorFlow nor torch is needed.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from oobleckd.protocol.job import table_of
from oobleckd.sinks.base import (
    EvaluationRecord,
    IncidentRecord,
    OutputContents,
    Record,
    Sink,
    SinkRun,
    StepRecord,
)

_VERSION = "brain.Event:2"  # from which on readers purge by SessionLog
_HEAD, _SIZE, _FOOT = struct.Struct("<QI"), 8, 4
_UNSYNCED_BYTES = 2**20  # more than one batch: all before is on the disk, and its sums take long in Python
TRAIN, EVAL, INCIDENTS = "train/", "eval/", "incidents/"


class TensorBoardSink(Sink):
    """Scalars ``train/…`` and ``eval/SOURCE/…`` by step, incidents and the job.toml as texts."""

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        self._file: BinaryIO | None = None

    def open(self) -> OutputContents:
        """Read the file, and cut off what is torn."""
        path = next(iter(sorted(self.run.folder.glob("events.out.tfevents.*"))), None) or self._new_path()
        self._file = path.open("ab")
        written, end = _read(path)
        self._file.truncate(end)
        if not end:
            self._begin()
        return written

    def write(self, records: Sequence[Record]) -> None:
        """An event for each record, so that none is there in part."""
        self._put([_event(record) for record in records])

    def rewind(self, first: int) -> OutputContents:
        """Purge: readers forget all that has this step or a later one."""
        # Cutting the file would leave a TensorBoard that has it open in the middle of a record. (D-sinks-003)
        start = SessionLog(status=SessionLog.START)
        self._put([Event(wall_time=time.time(), step=first, session_log=start)])
        assert self._file is not None, "open"
        return _read(Path(self._file.name))[0]

    def close(self, *, over: bool) -> None:
        """Close the file."""
        del over
        if self._file is not None:
            self._file.close()

    def _new_path(self) -> Path:
        # The time comes first in the name, by which TensorBoard orders files of a run.
        name = f"events.out.tfevents.{int(self.run.submitted_at):010d}.{socket.gethostname()}.oobleckd"
        return self.run.folder / name

    def _begin(self) -> None:
        toml = msgspec.json.format(msgspec.json.encode(table_of(self.run.spec)), indent=2).decode()
        at = self.run.submitted_at
        value = _text("job", f"```json\n{toml}\n```")
        head = Event(wall_time=at, file_version=_VERSION)
        self._put([head, Event(wall_time=at, step=0, summary=Summary(value=[value]))])

    def _put(self, events: Sequence[Event]) -> None:
        assert self._file is not None, "open"
        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.flush()
        os.fsync(self._file.fileno())


def _event(record: Record) -> Event:
    match record:
        case StepRecord():
            values = _scalars(TRAIN, record.figures)
        case EvaluationRecord():
            values = _scalars(EVAL, record.figures)
        case IncidentRecord():
            values = [_text(f"{INCIDENTS}{record.id}", record.text)]
    return Event(wall_time=record.at, step=record.step, summary=Summary(value=values))


def _scalars(prefix: str, figures: Mapping[str, float]) -> list[Any]:
    return [Summary.Value(tag=f"{prefix}{name}", simple_value=value) for name, value in figures.items()]


def _text(tag: str, text: str) -> Any:
    """As TensorBoard's plugin for texts has it."""
    metadata = SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name="text"), data_class="DATA_CLASS_TENSOR"
    )
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


class _Framed(NamedTuple):
    data: bytes
    end: int


def _records(path: Path) -> Iterator[_Framed]:
    """The whole records of a file, and where each ends."""
    checked_from = path.stat().st_size - _UNSYNCED_BYTES
    with path.open("rb") as file:
        end = 0
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, checksum = _HEAD.unpack(head)
            if masked_crc32c(head[:_SIZE]) != checksum:
                return
            data = file.read(size + _FOOT)
            if len(data) < size + _FOOT or (end > checked_from and not _is_whole(data)):
                return
            end += _HEAD.size + size + _FOOT
            yield _Framed(data[:-_FOOT], end)


def _is_whole(data: bytes) -> bool:
    return bool(masked_crc32c(data[:-_FOOT]) == int.from_bytes(data[-_FOOT:], "little"))


def _read(path: Path) -> tuple[OutputContents, int]:
    """What a reader has of a file, and where its last whole record ends."""
    written, end = OutputContents(), 0
    for data, stop in _records(path):
        event, end = Event.FromString(data), stop
        if event.HasField("session_log"):
            written.steps.cut(event.step)
            written.evaluations.cut(event.step)  # and no incident: readers purge no texts
        for value in event.summary.value[:1]:
            if value.tag.startswith(TRAIN):
                written.steps.add(event.step, event.wall_time)
            elif value.tag.startswith(EVAL):
                written.evaluations.add(event.step, event.wall_time)
            elif value.tag.startswith(INCIDENTS):
                written.incidents[value.tag.removeprefix(INCIDENTS)] = event.step
    return written, end
