"""Prepares all data of a job, as an agent tells: ``python -m oobleckd.prepare.program --order=FILE``.

Reads a ``PrepareData`` and says on its stdout how far it is and how it ended, a message as JSON a line. Owns
that, and that it ends when nobody listens any more: its stdin ends with the agent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from oobleckd.prepare.build import PrepareProgress, check_cache, prepare
from oobleckd.prepare.pace import Pace
from oobleckd.prepare.wanted import find, look_at, wanted_of
from oobleckd.protocol.datamessages import PrepareData, PrepareDone, PrepareFailed, Preparing
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import SourceTable, in_source
from oobleckd.protocol.jobparts import parts_of
from oobleckd.tokens.errors import DataError

_SAY_EVERY_S = 1.0
_Say = Callable[[Preparing | PrepareDone | PrepareFailed], object]


@click.command()
@click.option("--order", "file", type=click.Path(path_type=Path), required=True)
def main(file: Path) -> None:
    """Until all is prepared, or cannot be."""
    order = msgspec.json.decode(file.read_bytes(), type=PrepareData)
    threading.Thread(target=_end_with_stdin, name="life-line", daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints is no answer
    _answer(order, lambda said: answers.write(msgspec.json.encode(said) + b"\n"))


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)  # what is done stays


def _answer(order: PrepareData, say: _Say) -> None:
    parts = parts_of(order.spec)
    folders = [""] * len(parts)
    begun = False
    try:
        for table, name, part in parts:  # before hours of work on the first of them
            if part.data.lacks_folder:
                with _of_source(name, table):
                    _look(part)
        for number, (table, name, part) in enumerate(parts):
            begun = True
            if part.data.is_prepared:  # a folder that is there may lack the plan of its rows
                with _of_source(name, table):
                    told = _Teller(order.job, name, say)
                    folders[number] = str(prepare(part, len(os.sched_getaffinity(0)), told).folder)
    except DataError as error:
        say(PrepareFailed(order.job, error.problem, error.hint, begun))
    else:
        say(PrepareDone(order.job, tuple(folders)))


def _look(job: Job) -> None:
    """Whether it could be prepared here, as far as that shows at once. Raises DataError."""
    wanted = wanted_of(job)
    if find(wanted) is None:
        look_at(wanted)
        check_cache(wanted.cache)


@contextmanager
def _of_source(name: str, table: SourceTable) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(in_source(name, error.problem, table), error.hint) from error


class _Teller:
    """Says how far the data of a source is, now and then."""

    def __init__(self, job: str, source: str, say: _Say) -> None:
        self._job, self._source, self._say = job, source, say
        self._pace, self._said_s = Pace(), float("-inf")

    def __call__(self, far: PrepareProgress) -> None:
        now_s, began = time.monotonic(), far.phase != self._pace.phase
        rate = self._pace.heard(far, now_s)
        if began or now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            self._say(
                Preparing(
                    self._job,
                    phase=far.phase,
                    source=self._source,
                    done_bytes=far.done,
                    total_bytes=far.total,
                    bytes_per_s=rate,
                )
            )


if __name__ == "__main__":
    main()
