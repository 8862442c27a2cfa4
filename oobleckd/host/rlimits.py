"""The limit of open files of the programs that need many."""

from __future__ import annotations

import resource


def raise_file_limit() -> None:
    """As many as this process is allowed: a daemon has a connection for each node, a device some for each
    other one. What it starts inherits that.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
