"""What there is to say of prepared data, or of a file of tokens, and of the job that trains on it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.protocol.job import Job
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import file_of, index_of, read_tokens
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, read_manifest


class DataStats(msgspec.Struct, frozen=True):
    """``path``: of the prepared folder, or of the file. ``documents``, and their lengths: 0 where nobody
    says. ``sequences``: of a pass over all tokens; ``left_over``: tokens behind the last whole one, which no
    pass reads. ``epochs``: passes that the job makes. ``padding``: share of positions that hold no token.
    ``largest``, ``vocabulary``: of prepared data, else -1 and 0.
    """

    path: str
    tokens: int
    dtype: str
    documents: int
    mean: float
    median: float
    longest: int
    sequences: int
    left_over: int
    epochs: float
    largest: int = -1
    vocabulary: int = 0
    bad_rows: int = 0
    padding: float = 0.0


def stats_of(job: Job) -> DataStats:
    """Raises DataError."""
    path = Path(job.data.prepared) if job.data.is_prepared else file_of(Path(job.data.path), job.data.source)
    try:
        return _prepared(job, path) if job.data.is_prepared else _ready_made(job, path)
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: {error.strerror}", "make it readable for this user"
        ) from error


def _prepared(job: Job, folder: Path) -> DataStats:
    manifest = read_manifest(folder)
    told = _counted(
        job, folder, manifest.tokens, manifest.dtype, read_index(folder / INDEX).document_starts()
    )
    return msgspec.structs.replace(
        told, largest=manifest.largest, vocabulary=manifest.vocabulary, bad_rows=manifest.num_bad_rows
    )


def _ready_made(job: Job, file: Path) -> DataStats:
    tokens = read_tokens(file, job.data.dtype, job.data.source)
    index = index_of(file)
    starts = read_index(index).document_starts() if index is not None else np.zeros(1, np.int64)
    return _counted(job, file, len(tokens), tokens.dtype.name, starts)


def _counted(job: Job, path: Path, tokens: int, dtype: str, starts: npt.NDArray[np.int64]) -> DataStats:
    lengths = np.diff(starts)
    sequences, left_over = divmod(tokens, job.train.sequence)
    asked = job.train.steps * job.train.global_batch
    return DataStats(
        path=str(path),
        tokens=tokens,
        dtype=dtype,
        documents=len(lengths),
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        sequences=sequences,
        left_over=left_over,
        epochs=asked / sequences if sequences else 0.0,
    )
