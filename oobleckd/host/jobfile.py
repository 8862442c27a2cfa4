"""A job.toml on the disk. Owns reading it; what may be in it is ``protocol.job``'s."""

from __future__ import annotations

from pathlib import Path

from oobleckd.host import anyfile
from oobleckd.protocol.job import Job, parse_job, reject_old_names
from oobleckd.protocol.jobtable import SEE, JobError


def load_job(path: Path) -> Job:
    """The job of a file. Raises JobError with the path of the key that is wrong."""
    try:
        raw = anyfile.toml(path, SEE)
    except FileNotFoundError as error:
        raise JobError(
            "", f"{path}: no such file", "name a job.toml: docs/job-toml.md begins with one"
        ) from error
    except anyfile.FileError as error:
        raise JobError("", f"{path}: {error}", error.hint) from error
    reject_old_names(raw)
    return parse_job(raw)
