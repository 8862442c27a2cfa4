"""Names of the semaphores that a pool of processes makes, so that those of a killed program can be removed.

multiprocessing leaves them to a helper process (the resource tracker), which may be killed together with the
program; then they stay in memory until the machine is restarted. Their names are random. Here they begin with
whose they are, so the next program that is the only one to have that name removes what is left.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")  # noqa: S108 - where glibc has them
_AS_FILES = "sem."


def name_after(owner: str) -> None:
    """Have all semaphores of this process, from now on, named after ``owner``, which is this process alone;
    what an earlier one of that name left is removed.
    """
    prefix, mine = f"oobleckd-{owner}-", f"oobleckd-{owner}-{os.getpid()}"
    with suppress(OSError):  # another system has them elsewhere
        for left in _FOLDER.glob(f"{_AS_FILES}{prefix}*"):
            if not left.name.startswith(f"{_AS_FILES}{mine}-"):
                with suppress(OSError):
                    left.unlink()
    multiprocessing.current_process()._config["semprefix"] = f"/{mine}"  # type: ignore[attr-defined] # noqa: SLF001
