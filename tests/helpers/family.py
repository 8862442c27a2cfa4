"""Who belongs to a local cluster: every process that was started, directly or not, with its state folder."""

from __future__ import annotations

from pathlib import Path

from oobleckd.ctl import processes
from oobleckd.ctl.processes import ClusterProcess


def members(state: Path) -> frozenset[ClusterProcess]:
    """Every living process with ``OOBLECK_STATE=state`` in its environment."""
    mark = f"OOBLECK_STATE={state}".encode()
    found = [
        processes.identify(int(path.name))
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and mark in _environ(path).split(b"\0")
    ]
    return frozenset(process for process in found if process)


def _environ(path: Path) -> bytes:
    try:
        return (path / "environ").read_bytes()
    except OSError:  # it has ended, or is a stranger's
        return b""
