"""Holds a checkpoint that somebody reads, by a lock on its manifest, which ends with the process that has it.

Who prunes passes over a checkpoint that is held; it goes with the next one that is complete after that. Where
a file system has no locks nothing is held, and who reads tries again with a newer checkpoint.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MANIFEST = "manifest.json"


@contextmanager
def held(checkpoint: Path) -> Iterator[bool]:
    """Hold ``checkpoint`` until the block ends; whether it is there, complete."""
    try:
        handle = os.open(checkpoint / _MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        # A lock of the process that reads: a lease in the daemon would have to be renewed and to outlive
        # the daemon; a lock ends with who has it. (D-checkpoints-016)
        _lock(handle, fcntl.LOCK_SH)
        yield _is_there(checkpoint, handle)
    finally:
        os.close(handle)


@contextmanager
def free(checkpoint: Path) -> Iterator[bool]:
    """Whether nobody holds ``checkpoint``; until the block ends nobody can."""
    try:
        handle = os.open(checkpoint / _MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield True  # it has no manifest, so nobody reads it
        return
    try:
        yield _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)


def _lock(handle: int, how: int) -> bool:
    """Whether nobody else has a lock that forbids it."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    return True


def _is_there(checkpoint: Path, handle: int) -> bool:
    """Whether it was not removed before it was held."""
    try:
        return (checkpoint / _MANIFEST).stat().st_ino == os.fstat(handle).st_ino
    except OSError:
        return False
