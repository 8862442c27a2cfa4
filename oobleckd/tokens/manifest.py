"""What `oobleckctl data prepare` says of the folder that it made: `manifest.json` beside `tokens.bin` and
`tokens.idx`.

Owns its fields, the names of the files, reading and writing it, and the checksums of tokens. A device takes
all that it must know of the tokens from here and reads none at its start: how many they are, the largest, the
digest of all, and a checksum of each MiB for when that is first read. How the digest of sources and settings
is made is ``prepare``'s.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from oobleckd.host.durable import write_whole
from oobleckd.protocol.unreadable import problem_of
from oobleckd.tokens.dtypes import NAMED, DType
from oobleckd.tokens.errors import DataError
from oobleckd.words import count

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

FORMAT, FORMAT_OF_CHATS = 1, 2
"""A program that knows no loss.bin would ask for every token of a chat, and so must not know its format."""
TOKENS, INDEX, MANIFEST, LOSS = "tokens.bin", "tokens.idx", "manifest.json", "loss.bin"
PIECE = 1 << 20
"""Bytes of tokens that have a checksum together."""
_CRC_BYTES = 4
MAX_BAD_ROWS = 100
"""So many are named; all are counted."""
_Count = Annotated[int, Meta(ge=0)]


class SourceFile(msgspec.Struct, frozen=True):
    """A file that tokens were made of, as it was then. Of an object in a store its ``etag`` in place of time
    and SHA-256.
    """

    path: str
    size: int
    mtime_ns: int
    sha256: str
    etag: str = ""


class BadRow(msgspec.Struct, frozen=True):
    """A row that was left out: where it stood (``line`` from 1), and why."""

    file: str
    line: int
    why: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``digest``: of sources and settings, 32 hex digits, the folder's name. ``bin_sha256``, ``idx_sha256``:
    of the two files; ``idx_bytes``: size of the second; ``crcs``: CRC-32 of each MiB of the first, in 4 bytes
    each, little-endian. ``largest``: the largest token, -1 where there is none.

    ``settings``: a digest of what else than the sources decides the tokens; ``vocabulary``, ``eos``, ``bos``:
    the tokenizer's (-1: not written); ``versions``: of programs, to explain a difference.

    Of chats and completions, which are of ``FORMAT_OF_CHATS``: ``asked``: tokens that the loss asks for;
    ``loss_sha256``, ``loss_crcs``: of `loss.bin`, as of `tokens.bin`.
    """

    digest: str
    dtype: str
    tokens: _Count
    documents: _Count
    largest: int
    bin_sha256: str
    idx_sha256: str
    idx_bytes: _Count
    crcs: bytes
    sources: tuple[SourceFile, ...]
    settings: str = ""
    bad_rows: tuple[BadRow, ...] = ()
    num_bad_rows: int = 0
    vocabulary: int = 0
    eos: int = -1
    bos: int = -1
    versions: dict[str, str] = {}
    asked: _Count = 0
    loss_sha256: str = ""
    loss_crcs: bytes = b""
    format: int = FORMAT

    @property
    def kind(self) -> DType:
        """The numpy dtype of the tokens."""
        return NAMED[self.dtype]

    @property
    def bin_bytes(self) -> int:
        """What `tokens.bin` has."""
        return self.tokens * self.kind.itemsize

    @property
    def has_loss(self) -> bool:
        """Whether a `loss.bin` says which tokens the loss asks for; else it asks for all."""
        return self.format == FORMAT_OF_CHATS

    @property
    def loss_bytes(self) -> int:
        """What `loss.bin` has."""
        return -(-self.tokens // 8) if self.has_loss else 0

    def crc_of(self, piece: int) -> int:
        """CRC-32 of the ``piece``-th MiB of `tokens.bin`."""
        return crc_of(self.crcs, piece)


class _Format(msgspec.Struct):
    format: int


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared ``folder`` whose files are as long as it says; their bytes are not read.
    Raises DataError.
    """
    path, again = folder / MANIFEST, again_hint(folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}",
            "name a folder that `oobleckctl data prepare` made and that every node can read",
        ) from error
    try:
        known = msgspec.json.decode(data, type=_Format).format
        if known not in {FORMAT, FORMAT_OF_CHATS}:
            raise DataError(
                f"{path} is of format {known}, and {FORMAT} and {FORMAT_OF_CHATS} are known", again
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {problem_of(error)}", again) from error
    if (
        manifest.dtype not in NAMED
        or not covers(manifest.crcs, manifest.bin_bytes)
        or not covers(manifest.loss_crcs, manifest.loss_bytes)
        or bool(manifest.loss_sha256) != manifest.has_loss
    ):
        raise DataError(f"{path} contradicts itself", again)
    sizes = {TOKENS: manifest.bin_bytes, INDEX: manifest.idx_bytes}
    if manifest.has_loss:
        sizes[LOSS] = manifest.loss_bytes
    for name, size in sizes.items():
        check_size(folder / name, size, again)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put it into ``folder``, whole and durable. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_whole(folder / MANIFEST, data)


def checksums(path: Path, whole: Digest | None = None) -> tuple[str, bytes]:
    """SHA-256 of a file, and CRC-32 of each MiB as ``Manifest.crcs`` has them; ``whole``: the digest of what
    comes before the file. Raises OSError.
    """
    whole, crcs = whole or hashlib.sha256(), bytearray()
    with path.open("rb") as file:
        while data := file.read(PIECE):
            whole.update(data)
            crcs += zlib.crc32(data).to_bytes(_CRC_BYTES, "little")
    return whole.hexdigest(), bytes(crcs)


def crc_of(crcs: bytes, piece: int) -> int:
    """That of the ``piece``-th MiB."""
    return int.from_bytes(crcs[_CRC_BYTES * piece : _CRC_BYTES * (piece + 1)], "little")


def covers(crcs: bytes, size: int) -> bool:
    """Whether ``crcs`` may be those of a file of ``size`` bytes."""
    return len(crcs) == _CRC_BYTES * -(-size // PIECE)


def again_hint(folder: Path) -> str:
    """What to do about a ``folder`` that is not what it was."""
    return f"delete {folder}, and run `oobleckctl data prepare` again"


def check_size(path: Path, size: int, again: str) -> None:
    """Whether ``path`` has so many bytes. Raises DataError."""
    try:
        there = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", again) from error
    if there != size:
        differs = f"{count(abs(size - there), 'byte')} {'less' if there < size else 'more'}"
        raise DataError(f"{path} has {differs} than its manifest says", again)
