"""The parts of a job that read text: each source of `[data]`, and each `[[eval.source]]`.

Owns the jobs on one of them alone, and the folders that all of them are prepared in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobdata import Data, SourceTable, with_parts
from oobleckd.protocol.jobeval import Eval


class JobPart(NamedTuple):
    """``name``: of the source, "" of a single one of `[data]`; ``job``: on it alone."""

    table: SourceTable
    name: str
    job: Job


def jobs_of_evaluation(job: Job) -> tuple[tuple[str, Job], ...]:
    """Of each `[[eval.source]]` its name and a job on it alone, which evaluates on nothing."""
    return tuple(
        (source.name, msgspec.structs.replace(job, data=job.data.evaluated(source), eval=Eval()))
        for source in job.eval.source
    )


def parts_of(job: Job) -> tuple[JobPart, ...]:
    """Those of `[data]` first."""
    return (
        *(JobPart("data", name, part) for name, part in jobs_of_sources(job)),
        *(JobPart("eval", name, part) for name, part in jobs_of_evaluation(job)),
    )


def with_data_of(job: Job, data: Data, parts: Sequence[Data]) -> Job:
    """``job`` on ``data``, with paths and folders as the ``parts`` of ``parts_of`` have them."""
    num_sources = len(parts) - len(job.eval.source)
    sources = tuple(
        msgspec.structs.replace(source, path=part.path, prepared=part.prepared)
        for source, part in zip(job.eval.source, parts[num_sources:], strict=True)
    )
    table = msgspec.structs.replace(job.eval, source=sources)
    return msgspec.structs.replace(job, data=with_parts(data, parts[:num_sources]), eval=table)


def with_folders(job: Job, folders: Sequence[str]) -> Job:
    """``job`` with a prepared folder for each of its parts, in order; "": it has it, or needs none. Who knows
    of no evaluation names those of `[data]` alone.
    """
    parts = [part.job.data for part in parts_of(job)]
    found = [
        msgspec.structs.replace(part, prepared=folder or part.prepared)
        for part, folder in zip(parts, (*folders, *[""] * len(parts)), strict=False)
    ]
    return with_data_of(job, job.data, found)


def without_folders(job: Job) -> Job:
    """``job`` as it is before any of it is prepared."""
    parts = [msgspec.structs.replace(part.job.data, prepared="") for part in parts_of(job)]
    return with_data_of(job, job.data, parts)


def is_prepared(job: Job) -> bool:
    """Whether any part of it is read as prepared, in a folder of its own."""
    return any(part.job.data.is_prepared for part in parts_of(job))


def lacks_folder(job: Job) -> bool:
    """Whether a folder of any part is still to be prepared."""
    return any(part.job.data.lacks_folder for part in parts_of(job))
