"""A look at a job's text before it is handed in: what ``open_corpus`` would refuse on a node, and what is to
be said of files that are trained on as bytes.

Reads sizes and beginnings; more only where the vocabulary is too small for some byte. Writes nothing: no copy
of a folder is made, as a device makes it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.modelnotes import DataNote
from oobleckd.tokens import foreign
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.vocabulary import check_vocabulary
from oobleckd.worker.data.corpus import open_corpus, order_of
from oobleckd.worker.data.sources import (
    check_length,
    files_in,
    masking_of,
    of_source,
    spare_of,
    stdlib_files,
)
from oobleckd.worker.runtime.errors import UserError

_MAX_LOOKS = 1000
"""Files of a folder: of more the first ones."""
_PIECE = 1 << 20
_PLAIN = frozenset({"", "text"})


def look_at(job: Job, vocab_size: int) -> tuple[DataNote, ...]:
    """What is to be said of the text of ``job``. Raises UserError where no device would take it."""
    masking_of(job, vocab_size)
    notes: list[DataNote] = []
    rows = []
    for name, part in jobs_of_sources(job):
        with of_source(name):
            said, num_rows = _look_at_source(part, vocab_size)
        notes += said
        rows.append(num_rows)
    order_of(job, rows)
    return tuple(notes)


def _look_at_source(job: Job, vocab_size: int) -> tuple[tuple[DataNote, ...], int]:
    """Of a job on one source, and how many rows that has."""
    path, sequence = Path(job.data.path), job.train.sequence
    if job.data.source == "stdlib":
        files, root = stdlib_files(), Path(sysconfig.get_path("stdlib"))
        return (), _look_at_files(job, "the standard library", root, files, vocab_size) // sequence
    if job.data.is_bytes and path.is_dir():
        files = files_in(path)
        num_rows = _look_at_files(job, job.data.path, path, files, vocab_size) // sequence
        return _notes(path, files), num_rows
    corpus = open_corpus(job)
    corpus.inputs.close()
    return (_notes(path.parent, [path]) if job.data.is_bytes else ()), corpus.sources[0].count


def _look_at_files(job: Job, name: str, root: Path, files: Sequence[Path], vocab_size: int) -> int:
    """How many bytes they have."""
    try:
        num_bytes = sum(file.stat().st_size for file in files)
        check_length(job, name, num_bytes)
        if vocab_size - spare_of(job) > np.iinfo(np.uint8).max:
            return num_bytes
        largest = np.zeros(1, np.uint8)
        for file in files:
            largest = np.maximum(largest, _largest(file))
    except OSError as error:
        where = Path(error.filename or root)
        raise UserError(
            f"data: {where}: {error.strerror}", "make it readable for the worker's user"
        ) from error
    try:
        check_vocabulary(largest, name, vocab_size, spare_of(job), text=True)
    except DataError as error:
        raise UserError(f"data: {error.problem}", error.hint) from error
    return num_bytes


def _largest(file: Path) -> int:
    with file.open("rb") as opened:
        return max((max(piece) for piece in iter(partial(opened.read, _PIECE), b"")), default=0)


def _notes(root: Path, files: Sequence[Path]) -> tuple[DataNote, ...]:
    looked = files[:_MAX_LOOKS]
    odd = [(file, what) for file in looked if (what := _what(file)) not in _PLAIN]
    if not odd:
        return ()
    file, what = odd[0]
    return (DataNote(len(odd), len(looked), str(file.relative_to(root)), what),)


def _what(file: Path) -> str:
    try:
        return foreign.name_of(file) if file.is_file() else ""
    except OSError:
        return ""  # whoever reads it will say so
