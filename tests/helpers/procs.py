"""Processes of others, by what the kernel says of them: children, and their end as an event."""

from __future__ import annotations

import os
import select
from pathlib import Path


def child_with(pid: int, word: str) -> int | None:
    """The one child of ``pid`` that has ``word`` in its command line; None where there is none."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for file in children for child in file.read_text().split()]
    return next((each for each in pids if word in _command_line(each)), None)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended
        return ""


def handle_of(pid: int) -> int:
    """A process that runs, for ``await_end``."""
    return os.pidfd_open(pid)


def await_end(handle: int, timeout_s: float) -> None:
    """Wait until it has ended."""
    ready, _, _ = select.select([handle], [], [], timeout_s)
    os.close(handle)
    assert ready, "it runs on"
