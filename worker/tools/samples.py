"""The samples of a micro-batch, as a device would train on them: ``python -m oobleckd.worker.tools.samples``.

Opens the data of a job as every device does, and prints rows as JSON. Owns which documents a row has; which
tokens, ``oobleckd.worker.data.corpus`` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.host.jobfile import load_job
from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.samplerows import Border, SampleRow, SampleRows
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import file_of, index_of
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.runtime.errors import UserError


def samples(job: Job, step: int, micro_batch: int) -> SampleRows:
    """Rows of micro-batch ``micro_batch`` of step ``step``, counted from 1. Raises UserError, DataError."""
    corpus, sequence = open_corpus(job), job.train.sequence
    parts = jobs_of_sources(job)
    starts = {index: _document_starts(part) for index, (_, part) in enumerate(parts)}
    batch = corpus.batch(step - 1, micro_batch)
    tokens = corpus.tokens(step - 1, micro_batch).tolist()
    shifted = bool((batch.inputs == batch.labels).all())  # a causal model names the next token
    rows = []
    for number, sample in enumerate(corpus.sample_ids(step - 1, micro_batch)):
        place = corpus.place(sample)
        first, of_documents = place.row * sequence, starts[place.source]
        asked = (batch.labels[number] != NOT_ASKED).nonzero().flatten().tolist()
        rows.append(
            SampleRow(
                sample,
                place.epoch,
                first,
                tuple(tokens[number]),
                tuple(batch.inputs[number].tolist()),
                tuple(asked[1:] if shifted else asked),
                tuple(_borders(of_documents, first, sequence)) if of_documents is not None else (),
                parts[place.source][0],
            )
        )
    corpus.inputs.close()
    return SampleRows(step, micro_batch, tuple(rows))


def _document_starts(job: Job) -> npt.NDArray[np.int64] | None:
    """The first token of each document, of a job on one source; None where it has none."""
    if job.data.is_prepared:
        return read_index(Path(job.data.prepared) / INDEX).document_starts()
    if job.data.is_bytes:
        return None
    index = index_of(file_of(Path(job.data.path), job.data.kind))
    return read_index(index).document_starts() if index is not None else None


def _borders(starts: npt.NDArray[np.int64], first: int, length: int) -> Iterator[Border]:
    document = int(np.searchsorted(starts, first, side="right")) - 1
    yield Border(0, document, first - int(starts[document]))
    for more in range(document + 1, len(starts) - 1):
        if starts[more] >= first + length:
            break
        yield Border(int(starts[more]) - first, more)


@click.command()
@click.option("--job", "job_file", type=click.Path(path_type=Path), required=True)
@click.option("--step", type=int, required=True)
@click.option("--micro-batch", type=int, required=True)
def main(job_file: Path, step: int, micro_batch: int) -> None:
    """Print the samples of a micro-batch of a job.toml."""
    try:
        told = samples(load_job(job_file), step, micro_batch)
    except (JobError, UserError, DataError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    print(msgspec.json.encode(told).decode())


if __name__ == "__main__":
    main()
