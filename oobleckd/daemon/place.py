"""Tells whether the state folder that a daemon starts on is the one that was written, or a copy of it.

Two daemons on one journal would both go on with its jobs. The lock keeps them off one folder; a copy of the
folder has a lock of its own, so the journal keeps where it lies, and a daemon that finds itself elsewhere
does not start until it is told to adopt the copy.

What tells is the number (inode) of a file that nothing ever writes again: no copy has it, and a folder that
was moved on its disk does. It is taken together with the disk or the path, as another disk may have given out
the same number. Disks get other numbers when a machine starts, and some file systems number files anew at
every mount, so the same path on the same machine will do as well: two folders cannot be there.

Errors: CopiedState, with ``hint``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from oobleckd.daemon.journal import Journal
from oobleckd.host.durable import write_whole
from oobleckd.protocol.unreadable import UNREADABLE

FILE = "identity"
_TEXT = b"This file tells this state folder of oobleckd from a copy of it. Nothing reads what is in it.\n"
_MACHINE = Path("/etc/machine-id")
_log = logging.getLogger(__name__)


class CopiedState(Exception):
    """The state folder is a copy, and the daemon of the one that it was copied from may still be there."""

    def __init__(self, folder: Path, known: DaemonPlace) -> None:
        self.problem = f"the state folder {folder} is a copy: its journal is that of {known.path}" + (
            f" on another machine ({known.machine})" if known.machine != _machine() else ""
        )
        self.hint = (
            "start the daemon there; where that one is gone for good, or is to go on beside this one, start "
            "with --adopt: "
            "jobs then go on here, and write their checkpoints into folders of their own"
        )
        super().__init__(self.problem)


class DaemonPlace(msgspec.Struct, frozen=True):
    """A state folder: its path, the machine's name of itself ("" in most containers), and the identity file's
    numbers.
    """

    path: str
    machine: str
    inode: int
    disk: int


def check(journal: Journal, *, adopt: bool) -> bool:
    """See that ``journal`` lies where it was written, and keep where that is; whether it was adopted. Raises
    CopiedState, JournalError, OSError.
    """
    here = place_of(journal.path.parent)
    known = _read(journal.place)
    copied = known is not None and not is_same(known, here)
    if copied and known is not None:
        if not adopt:
            raise CopiedState(journal.path.parent, known)
        journal.rename()
        _log.warning("adopted a copy of %s: its jobs go on here, with other folders", known.path)
    journal.settle(msgspec.json.encode(here).decode())
    return copied


def place_of(folder: Path) -> DaemonPlace:
    """Where ``folder`` is now; its identity file is made where it has none. Raises OSError."""
    path = folder / FILE
    if not path.exists():
        write_whole(path, _TEXT, 0o640, as_folder=True)
    found = path.stat()
    return DaemonPlace(os.path.realpath(folder), _machine(), found.st_ino, found.st_dev)


def is_same(known: DaemonPlace, here: DaemonPlace) -> bool:
    """Whether they are one folder."""
    stayed = known.path == here.path
    # Each sign alone is enough, as a false refusal would keep a daemon from its jobs: disks are renumbered,
    # containers move, journals are mended. Copies of whole disks are not told. (D-checkpoints-014)
    if known.inode == here.inode and (known.disk == here.disk or stayed):
        return True
    return stayed and bool(here.machine) and known.machine == here.machine


def _read(text: str) -> DaemonPlace | None:
    try:
        return msgspec.json.decode(text, type=DaemonPlace) if text else None
    except UNREADABLE:
        return None


def _machine() -> str:
    try:
        return _MACHINE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
