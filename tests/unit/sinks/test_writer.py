"""A writer and its sink: what hangs, fails or is not there holds up nobody and loses nothing."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from oobleckd.protocol.jobviews import JobView
from oobleckd.sinks import writer as writers
from oobleckd.sinks.base import Record
from oobleckd.sinks.kinds import GROUP, SinkMissing, sink_class
from oobleckd.sinks.overseer import Overseer
from oobleckd.sinks.textfiles import TextSink
from oobleckd.sinks.writer import SinkWriter, read_note
from oobleckd.unixhttp import ApiProblem, Unreachable
from tests.helpers import stuck_sink
from tests.helpers.committed import Committed, read_steps, wanted_steps

PATIENCE_S = 60.0


@pytest.fixture
def wrote(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Counts writes of text sinks that are over."""
    counted, write = threading.Semaphore(0), TextSink.write

    def counting(self: TextSink, records: Sequence[Record]) -> None:
        write(self, records)
        counted.release()

    monkeypatch.setattr(TextSink, "write", counting)
    return counted


def test_a_sink_that_hangs_delays_nobody_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrote: threading.Semaphore
) -> None:
    folder = tmp_path / "package"
    for name, value in stuck_sink.install(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(folder)
    history = Committed("csv", "stuck")
    history.commit(3)
    both = {kind: SinkWriter(history, history.view, kind, tmp_path / kind) for kind in ("csv", "stuck")}
    for each in both.values():
        each.start()
    assert wrote.acquire(timeout=PATIENCE_S), "csv"
    history.commit(40)
    history.roll_back(20)
    history.commit(5)
    history.state = "done"
    for each in both.values():
        each.show(history.view)
    both["csv"].join(PATIENCE_S)
    assert both["csv"].complete
    assert read_steps("csv", tmp_path / "csv") == wanted_steps(history)
    assert both["stuck"].is_alive()
    stuck_sink.free(folder)
    both["stuck"].join(PATIENCE_S)
    assert read_steps("jsonl", tmp_path / "stuck") == wanted_steps(history)


def test_a_sink_that_fails_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, failures = TextSink.write, [OSError(28, "No space left on device"), OSError(5, "I/O error")]

    def failing(self: TextSink, records: Sequence[Record]) -> None:
        write(self, records[: len(records) // 2] if failures else records)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(TextSink, "write", failing)
    monkeypatch.setattr(writers, "_AGAIN_S", (0.01,))
    history = Committed("jsonl")
    history.commit(9)
    history.state = "done"
    with caplog.at_level(logging.WARNING):
        SinkWriter(history, history.view, "jsonl", tmp_path / "jsonl").run()
    assert read_steps("jsonl", tmp_path / "jsonl") == wanted_steps(history)
    assert [record.getMessage() for record in caplog.records] == [
        "jsonl of tiny-1: [Errno 5] I/O error; again in 0 s, and nothing is lost",
        "jsonl of tiny-1: [Errno 28] No space left on device; again in 0 s, and nothing is lost",
    ]


def test_the_daemon_is_away_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = Committed("csv")
    history.commit(4)
    history.state = "done"
    away = [Unreachable("no daemon"), Unreachable("no daemon")]
    ask = history.some_steps

    def some_steps(job: str, since: int, most: int):
        if away:
            raise away.pop()
        return ask(job, since, most)

    monkeypatch.setattr(history, "some_steps", some_steps)
    monkeypatch.setattr(writers, "_AGAIN_S", (0.01,))
    SinkWriter(history, history.view, "csv", tmp_path / "csv").run()
    assert read_steps("csv", tmp_path / "csv") == wanted_steps(history)


def test_a_folder_of_another_job_of_the_same_id_is_left_alone(tmp_path: Path) -> None:
    history = Committed("csv")
    history.commit(4)
    history.state = "done"
    SinkWriter(history, history.view, "csv", tmp_path / "csv").run()
    old = (tmp_path / "csv/steps.csv").read_text(encoding="utf-8")
    other = Committed("csv")
    other.commit(2)
    other.state = "done"
    view = msgspec.structs.replace(other.view, submitted_at=950.0)
    SinkWriter(other, view, "csv", tmp_path / "csv").run()
    assert (tmp_path / "csv~1/steps.csv").read_text(encoding="utf-8") == old
    assert read_steps("csv", tmp_path / "csv") == wanted_steps(other)


def test_what_is_complete_is_not_looked_at_again(tmp_path: Path) -> None:
    history = Committed("csv", "jsonl")
    history.commit(4)
    history.state = "done"
    SinkWriter(history, history.view, "csv", tmp_path / "csv/tiny-1").run()
    note = read_note(tmp_path / "csv/tiny-1")
    assert note is not None
    assert note.complete
    overseer = Overseer(history, ("csv", "jsonl"), tmp_path)
    overseer.look()
    ((key, begun),) = overseer._writers.items()
    begun.join(PATIENCE_S)
    assert key == ("tiny-1", "jsonl")
    overseer.look()
    assert overseer._writers == {}


def test_what_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SinkMissing, match=r"pip install 'oobleckd\[wandb\]'"):
        sink_class("wandb")
    with pytest.raises(SinkMissing, match=f"offers a sink nowhere .*{GROUP}"):
        sink_class("nowhere")


def test_a_job_that_is_deleted_is_written_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = Committed("csv")
    history.commit(4)
    overseer = Overseer(history, ("csv",), tmp_path)
    overseer.look()
    ((_, writer),) = overseer._writers.items()

    def job(_name: str, *, unique: bool = False) -> JobView:
        raise ApiProblem(404, "not-found", "no job tiny-1")

    monkeypatch.setattr(history, "job", job)
    overseer._look_at_mine()
    writer.join(PATIENCE_S)
    assert not writer.is_alive()
    assert overseer._writers == {}
