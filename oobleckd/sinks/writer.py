"""Writes one job into one sink, in a thread of its own: whatever happens to the sink, to the daemon or to the
job, its output ends up with each committed step once.

Owns the thread, its retries, and the sink's folder. It asks the daemon for what the output lacks and keeps no
queue: while a sink hangs nothing grows, and afterwards it is given what it missed.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import msgspec

from oobleckd.client import Client
from oobleckd.host.durable import write_whole
from oobleckd.protocol.job import table_of
from oobleckd.protocol.jobviews import JobView
from oobleckd.sinks.base import Sink, SinkRun
from oobleckd.sinks.feed import JobFeed
from oobleckd.sinks.kinds import SinkMissing, sink_class
from oobleckd.unixhttp import ApiProblem, ClientError

_AGAIN_S = (1.0, 5.0, 15.0, 60.0)
_LOOK_S = 30.0  # nothing is to be seen of a job, and may have been missed
NOTE, SPEC = "run.json", "job.json"
_log = logging.getLogger(__name__)


class RunNote(msgspec.Struct, frozen=True):
    """What a folder holds. ``complete``: the job is over, and all of it is here."""

    job: str
    kind: str
    submitted_at: float
    complete: bool = False


class SinkWriter(threading.Thread):
    """Of the job that ``view`` shows, into ``folder``, by the sink of ``kind``."""

    def __init__(self, client: Client, view: JobView, kind: str, folder: Path) -> None:
        super().__init__(name=f"{kind} {view.id}", daemon=True)
        self._client, self._kind, self._folder = client, kind, folder
        self._feed = JobFeed(client, view)
        self._news, self._stopping = threading.Event(), threading.Event()
        self.complete = False

    def show(self, view: JobView) -> None:
        """What the job looks like now, from any thread."""
        was, self._feed.job = self._feed.job, view
        if _news_of(view) != _news_of(was):
            self._news.set()

    def stop(self) -> None:
        """Have it end soon, from any thread."""
        self._stopping.set()
        self._news.set()

    def run(self) -> None:
        """Write until the job is over, or ``stop``."""
        failures = 0
        while not self._stopping.is_set() and not self.complete:
            begun = time.monotonic()
            try:
                self._session()
            except Exception as error:  # noqa: BLE001 - a sink is anybody's code, and others go on
                failures = 0 if time.monotonic() - begun > _AGAIN_S[-1] else failures
                wait_s = _AGAIN_S[min(failures, len(_AGAIN_S) - 1)]
                failures += 1
                known = isinstance(error, SinkMissing | OSError)
                _log.warning(
                    "%s of %s: %s; again in %.0f s, and nothing is lost",
                    self._kind,
                    self._feed.job.id,
                    str(error) or type(error).__name__,
                    wait_s,
                    exc_info=None if known else error,
                )
                self._stopping.wait(wait_s)

    def _session(self) -> None:
        """From what the output has to the end, or to an exception."""
        if not self._claim():
            return
        view = self._feed.job
        table = next(each for each in view.spec.sinks if each.kind == self._kind)
        run = SinkRun(view.id, view.spec, table, self._folder, view.submitted_at)
        sink = sink_class(self._kind)(run)
        over = False
        try:
            self._write(sink)
            over = not self._stopping.is_set()
        finally:
            sink.close(over=over)
        if over:
            self._note(complete=True)
            self.complete = True

    def _write(self, sink: Sink) -> None:
        """Until the job is over and all of it is written, or ``stop``."""
        written = sink.open()
        while not self._stopping.is_set():
            self._news.clear()
            view = self._feed.job
            try:
                missing = self._feed.missing(written)
            except ClientError as error:  # the daemon is away, or is asked too often
                wait_s = error.retry_s if isinstance(error, ApiProblem) and error.retry_s else _AGAIN_S[0]
                self._stopping.wait(wait_s)
                continue
            if missing.rewind is not None:
                _log.info("%s of %s: from step %d on anew", self._kind, view.id, missing.rewind)
                written = sink.rewind(missing.rewind)
            elif missing.records:
                sink.write(missing.records)
                written.add(missing.records)
            elif view.finished_at is not None:
                return
            else:
                self._news.wait(_LOOK_S)

    def _claim(self) -> bool:
        """Make the folder this job's, which may be there from before; whether something is left to do."""
        note = read_note(self._folder)
        mine = self._new_note()
        if note is not None and note.submitted_at == mine.submitted_at:
            self.complete = note.complete
            return not note.complete
        if self._folder.exists():
            # Of a job of the same id, from before somebody began a new state folder: it is not ours to cut.
            number = 1
            while (aside := self._folder.with_name(f"{self._folder.name}~{number}")).exists():
                number += 1
            self._folder.rename(aside)
            _log.warning("%s is of another job of this id, and is %s from now on", self._folder, aside)
        self._folder.mkdir(parents=True, mode=0o750)
        write_whole(self._folder / SPEC, msgspec.json.encode(table_of(self._feed.job.spec)))
        self._note(complete=False)
        return True

    def _new_note(self, *, complete: bool = False) -> RunNote:
        view = self._feed.job
        return RunNote(view.id, self._kind, view.submitted_at, complete)

    def _note(self, *, complete: bool) -> None:
        write_whole(self._folder / NOTE, msgspec.json.encode(self._new_note(complete=complete)))


def _news_of(view: JobView) -> tuple[object, ...]:
    """What changes with all that is written: rates and ages change all the time."""
    evaluated = view.evaluation.last if view.evaluation is not None else None
    return view.state, view.step, view.epoch, view.incidents, evaluated


def read_note(folder: Path) -> RunNote | None:
    """What a folder is said to hold; None where nothing is said."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=RunNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
