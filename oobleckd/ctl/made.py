"""Files that a verb makes of a job, such as a plot: written whole, and over nothing that others made."""

from __future__ import annotations

import re
from pathlib import Path

from oobleckd.ctl.output import FAILED, USAGE, Failure, fail
from oobleckd.host.durable import write_whole

_HEAD_BYTES = 4096


def usual_file(job_id: str, suffix: str) -> Path:
    """Where a file of a job goes when nobody says: in the current folder, by the job's id."""
    return Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '_', job_id).lstrip('.') or 'job'}.{suffix}")


def check_free(path: Path, mark: str) -> None:
    """Fail unless ``path`` can be written: nothing is there, or a file with ``mark`` near its beginning, as
    this verb makes it.
    """
    if not path.parent.is_dir():
        fail(f"{path}: there is no folder {path.parent}", "name a file in a folder that is there", USAGE)
    if not path.exists():
        return
    if not path.is_file():
        fail(f"{path} is no file", "name a file with --to", USAGE)
    try:
        with path.open("rb") as file:
            ours = mark.encode() in file.read(_HEAD_BYTES)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", "name another file with --to", FAILED) from error
    if not ours:  # the usual name may be of somebody's own picture (D-curves-003)
        fail(
            f"{path} is there, and not made by {mark}",
            "name another file with --to, or remove that one",
            USAGE,
        )


def write_made(path: Path, data: bytes) -> None:
    """Put the file in place. Fails where the disk refuses."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}", "name another file with --to", FAILED) from error
