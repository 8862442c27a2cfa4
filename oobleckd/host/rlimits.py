"""The limit of open files of the programs that need many."""

from __future__ import annotations

import resource

from oobleckd.words import count

RAISE_FILES = "raise it: LimitNOFILE= of the unit, `ulimit -n`, or /etc/security/limits.conf"


def raise_file_limit() -> int:
    """As many as this process is allowed, and how many that are: a daemon has a connection for each node, a
    device some for each other one. What it starts inherits that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def too_few_files(allowed: int, needed: int, what: str) -> str:
    """What is wrong where ``what`` needs more than are allowed; "" where they will do."""
    if allowed >= needed:
        return ""
    return f"a process may have {count(allowed, 'file')} open, and {what} takes {needed:,}"
