"""A look at a job's text before it is submitted: what ``open_corpus`` would refuse on a node, and what is to
be said of files that are trained on as bytes.

Reads sizes and beginnings; more only where the vocabulary is too small for some byte. Writes nothing: no copy
of a folder is made, as a device makes it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import SourceTable
from oobleckd.protocol.jobparts import parts_of
from oobleckd.protocol.modelnotes import DataNote
from oobleckd.tokens import foreign
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.vocabulary import check_vocabulary
from oobleckd.worker.data.corpus import order_of
from oobleckd.worker.data.evaluation import check_enough
from oobleckd.worker.data.sources import (
    both_sides,
    files_in,
    masking_of,
    of_source,
    open_source,
    spare_of,
    stdlib_files,
)
from oobleckd.worker.data.textfiles import FileBorders
from oobleckd.worker.runtime.errors import UserError

_MAX_LOOKS = 1000
"""Files of a folder: of more the first ones."""
_PIECE = 1 << 20
_PLAIN = frozenset({"", "text"})


def look_at(job: Job, vocab_size: int) -> tuple[DataNote, ...]:
    """What is to be said of the text of ``job``. Raises UserError where no device would take it."""
    masking_of(job, vocab_size)
    looked: dict[SourceTable, list[_Looked]] = {"data": [], "eval": []}
    for table, name, part in parts_of(job):
        with of_source(name, table):
            masking_of(part, vocab_size)
            looked[table].append(_look_at_source(part, vocab_size))
    held, evaluated = [each.held for each in looked["data"]], [each.rows for each in looked["eval"]]
    for name, rows in zip(job.eval_sources, (*(held if job.held_out else ()), *evaluated), strict=True):
        check_enough(job, name, rows)
    order_of(job, [each.rows for each in looked["data"]])
    return tuple(note for each in (*looked["data"], *looked["eval"]) for note in each.notes)


class _Looked(NamedTuple):
    """Of a job on one source: how many rows it has, and how many are ``held`` out."""

    notes: tuple[DataNote, ...]
    rows: int
    held: int


def _look_at_source(job: Job, vocab_size: int) -> _Looked:
    path = Path(job.data.path)
    if job.data.source == "stdlib":
        files, root = stdlib_files(), Path(sysconfig.get_path("stdlib"))
        return _Looked((), *_look_at_files(job, "the standard library", root, files, vocab_size))
    if job.data.is_bytes and path.is_dir():
        files = files_in(path)
        return _Looked(_notes(path, files), *_look_at_files(job, job.data.path, path, files, vocab_size))
    rows, held, inputs = open_source(job)
    inputs.close()
    notes = _notes(path.parent, [path]) if job.data.is_bytes else ()
    return _Looked(notes, rows.count, held.count if held is not None else 0)


def _look_at_files(
    job: Job, name: str, root: Path, files: Sequence[Path], vocab_size: int
) -> tuple[int, int]:
    """How many rows their bytes make, and how many those that are held out."""
    try:
        sizes = [file.stat().st_size for file in files]
        kept = both_sides(job, name, sum(sizes), FileBorders(sizes))
        trained = sum(sizes) if kept.trained is None else len(kept.trained)
        rows = trained // job.train.sequence, len(kept.held or ()) // job.train.sequence
        if vocab_size - spare_of(job) > np.iinfo(np.uint8).max:
            return rows
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
    return rows


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
