"""Which jobs are written into which sinks: a ``SinkWriter`` for each, as jobs come and go.

Owns the look at jobs that are written, once a second, which tells the writers that there is news: none of
them asks on its own for what has not changed. New jobs are looked for in the list of all, more seldom: that
costs the daemon more, the more jobs it has had.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from oobleckd.client import Client
from oobleckd.protocol.jobviews import JobView
from oobleckd.sinks.writer import SinkWriter, read_note
from oobleckd.unixhttp import ApiProblem, ClientError

LOOK_S = 1.0
NOT_FOUND = 404
_LIST_S = 5.0
_log = logging.getLogger(__name__)


class Overseer(threading.Thread):
    """Of all jobs of the daemon behind ``client``; sinks of ``kinds`` write below ``folder``."""

    def __init__(self, client: Client, kinds: Sequence[str], folder: Path) -> None:
        super().__init__(name="overseer", daemon=True)
        self._client, self._kinds, self._folder = client, kinds, folder
        self._stopping = threading.Event()
        self._writers: dict[tuple[str, str], SinkWriter] = {}
        self._complete: set[tuple[str, str]] = set()
        self._list_at = 0.0

    def run(self) -> None:
        """Look, until ``stop``."""
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= self._list_at:
                    self.look()
                    self._list_at = time.monotonic() + _LIST_S
                else:
                    self._look_at_mine()
            except ClientError as error:
                _log.debug("the daemon is away: %s", error)
            except Exception:  # noqa: BLE001 - a thread's boundary: one folder that cannot be read stops no sink
                _log.exception("sinks: jobs are looked at again in %.0f s", LOOK_S)
            self._stopping.wait(LOOK_S)

    def look(self) -> None:
        """Begin what is new, and tell the others what their jobs look like. Raises ClientError."""
        for view in self._client.jobs():
            for table in view.spec.sinks:
                key = (view.id, table.kind)
                if key not in self._complete and table.kind in self._kinds:
                    self._follow(view, key)

    def _look_at_mine(self) -> None:
        for job in sorted({job for job, _ in self._writers}):
            mine = [key for key in self._writers if key[0] == job]
            try:
                view = self._client.job(job)
            except ApiProblem as problem:
                if problem.status != NOT_FOUND:
                    raise
                for key in mine:  # it was deleted: what was written of it stays
                    self._writers.pop(key).stop()
                continue
            for key in mine:
                self._follow(view, key)

    def stop(self, wait_s: float) -> None:
        """End all of them; who hangs for longer than ``wait_s`` ends with the process."""
        self._stopping.set()
        self.join(wait_s)
        writers = list(self._writers.values())
        for writer in writers:
            writer.stop()
        until = time.monotonic() + wait_s
        for writer in writers:
            writer.join(max(0.0, until - time.monotonic()))

    def _follow(self, view: JobView, key: tuple[str, str]) -> None:
        writer = self._writers.get(key)
        if writer is None:
            folder = self._folder / key[1] / view.id
            note = read_note(folder)
            if note is not None and note.complete and note.submitted_at == view.submitted_at:
                self._complete.add(key)
                return
            writer = self._writers[key] = SinkWriter(self._client, view, key[1], folder)
            writer.start()
        writer.show(view)
        if writer.complete:
            del self._writers[key]
            self._complete.add(key)
