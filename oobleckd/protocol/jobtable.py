"""What all tables of a job.toml are, and the error that names what is wrong with one."""

from __future__ import annotations

import functools

import msgspec

SEE = "docs/job-toml.md explains every key"


class JobTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a job.toml: a key that it does not have is an error."""


@functools.cache
def fields_of(table: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """``msgspec.structs.fields``, which reads and compiles all types anew each time: up to a millisecond."""
    return msgspec.structs.fields(table)


class JobError(ValueError):
    """A job.toml that cannot be run: ``path`` of the key, what is wrong, and a hint."""

    def __init__(self, path: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem
        self.hint = hint
