"""A job.toml on the disk. Owns reading it; what may be in it is ``protocol.job``'s."""

from __future__ import annotations

import tomllib
from pathlib import Path

from oobleckd.protocol.job import Job, JobError, parse_job, reject_old_names


def load_job(path: Path) -> Job:
    """The job of a file. Raises JobError with the path of the key that is wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise JobError("", f"{path}: no such file", "name a job.toml; examples/ has some") from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobError("", f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise JobError("", f"{path}: not TOML: {error}", "see docs/job-toml.md") from error
    reject_old_names(raw)
    return parse_job(raw)
