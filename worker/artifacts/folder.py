"""An artifact as a folder: the files of what a kind of layer was compiled to, and a manifest of their
checksums.

Owns the manifest, and the archive in which a folder travels. A folder is made under another name, and has its
own when it is whole; whether it still is shows before it is used. What is in the files, torch's compiler
knows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from oobleckd.host.durable import write_whole
from oobleckd.protocol.artifacts import MAX_BYTES
from oobleckd.protocol.unreadable import UNREADABLE

MANIFEST = "manifest.json"
_MAX_UNPACKED = 8 * MAX_BYTES
_LOCKS = ".lock"
_SPEED = 1  # of zlib: half the bytes, at 100 MB/s


class DamagedArtifact(ValueError):
    """An archive, or a folder, is not what was made."""


class _Manifest(msgspec.Struct, frozen=True):
    """Checksum (SHA-256) of each file, by its path in the folder."""

    files: dict[str, str]


_manifest: msgspec.json.Decoder[_Manifest] = msgspec.json.Decoder(_Manifest)


def is_intact(folder: Path) -> bool:
    """Whether all files that were made are here as they were."""
    files = _sealed(folder)
    return files is not None and all(_sha256(folder / name) == sha256 for name, sha256 in files.items())


def has_grown(folder: Path) -> bool:
    """Whether files were added since ``folder`` was sealed: something was compiled."""
    return set(_sealed(folder) or ()) != {str(path.relative_to(folder)) for path in _files(folder)}


def seal(folder: Path) -> None:
    """What is in ``folder`` by now is all of it. Raises OSError."""
    files = {str(path.relative_to(folder)): _sha256(path) for path in sorted(_files(folder))}
    write_whole(folder / MANIFEST, msgspec.json.encode(_Manifest(files)), 0o600)


def place(made: Path, folder: Path) -> None:
    """Give the sealed folder ``made`` its name; where there is one by now that stays. Raises OSError."""
    with suppress(FileNotFoundError):
        if not is_intact(folder):
            shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not is_intact(folder):
            raise
        shutil.rmtree(made)


def used(folder: Path) -> None:
    """It is of use now, so nobody lets go of it for its age."""
    with suppress(OSError):
        os.utime(folder)


def pack(folder: Path, archive: Path) -> None:
    """The sealed ``folder`` as a file. Raises OSError."""
    with tarfile.open(archive, "x:gz", compresslevel=_SPEED) as tar:
        for name in (MANIFEST, *(_sealed(folder) or ())):
            tar.add(folder / name, name)


def unpack(archive: Path, folder: Path) -> None:
    """The folder in ``archive``, at ``folder``, which is not there yet. Raises DamagedArtifact, OSError."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(folder, _members(tar), filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DamagedArtifact(f"{archive}: {error}") from error
    if not is_intact(folder):
        raise DamagedArtifact(f"{archive}: its files are not those of its manifest")


def _members(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """All that is in it: plain files, and no more of them than an artifact may have."""
    found: list[tarfile.TarInfo] = []
    left = _MAX_UNPACKED
    for member in tar:
        left -= member.size
        if not member.isreg() or left < 0:
            raise DamagedArtifact(f"{member.name}: no plain file, or too large")
        found.append(member)
    return found


def _sealed(folder: Path) -> dict[str, str] | None:
    try:
        return _manifest.decode((folder / MANIFEST).read_bytes()).files
    except (OSError, *UNREADABLE):
        return None


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != _LOCKS and path.name != MANIFEST:
            yield path


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
