"""The samples of a micro-batch, as a device would train on them: ``python -m oobleckd.worker.tools.samples``.

Opens the data of a job as every device does, and prints rows as JSON. Owns which documents a row has; which
tokens, ``oobleckd.worker.data.corpus`` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.host.jobfile import load_job
from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobparts import jobs_of_evaluation
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.samplerows import FILL, Border, SampleRow, SampleRows
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import file_of, index_of
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.data.rows import Rows, TokenStretch
from oobleckd.worker.models import MASKED, Batch
from oobleckd.worker.runtime.errors import UserError


def samples(job: Job, step: int, micro_batch: int) -> SampleRows:
    """Rows of micro-batch ``micro_batch`` of step ``step``, counted from 1. Raises UserError, DataError."""
    corpus, parts = open_corpus(job), jobs_of_sources(job)
    starts = [_document_starts(part) for _, part in parts]
    batch = corpus.batch(step - 1, micro_batch)
    rows = []
    for number, sample in enumerate(corpus.sample_ids(step - 1, micro_batch)):
        place = corpus.place(sample)
        found = _Drawn(corpus.sources[place.source], place.row, starts[place.source])
        rows.append(_shown(job, batch, number, found, sample, place.epoch, parts[place.source][0]))
    corpus.inputs.close()
    return SampleRows(step, micro_batch, tuple(rows))


def evaluation_samples(job: Job, source: str, micro_batch: int) -> SampleRows:
    """Rows of a micro-batch of ``source`` in every evaluation. Raises UserError, DataError."""
    corpus, which = open_corpus(job), job.eval_sources.index(source)
    evaluation = corpus.evaluation
    assert evaluation is not None, "a job with a source to evaluate on has text to evaluate on"
    held = jobs_of_sources(job) if job.held_out else ()
    starts = _document_starts((*held, *jobs_of_evaluation(job))[which][1])
    number = which * job.eval_micro_batches + micro_batch
    batch = evaluation.batch(number)
    rows = [
        _shown(job, batch, at, _Drawn(evaluation.sources[which].rows, row, starts), row, 0, source)
        for at, row in enumerate(evaluation.rows_of(number))
    ]
    corpus.inputs.close()
    return SampleRows(0, micro_batch, tuple(rows))


class _Drawn(NamedTuple):
    """Row ``number`` of ``rows``, in which documents begin at ``starts`` (None: it has none)."""

    rows: Rows
    number: int
    starts: npt.NDArray[np.int64] | None


def _shown(
    job: Job, batch: Batch, at: int, drawn: _Drawn, sample: int, epoch: int, source: str
) -> SampleRow:  # fmt: skip
    """The row that is number ``at`` of ``batch``."""
    stretches, first = drawn.rows.stretches(drawn.number), 0 if job.model.family in MASKED else 1
    asked = (batch.labels[at] != NOT_ASKED).nonzero().flatten().tolist()
    return SampleRow(
        sample,
        epoch,
        stretches[0].token,
        tuple(drawn.rows.row(drawn.number).tokens.tolist()),
        tuple(batch.inputs[at].tolist()),
        tuple(place for place in asked if place >= first),  # nobody can name the first token of a row
        tuple(_borders(drawn.starts, stretches, job.train.sequence)),
        source,
    )


def _document_starts(job: Job) -> npt.NDArray[np.int64] | None:
    """The first token of each document, of a job on one source; None where it has none."""
    if job.data.is_prepared:
        return read_index(Path(job.data.prepared) / INDEX).document_starts()
    if job.data.is_bytes:
        return None
    index = index_of(file_of(Path(job.data.path), job.data.kind))
    return read_index(index).document_starts() if index is not None else None


def _borders(
    starts: npt.NDArray[np.int64] | None, stretches: Sequence[TokenStretch], sequence: int
) -> Iterator[Border]:
    """Of a row that has these ``stretches`` of the data."""
    at = 0
    for token, length in stretches if starts is not None else ():
        assert starts is not None
        document = int(np.searchsorted(starts, token, side="right")) - 1
        yield Border(at, document, token - int(starts[document]))
        for more in range(document + 1, int(np.searchsorted(starts, token + length))):
            if starts[more] < starts[more + 1]:  # an empty one is nowhere
                yield Border(at + int(starts[more]) - token, more)
        at += length
    if 0 < at < sequence:
        yield Border(at, FILL)


@click.command()
@click.option("--job", "job_file", type=click.Path(path_type=Path), required=True)
@click.option("--step", type=int, default=0)
@click.option("--micro-batch", type=int, required=True)
@click.option("--source", default="", help="Of an evaluation.")
def main(job_file: Path, step: int, micro_batch: int, source: str) -> None:
    """Print the samples of a micro-batch of a job.toml."""
    try:
        job = load_job(job_file)
        told = evaluation_samples(job, source, micro_batch) if source else samples(job, step, micro_batch)
    except (JobError, UserError, DataError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    print(msgspec.json.encode(told).decode())


if __name__ == "__main__":
    main()
