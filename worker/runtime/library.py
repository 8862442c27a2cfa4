"""Libraries of C that an installation compiled, and the threads that call them.

Owns how one is found, that it is the one that this code was written for, and in how many threads a pass over
memory is made. Where a library is missing (no C compiler at installation), or is of another interface
(sources updated without a new installation), there is none, and nothing fails.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_PART = 1 << 18
"""Numbers that are worth a thread: a pass over them takes several times as long as handing them over."""


def library(folder: Path, module: str, function: str, interface: int) -> ctypes.CDLL | None:
    """The library ``module`` in ``folder``, if there is one whose ``function`` says that it is of this
    ``interface``.
    """
    for suffix in EXTENSION_SUFFIXES:
        file = folder / f"{module}{suffix}"
        if file.exists():
            return _loaded(file, function, interface)
    return None


def _loaded(file: Path, function: str, interface: int) -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(str(file))
        usable = getattr(found, function)() == interface
    except (OSError, AttributeError):  # of another machine, or of something else
        return None
    # What an update of the sources leaves behind is not what they call. (D-kernels-003)
    return found if usable else None


def num_parts(num_numbers: int) -> int:
    """How many threads work on so many numbers: as many as torch has, where that is worth it."""
    return max(1, min(torch.get_num_threads(), num_numbers // _PART))


def in_parts(num: int, work: Callable[[int], None]) -> None:
    """Do ``work`` for each of ``num`` parts, in as many threads."""
    if num == 1:
        work(0)
    else:
        list(_threads(num).map(work, range(num)))


@functools.cache
def _threads(num: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num, "parts")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads stay with the parent
