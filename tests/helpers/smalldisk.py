"""A small file system of its own for checkpoints, which can be filled and emptied.

A real one, as only that says ENOSPC where a disk does: a tmpfs, for which root is needed. Whoever has not got it is told so (``can_mount``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_BALLAST = "ballast"


def can_mount() -> bool:
    """Whether this process may mount one."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


class SmallDisk:
    """``path`` is its mount point, made if need be; unmounted at the end."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self._size_bytes = path, size_bytes

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "tmpfs", self.path], check=True
        )
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        subprocess.run(["umount", "-l", self.path], check=False)

    @property
    def filled(self) -> bool:
        """Whether ``fill`` took what was free."""
        return (self.path / _BALLAST).exists()

    def fill(self) -> None:
        """To the last byte."""
        with suppress(OSError), (self.path / _BALLAST).open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """What ``fill`` took is free again."""
        (self.path / _BALLAST).unlink(missing_ok=True)
