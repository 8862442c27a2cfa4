"""Reaps processes that fall to the agent because whoever started them has ended.

Owns that the agent is the one they fall to (a subreaper, prctl(2)), and that no remains of strangers stay: a
device that dies may leave processes of its own behind. The agent's own children are listed in ``own`` while
they live, and are reaped by who started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """Of one agent. ``busy``: somebody is just being born, whom nobody knows yet."""

    def __init__(self) -> None:
        self.own: set[int] = set()
        self.busy = False

    @staticmethod
    def adopt() -> bool:
        """Have orphans fall to this process from now on; whether the kernel does that."""
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)

    def reap(self) -> None:
        """Reap strangers that have ended. Call it from the main thread, at SIGCHLD: it is to the main thread
        that they fall.
        """
        if self.busy:
            return
        with contextlib.suppress(OSError):  # a kernel without that list: they stay until the agent ends
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
            for pid in {int(child) for child in children.split()} - self.own:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
