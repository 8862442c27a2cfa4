"""What there is to say of prepared data, or of a file of tokens, and of the job that trains on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobdata import in_source
from oobleckd.protocol.mixtures import weights_of
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import file_of, index_of, read_tokens
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, read_manifest
from oobleckd.tokens.mixture import Mixture, planned
from oobleckd.tokens.packing import rule_of
from oobleckd.tokens.plan import plan_folder, read_plan


class DataStats(msgspec.Struct, frozen=True):
    """``path``: of the prepared folder, or of the file. ``documents``, and their lengths: 0 where nobody
    says. ``sequences``: of a pass over all, made as ``rows`` says; ``left_over``: tokens that are in none.
    ``epochs``: passes that the job makes. ``padding``: share of positions that hold no token. ``targets``:
    tokens of a pass that a causal model is asked for. ``long``: documents that are longer than a sequence.
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
    rows: str = "windows"
    targets: int = 0
    long: int = 0


class SourceStats(msgspec.Struct, frozen=True):
    """One of several sources. ``samples``: that the job draws of it; ``share``: of all; ``target_share``: of
    what a causal model is asked for; ``epochs``: passes that the job makes over it. ``limit_step``: the step,
    from 1, in which it reaches its limit; 0: it does not.
    """

    name: str
    samples: int
    share: float
    epochs: float
    limit_step: int
    data: DataStats
    target_share: float = 0.0


class StageStats(msgspec.Struct, frozen=True):
    """Steps ``first`` to ``last``, from 1: of each source by name, the share that its weight asks for, and
    the one that it has.
    """

    first: int
    last: int
    wanted: dict[str, float]
    shares: dict[str, float]


class MixtureStats(msgspec.Struct, frozen=True):
    """Of a job on several sources."""

    sources: tuple[SourceStats, ...]
    stages: tuple[StageStats, ...]


def mixture_stats(job: Job) -> MixtureStats:
    """Also where a limit is too low for the job. Raises DataError."""
    told = []
    for name, part in jobs_of_sources(job):
        try:
            told.append(stats_of(part))
        except DataError as error:
            raise DataError(in_source(name, error.problem), error.hint) from error
    mixture, sizes = planned(job, [each.sequences for each in told]), job.batch_sizes
    upto = mixture.end if mixture.over is None else mixture.over
    drawn = mixture.counts(upto)
    targets = [samples * each.targets / each.sequences for samples, each in zip(drawn, told, strict=True)]
    sources = tuple(
        SourceStats(
            source.name,
            samples,
            samples / upto if upto else 0.0,
            samples / each.sequences,
            0 if limit.reached is None else sizes.step_of(limit.reached) + 1,
            each,
            asked / (sum(targets) or 1.0),
        )
        for source, samples, limit, each, asked in zip(
            job.data.sources, drawn, mixture.limits, told, targets, strict=True
        )
    )
    return MixtureStats(sources, tuple(_stages(job, mixture, upto)))


def _stages(job: Job, mixture: Mixture, upto: int) -> Iterator[StageStats]:
    names, sizes = [source.name for source in job.data.sources], job.batch_sizes
    stages = weights_of(job.data.sources, job.data.stage)
    for (first, weights), following in zip(
        stages, [*(step for step, _ in stages[1:]), job.train.steps + 1], strict=True
    ):
        begin, end = min(sizes.before(first - 1), upto), min(sizes.before(following - 1), upto)
        had = [
            after - before for before, after in zip(mixture.counts(begin), mixture.counts(end), strict=True)
        ]
        yield StageStats(
            first,
            following - 1,
            {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)},
            {name: each / max(1, end - begin) for name, each in zip(names, had, strict=True)},
        )


def stats_of(job: Job) -> DataStats:
    """Of a job on one source. Raises DataError."""
    path = Path(job.data.prepared) if job.data.is_prepared else file_of(Path(job.data.path), job.data.kind)
    try:
        return _prepared(job, path) if job.data.is_prepared else _ready_made(job, path)
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: {error.strerror}", "make it readable for this user"
        ) from error


def _prepared(job: Job, folder: Path) -> DataStats:
    manifest, rule = read_manifest(folder), rule_of(job)
    starts = read_index(folder / INDEX).document_starts()
    told = _counted(job, folder, manifest.tokens, manifest.dtype, starts)
    told = msgspec.structs.replace(
        told, largest=manifest.largest, vocabulary=manifest.vocabulary, bad_rows=manifest.num_bad_rows
    )
    if rule is None:
        return told
    plan = read_plan(plan_folder(folder, manifest, rule), manifest, rule)
    return msgspec.structs.replace(
        told,
        rows=rule.kind,
        sequences=plan.rows,
        left_over=manifest.tokens - plan.filled,
        epochs=_asked(job) / plan.rows,
        padding=plan.padding,
        targets=plan.targets,
        long=plan.long,
    )


def _ready_made(job: Job, file: Path) -> DataStats:
    tokens = read_tokens(file, job.data.dtype, job.data.kind)
    index = index_of(file)
    starts = read_index(index).document_starts() if index is not None else np.zeros(1, np.int64)
    return _counted(job, file, len(tokens), tokens.dtype.name, starts)


def _counted(job: Job, path: Path, tokens: int, dtype: str, starts: npt.NDArray[np.int64]) -> DataStats:
    """With windows."""
    lengths, sequence = np.diff(starts), job.train.sequence
    sequences, left_over = divmod(tokens, sequence)
    targets = sequences * (sequence - 1)
    if job.data.is_separate:
        begins = np.unique(starts[starts < sequences * sequence])
        targets -= int(np.count_nonzero(begins % sequence))
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
        epochs=_asked(job) / sequences if sequences else 0.0,
        targets=targets,
        long=int(np.count_nonzero(lengths > sequence)),
    )


def _asked(job: Job) -> int:
    """Samples of the job."""
    return job.batch_sizes.before(job.train.steps)
