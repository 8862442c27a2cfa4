"""Writes files that are whole or not there, also after the power was cut.

Owns writing a file under another name first, syncing it and its folder, and whose a file is that root makes.
Owns no content.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int = 0o644, *, as_folder: bool = False) -> None:
    """Put a file with ``data`` at ``path``, in place of any: durable when it returns, and never half there.

    ``as_folder``: what root makes belongs to whom the folder belongs to. Raises OSError, and leaves nothing
    then.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if as_folder:
            give_away(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def errno_of(error: OSError) -> str:
    """The name of a system's error, such as ENOSPC; "" where it has none."""
    return errno.errorcode.get(error.errno or 0, "")


def move(path: Path, target: Path) -> None:
    """Rename ``path``, durably. Raises OSError."""
    path.replace(target)
    sync_directory(target.parent)


def sync_file(path: Path) -> None:
    """Make what is in ``path`` durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """The folder ``path`` with all above it, each of whom the one above belongs to where root makes it."""
    if not path.exists():
        make_folder(path.parent, mode)
        path.mkdir(mode=mode, exist_ok=True)
        give_away(path)


def give_away(path: Path) -> None:
    """What root makes belongs to whom the folder belongs to: to the service, whose state this is."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
