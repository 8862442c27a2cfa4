"""The bytes of many files as one piece, kept in a cache file that all devices of a host share.

Owns that file, and what is known of the files by their stats, so that they are read once for all.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.protocol.inputs import Input
from oobleckd.tokens.files import Tokens
from oobleckd.worker.data.inputs import (
    Opened,
    Signature,
    joined,
    opened_while,
    signature_at,
    signature_of,
)
from oobleckd.worker.runtime.errors import UserError

# A file that changed within the last 3 s may change once more within the same tick of its file system's
# clock, unseen. (D-data-010)
_TICK_NS = 3_000_000_000  # more than of any file system, FAT's 2 s included


class _Known(msgspec.Struct, frozen=True):
    """What came of files whose stats have the digest ``seen``: their identity, and the cache file as it was
    when it was compared with them.
    """

    seen: str
    part: Input
    digest: str
    cache: Signature


class FileBorders:
    """Files that were read into one piece, as documents of it: of so many bytes each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self.num_documents = sizes, len(sizes)

    def borders(self) -> tuple[npt.NDArray[np.int64]]:
        """As those of an ``Index``, in one block."""
        return (np.cumsum([0, *self._sizes], dtype=np.int64),)


class JoinedText(NamedTuple):
    """The bytes of all files, one behind the other, and where each of them begins."""

    inputs: Opened
    tokens: Tokens
    borders: FileBorders


def read_joined(listed: Callable[[], Sequence[Path]], name: str, root: Path) -> JoinedText:
    """All bytes of the ``listed`` files, from a cache file that the device processes of a host share in
    memory. That is what is mapped: whoever writes into the files changes it for those who open them later.
    They are read once, and again when a stat tells of another file or of a change.
    """
    files = listed()
    seen = _seen(lambda: files)
    try:
        # Every device read all files for every job: 90 to 180 ms of a core for the standard library, and
        # all bytes of a large folder. (D-data-010)
        known = _recall(root, seen)
        if known is not None:
            sizes = FileBorders([each.size for each in seen.values() if each is not None])
            return JoinedText(*_of_cache(known, name, lambda: _seen(listed) == seen), sizes)
    except OSError:
        pass  # it is just being written anew, or nobody may read it
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise UserError(f"data: {name}: {error}", "make it readable for the worker's user") from error
    data = np.frombuffer(b"".join(contents), np.uint8)
    borders = FileBorders([len(content) for content in contents])
    digest = hashlib.sha256(data.data).hexdigest()
    named = [file.relative_to(root).as_posix() for file in files]
    part = joined(name, named, contents, f"{len(data)}-{digest}")
    path = _cached(digest)
    try:
        if not _holds(path, data):
            _write_atomically(path, data.data)
        if data.size:
            known = _Known(_digest_of(seen), part, digest, signature_of(path.stat()))
            held = _of_cache(known, name, lambda: _seen(listed) == seen)
            _remember(root, seen, known)
            return JoinedText(*held, borders)
    except OSError:  # no cache that can be written: every process keeps a copy of its own
        pass
    return JoinedText(Opened(part, fresh=lambda: _seen(listed) == seen), data, borders)


def _of_cache(known: _Known, name: str, fresh: Callable[[], bool]) -> tuple[Opened, Tokens]:
    """Raises OSError where it is another file by now."""
    path = _cached(known.digest)
    held, tokens = opened_while(path, name, lambda: np.memmap(path, np.uint8, mode="r"), known.part)
    if held.stat() != (known.cache,):
        held.close()
        raise OSError(f"{path} was changed")
    held.watched, held.fresh = False, fresh
    return held, tokens


def _recall(root: Path, seen: Mapping[Path, Signature | None]) -> _Known | None:
    """What is known of the files under ``root`` if they are as ``seen``; None where nothing is. Raises
    OSError.
    """
    try:
        known = msgspec.json.decode(_note_of(root).read_bytes(), type=_Known)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return known if seen and known.seen == _digest_of(seen) else None


def _remember(root: Path, seen: Mapping[Path, Signature | None], known: _Known) -> None:
    """Note it, unless a file changed so lately that it may change again within the same tick of its file
    system's clock. Raises OSError.
    """
    newest = max((max(each[3:]) if each else 2**63 for each in seen.values()), default=2**63)
    if newest < time.time_ns() - _TICK_NS:
        _write_atomically(_note_of(root), msgspec.json.encode(known))


def _note_of(root: Path) -> Path:
    return _cache_dir() / f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.known"


def _cached(digest: str) -> Path:
    return _cache_dir() / f"{digest}.bytes"


def _digest_of(seen: Mapping[Path, Signature | None]) -> str:
    return hashlib.sha256(
        repr([(str(path), each and tuple(each)) for path, each in seen.items()]).encode()
    ).hexdigest()


def _seen(listed: Callable[[], Sequence[Path]]) -> dict[Path, Signature | None]:
    """The files and what a stat tells of them (None: gone meanwhile)."""
    try:
        return {path: signature_at(path) for path in listed()}
    except (OSError, UserError):
        return {}


def _holds(path: Path, data: npt.NDArray[np.uint8]) -> bool:
    return (
        path.exists()
        and path.stat().st_size == len(data)
        and np.array_equal(np.fromfile(path, np.uint8), data)
    )


def _cache_dir() -> Path:
    """Of systemd's unit (CacheDirectory=), else of the user."""
    service = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    if service:
        return Path(service)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oobleck"


def _write_atomically(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)
