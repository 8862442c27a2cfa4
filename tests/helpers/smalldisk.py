"""A small file system of its own for checkpoints, which can be filled and emptied.

A real one, as only that says ENOSPC where a disk does: a tmpfs, for which root is needed. For whoever is not
root, whom permissions bind, it is a folder that may not be written instead: another error, and the same
consequences.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_BALLAST = "ballast"


class SmallDisk:
    """``path`` is its mount point, made if need be; unmounted at the end. ``filled``: whether nothing can be
    written now.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self._size_bytes = path, size_bytes
        self._root = os.geteuid() == 0
        self.filled = False

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        if self._root:
            size = f"size={self._size_bytes}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.path], check=True)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.free()
        if self._root:
            subprocess.run(["umount", "-l", self.path], check=False)

    def fill(self) -> None:
        """To the last byte. Again where somebody has given back some of it, such as an older checkpoint."""
        self.filled = True
        if not self._root:
            self._chmod(0o555)
            return
        with suppress(OSError), (self.path / _BALLAST).open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """What ``fill`` took is free again."""
        if self.filled and self._root:
            (self.path / _BALLAST).unlink(missing_ok=True)
        elif self.filled:
            self._chmod(0o755)
        self.filled = False

    def _chmod(self, mode: int) -> None:
        for folder in [self.path, *(path for path in self.path.rglob("*") if path.is_dir())]:
            folder.chmod(mode)
