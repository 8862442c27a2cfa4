"""A job.toml on the disk. Owns reading it; what may be in it is ``protocol.job``'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.host import anyfile
from oobleckd.protocol.job import Job, parse_job, reject_old_names, table_of
from oobleckd.protocol.jobtable import SEE, JobError


def load_job(path: Path, changes: Mapping[str, Any] | None = None) -> Job:
    """The job of a file, with other values at the keys of ``changes``, such as ``train.steps``. Raises
    JobError with the path of the key that is wrong.
    """
    try:
        raw = anyfile.toml(path, SEE)
    except FileNotFoundError as error:
        raise JobError(
            "", f"{path}: no such file", "name a job.toml: docs/job-toml.md begins with one"
        ) from error
    except anyfile.FileError as error:
        raise JobError("", f"{path}: {error}", error.hint) from error
    return _parsed(raw, changes or {})


def changed_job(job: Job, changes: Mapping[str, Any]) -> Job:
    """``job`` with other values at the keys of ``changes``. Raises JobError with the path of the key that is
    wrong.
    """
    return _parsed(msgspec.to_builtins(table_of(job)), changes)


def _parsed(raw: dict[str, Any], changes: Mapping[str, Any]) -> Job:
    for key, value in changes.items():
        _set(raw, key, value)
    reject_old_names(raw)
    return parse_job(raw)


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    table = raw
    for depth, name in enumerate(tables, 1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise JobError(key, f"{'.'.join(tables[:depth])} is no table", "change the file itself")
    table[last] = value
