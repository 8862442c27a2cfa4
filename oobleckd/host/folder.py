"""Marks a job's checkpoint folder with the journal that made it, and tells whose a folder is.

Several daemons may have one ``checkpoint.dir``, and job names repeat. The folder of a job is made by one of
them alone, and says by whom; nobody else writes or prunes there. Owns the mark and how it comes there; which
name a job's folder gets is the daemon's matter.

Errors: ForeignFolder (a ValueError) with ``hint``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path

import msgspec

from oobleckd.host.durable import give_away, make_folder, sync_directory
from oobleckd.protocol.unreadable import UNREADABLE

MARK = ".oobleck-journal"
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_USUAL_MODE = 0o755


class ForeignFolder(ValueError):
    """The folder is not of this journal, so nothing is written there and nothing is removed."""

    def __init__(self, folder: Path, found: FolderMark | None) -> None:
        whose = f"is of {found.job or 'a job'} of another journal" if found else f"has files and no {MARK}"
        super().__init__(f"{folder} {whose}, so nothing is written there")
        self.hint = (
            "end the other daemon's job or leave the folder to it: this job gets another one with "
            "its next plan"
        )


class FolderMark(msgspec.Struct, frozen=True):
    """``journal``: the name of the journal whose ``job`` writes into the folder ("": what is there cannot be
    read).
    """

    journal: str
    job: str = ""


def claim(folder: Path, mark: FolderMark) -> bool:
    """Make ``folder`` with ``mark``, for who is first; False where it is there already, whatever is in it.
    Raises OSError.
    """
    make_folder(folder.parent, _USUAL_MODE)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    try:
        _open_up(folder)
        return _put(folder, mark) and mark_of(folder) == mark
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise


def disclaim(folder: Path) -> None:
    """Remove a folder that was claimed and not used; one that was stays."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()


def enter(folder: Path, mark: FolderMark, also: Collection[str] = (), *, known: bool = False) -> None:
    """See that who writes under ``mark`` may write into ``folder``, as also journals ``also`` were; make it
    anew where it is gone.

    ``known``: it is theirs even without a mark, which it gets then. Raises ForeignFolder, OSError.
    """
    found = mark_of(folder)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        # Who else makes it anew puts the mark in before anything else: asked after that, it tells them from
        # strangers.
        if known or not any(folder.iterdir()):
            _put(folder, mark)
        found = mark_of(folder)
    if found is None or found.journal not in {mark.journal, *also}:
        raise ForeignFolder(folder, found)


def mark_of(folder: Path) -> FolderMark | None:
    """The mark of ``folder``; None where it has none, or is not there. Raises OSError where
    nobody can tell.
    """
    try:
        data = (folder / MARK).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return msgspec.json.decode(data, type=FolderMark)
    except UNREADABLE:
        return FolderMark("")


def _put(folder: Path, mark: FolderMark) -> bool:
    """Put ``mark`` into ``folder``, whole, durable, and in place of none; whether it was."""
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    with part.open("xb") as file:
        file.write(msgspec.json.encode(mark))
        os.fchmod(file.fileno(), 0o644)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(OSError):  # a server may know no root
            give_away(part)
        try:
            os.link(part, folder / MARK)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _write_new(folder / MARK, part.read_bytes())
    finally:
        part.unlink(missing_ok=True)
    sync_directory(folder)
    sync_directory(folder.parent)
    return True


def _write_new(path: Path, data: bytes) -> bool:
    """Write the mark where the file system has no links; whether it was not there."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _open_up(folder: Path) -> None:
    """Who may write beside it may write into it: nodes of other users than the daemon's, as when they made it
    themselves.
    """
    above = stat.S_IMODE(folder.parent.stat().st_mode)
    with contextlib.suppress(OSError):  # a server may know no root
        give_away(folder)
        if not above & stat.S_ISVTX:
            folder.chmod(above & 0o2777)
