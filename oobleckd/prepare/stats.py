"""What there is to say of prepared data and of the job that trains on it, in numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from oobleckd.protocol.job import Job
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, Manifest


class DataStats(msgspec.Struct, frozen=True):
    """``sequences``: of a pass over all tokens; ``left_over``: tokens behind the last whole one, which no
    pass reads. ``epochs``: passes that the job makes. ``padding``: share of positions that hold no token.
    """

    folder: str
    documents: int
    tokens: int
    mean: float
    median: float
    longest: int
    sequences: int
    left_over: int
    epochs: float
    dtype: str
    largest: int
    vocabulary: int
    bad_rows: int
    padding: float = 0.0


def stats_of(job: Job, folder: Path, manifest: Manifest) -> DataStats:
    """Raises DataError, OSError where the index cannot be read."""
    index = read_index(folder / INDEX)
    lengths = np.diff(index.document_starts())
    sequences, left_over = divmod(manifest.tokens, job.train.sequence)
    asked = job.train.steps * job.train.global_batch
    return DataStats(
        folder=str(folder),
        documents=manifest.documents,
        tokens=manifest.tokens,
        mean=manifest.tokens / max(1, manifest.documents),
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        sequences=sequences,
        left_over=left_over,
        epochs=asked / sequences if sequences else 0.0,
        dtype=manifest.dtype,
        largest=manifest.largest,
        vocabulary=manifest.vocabulary,
        bad_rows=manifest.num_bad_rows,
    )
