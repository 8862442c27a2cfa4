"""The files of artifacts in the state folder: whole under their own checksum, or not there.

Owns names, checksums, and which files go when there are too many or too old ones. All of it reads or writes a
disk that may be slow, so it runs in the one thread of ``artifacts``.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from oobleckd.host.durable import move
from oobleckd.protocol.artifacts import is_key, is_sha256

_DAY_S = 86_400.0
KEPT_S = 30 * _DAY_S
"""Without anybody who asks for it."""
_PART = ".part"
_log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """An artifact that is there."""

    num_bytes: int
    sha256: str


@dataclass(slots=True)
class Upload:
    """An artifact that arrives, in ``path`` until it is whole."""

    key: str
    kept: Kept
    path: Path
    file: IO[bytes]
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class ArtifactFiles:
    """In ``folder``, ``max_bytes`` of them at most. ``index``: those that are there, by key."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self.index: dict[str, Kept] = {}

    def open(self, now: float) -> None:
        """Look what is there; what was never whole goes. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            key, _, sha256 = path.name.partition(".")
            if is_key(key) and is_sha256(sha256):
                self.index[key] = Kept(path.stat().st_size, sha256)
            elif path.name.endswith(_PART):
                path.unlink()
        self._evict(now)

    def read(self, key: str, offset: int, num_bytes: int) -> bytes:
        """A part of it; none where it is not there."""
        kept = self.index.get(key)
        if kept is None:
            return b""
        path = self._path(key, kept)
        try:
            with path.open("rb") as file:
                if offset == 0:
                    os.utime(file.fileno())  # it is of use to somebody
                file.seek(offset)
                return file.read(num_bytes)
        except OSError as error:
            _log.warning("the artifact %s cannot be read: %s", path, error)
            return b""

    def begin(self, key: str, kept: Kept) -> Upload:
        """Make room for one that comes. Raises OSError."""
        path = self._folder / f"{key}{_PART}"
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return Upload(key, kept, path, os.fdopen(handle, "wb"))

    def write(self, upload: Upload, data: bytes) -> None:
        """The next bytes of it. Raises OSError."""
        upload.file.write(data)
        upload.digest.update(data)

    def end(self, upload: Upload, now: float) -> bool:
        """All bytes are here; whether they are those that its checksum is of. Raises OSError."""
        upload.file.flush()
        os.fsync(upload.file.fileno())
        upload.file.close()
        if upload.digest.hexdigest() != upload.kept.sha256:
            upload.path.unlink()
            return False
        self.drop(upload.key)
        move(upload.path, self._path(upload.key, upload.kept))
        self.index[upload.key] = upload.kept
        self._evict(now)
        return True

    def abandon(self, upload: Upload) -> None:
        """Nothing more comes of it."""
        upload.file.close()
        with suppress(OSError):
            upload.path.unlink(missing_ok=True)

    def check(self, key: str) -> None:
        """Drop the file of ``key`` where it is not what came."""
        kept = self.index.get(key)
        if kept is None:
            return
        try:
            with self._path(key, kept).open("rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == kept.sha256
        except OSError:
            whole = False
        if not whole:
            _log.warning("the artifact %s was damaged, and is made anew", key)
            self.drop(key)

    def drop(self, key: str) -> None:
        """It is not there any more."""
        kept = self.index.pop(key, None)
        if kept is not None:
            with suppress(OSError):
                self._path(key, kept).unlink(missing_ok=True)

    def _evict(self, now: float) -> None:
        """Let go of what nobody asked for lately, and of more than there is room for: longest unasked first,
        and never what came last.
        """
        used = {key: self._used_at(key) for key in self.index}
        order = sorted(used, key=lambda key: used[key])
        total = sum(kept.num_bytes for kept in self.index.values())
        for key in order[:-1] if order else []:
            if used[key] > now - KEPT_S and total <= self._max_bytes:
                break
            total -= self.index[key].num_bytes
            self.drop(key)

    def _used_at(self, key: str) -> float:
        try:
            return self._path(key, self.index[key]).stat().st_mtime
        except OSError:
            return 0.0

    def _path(self, key: str, kept: Kept) -> Path:
        return self._folder / f"{key}.{kept.sha256}"
