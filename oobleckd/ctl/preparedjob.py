"""A job with the folders of its prepared data, as far as they are here.

Owns how they are found, and what is said where they are not. A job that is submitted without them has a node
prepare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oobleckd.ctl.output import USAGE, Failure
from oobleckd.prepare.objects import is_url
from oobleckd.prepare.plans import has_plan
from oobleckd.prepare.sources import root_of
from oobleckd.prepare.wanted import FoundFolder, find, look_at, wanted_of
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import Data, SourceTable, in_source
from oobleckd.protocol.jobparts import lacks_folder, parts_of, with_folders
from oobleckd.tokens.errors import DataError, MissingPackage
from oobleckd.tokens.manifest import read_manifest
from oobleckd.words import count


def with_prepared(job: Job, source: Path) -> Job:
    """``job`` with the folders of its prepared data, where it trains on such. Raises Failure where one is not
    there, or lacks rows as the job wants them.
    """
    found, lacks = _found(job, source)
    if lacks:
        raise _refused(source, lacks)
    return found


def as_found(job: Job, source: Path) -> Job:
    """``job`` with its prepared folders that are here; the others a node makes. Raises Failure where a look
    tells that they cannot be made, or a folder that the job names lacks rows as it wants them.
    """
    found, lacks = _found(job, source)
    if lacks and not lacks_folder(found):
        raise _refused(source, lacks)
    return found


def _refused(source: Path, lacks: str) -> Failure:
    hint = f"run `oobleckctl data prepare {source}` once, on any machine that sees it"
    return Failure(f"{source}: {lacks}", hint, USAGE)


def _found(job: Job, file: Path) -> tuple[Job, str]:
    """The job with the folders that are there and whole, and what is not, the first of it."""
    folders, lacks = [], ""
    for table, name, part in parts_of(job):
        folder, lack = part.data.prepared, ""
        if part.data.is_prepared:
            made = None
            with translated(file, name, table), suppress(MissingPackage):  # a node may have it
                made = _named(Path(folder)) if folder else _made_of(part)
            if made is not None and not has_plan(part, *made):
                lack = _not_planned(part)
            elif made is not None:
                folder = str(made.folder)
            elif not folder:
                lack = "is not prepared, or was changed since"
        lacks = lacks or (lack and in_source(name, f"data.path: {part.data.path} {lack}", table))
        folders.append(folder)
    return with_folders(job, folders), lacks


def _made_of(job: Job) -> FoundFolder | None:
    """The folder of a job on one source. Raises DataError where none could be made."""
    wanted = wanted_of(job)
    made = find(wanted)
    if made is None:
        look_at(wanted)
    return made


def _not_planned(job: Job) -> str:
    rows = f"rows of {count(job.train.sequence, 'token')}"
    return f"is prepared, but not {job.data.row_kind} into {rows}"


def _named(folder: Path) -> FoundFolder | None:
    """The one that the job names; None where it does not lie here, or nodes will say what is wrong."""
    try:
        return FoundFolder(folder, read_manifest(folder))
    except DataError:
        return None


def is_here(data: Data) -> bool:
    """Whether prepared data, or else the text that it is made of, lies on this machine, or in a store."""
    if data.prepared:
        return Path(data.prepared).exists()
    return is_url(data.path) or root_of(data.path).exists()


@contextmanager
def translated(file: Path, name: str = "", table: SourceTable = "data") -> Iterator[None]:
    """What is wrong with data becomes the end of the command; ``name``: of a source of several."""
    try:
        yield
    except DataError as error:
        where = f"{file}: " if error.problem.startswith("data.") else ""
        raise Failure(f"{where}{in_source(name, error.problem, table)}", error.hint, USAGE) from error
