"""An incident in a file: reading it, with one clear line for every file that cannot be shown.

Owns which formats this console reads. A file of a later format is refused by its number before its contents
are looked at, so that the reason is never a puzzle of missing fields.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from oobleckd.host import anyfile
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.protocol.watch import BUNDLE_VERSION, Bundle


class BundleError(Exception):
    """A file that cannot be shown: ``problem`` and ``hint`` in a sentence each."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class _Head(msgspec.Struct):
    version: int
    made_by: str = "a version unknown"


_MAX_BYTES = 512 * 2**20
_ANEW = "export it anew: `oobleckctl export-incident INCIDENT -o FILE`"


def read(path: Path) -> Bundle:
    """The bundle in ``path``. Raises BundleError."""
    try:
        data = anyfile.read(path, _MAX_BYTES)
    except (FileNotFoundError, anyfile.FileError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, FileNotFoundError) else error
        raise BundleError(f"{path} {why}", "check the path") from error
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.ValidationError as error:
        raise BundleError(f"{path} is no incident of oobleckd: {problem_of(error)}", _ANEW) from error
    except UNREADABLE as error:
        cut = "is cut off" if data[:1] == b"{" else "is no incident of oobleckd"
        raise BundleError(f"{path} {cut}: {problem_of(error)}", _ANEW) from error
    if head.version != BUNDLE_VERSION:
        wanted = (
            "a newer oobleck-console" if head.version > BUNDLE_VERSION else "the oobleck-console of that time"
        )
        problem = (
            f"{path} is of format {head.version}, by {head.made_by}; this console reads format "
            f"{BUNDLE_VERSION}"
        )
        raise BundleError(problem, f"open it with {wanted}, or {_ANEW}")
    try:
        return msgspec.json.decode(data, type=Bundle)
    except UNREADABLE as error:
        problem = f"{path}, by {head.made_by}, cannot be shown by this version: {problem_of(error)}"
        raise BundleError(problem, f"open it with the oobleck-console of that version, or {_ANEW}") from error


def write(path: Path, bundle: Bundle) -> Path:
    """Put ``bundle`` into a new file: ``path``, or where that is there already ``inc-1-2.json`` and so on;
    which one. Raises OSError.
    """
    data = msgspec.json.encode(bundle)
    free, number = path, 1
    while True:
        try:
            with free.open("xb") as file:
                file.write(data)
        except FileExistsError:
            number += 1
            free = path.with_stem(f"{path.stem}-{number}")
        else:
            return free
