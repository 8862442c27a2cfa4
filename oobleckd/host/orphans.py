"""Ends processes with the one that started them, also if that was killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_ppid: int) -> None:
    """Have the kernel end this process when the thread that started it ends. Call it first of all.

    ``expected_ppid`` closes the gap: a parent that died before this call is seen by its absence. (Not in
    a preexec function: those are unsafe in a parent with threads.) Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected_ppid:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Called in a process that multiprocessing started: from now on it ends when its parent does. A pool by
    itself has them finish what they are at.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
