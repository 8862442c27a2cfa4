"""What a job reads from files, held open, and its identity (``oobleckd.protocol.inputs``).

A file that is open goes on being what it was, whoever puts another one in its place; only who writes into it
changes it. Owns the identity (names, sizes and seeded blocks at once, all bytes where they are few) and the
look at what may have changed since; when one looks, and what follows, is ``input_watch``'s. Which bytes are
tokens is ``corpus``'s.
"""

from __future__ import annotations

import hashlib
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from oobleckd.protocol.inputs import MAX_LISTED, Input, InputKind

# What a job reads is known by its bytes and not by where it lies. 64 MiB take a tenth of a second; 100 GB
# would take minutes at every start of every device, so of more 64 blocks are read. (D-data-003)
SMALL_BYTES = 64 << 20
"""All bytes of so few are read at the start: 0.1 s."""
_NUM_BLOCKS, _BLOCK = 64, 64 << 10
_PIECE = 1 << 20
_TRIES = 5
_T = TypeVar("_T")


class Signature(NamedTuple):
    """What a stat tells of a file: while it stands, nobody has written by the ordinary ways."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def signature_of(found: os.stat_result) -> Signature:
    """Of a stat. ``changed_ns`` shows what was written although ``modified_ns`` was put back."""
    # Who writes into a file can put its other times back, but not that of the inode's change. (D-data-010)
    return Signature(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def signature_at(path: Path) -> Signature | None:
    """Of the file at ``path``; None where there is none, or it cannot be seen."""
    try:
        return signature_of(path.stat())
    except OSError:
        return None


@dataclass(slots=True)
class Opened:
    """Files held open, in the order in which they are read. ``part``: their identity.

    ``paths``: where each was opened, whose bytes belong to it as long as nobody puts another one there;
    ``watched``: whether that is worth a look (a copy of our own has no path that a user knows). None is open
    where all bytes are in this process' own memory. ``fresh``: whether who opens it anew finds the same
    files, by a stat.

    ``groups``: of several sources, or parts of one, how many files each has, and its digest, which is that of
    those without a file; ``names``: of all these files, which may have the same one.
    """

    part: Input
    paths: tuple[Path, ...] = ()
    handles: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    watched: bool = True
    seen: tuple[Signature, ...] = ()
    fresh: Callable[[], bool] = lambda: True
    names: tuple[str, ...] = ()
    groups: tuple[tuple[int, str], ...] = ()
    _closed: bool = field(default=False, repr=False)

    @property
    def small(self) -> bool:
        """Whether all of it is read in no time."""
        return sum(self.sizes) <= SMALL_BYTES

    def stat(self) -> tuple[Signature, ...]:
        """The signatures of the files that are open, in their order."""
        return tuple(signature_of(os.fstat(handle)) for handle in self.handles)

    def lies_there(self) -> bool:
        """Whether the paths still lead to the very files that are open."""
        opened = [(each.device, each.inode) for each in self.stat()]
        return all(_inode_at(path) == inode for path, inode in zip(self.paths, opened, strict=True))

    def quick(self) -> Input:
        """The identity of what is in the files now, as at the start."""
        found = self.blocks()
        return _with_whole(found, self.digest()) if self.small else found

    def blocks(self) -> Input:
        """The same without the digest of all bytes."""
        named = self.names or [path.name if len(self.paths) > 1 else "" for path in self.paths]
        return identity(self.part.kind, self.part.place, named, self.sizes, self._read)

    def digest(self, between: Callable[[], object] = lambda: None) -> str:
        """Size and SHA-256 of all bytes that were there when it was opened, as they are now. ``between``:
        called after each piece; may raise.
        """
        if not self.groups:
            return self._digest_of(range(len(self.sizes)), between)
        wholes, first = [], 0
        for files, known in self.groups:
            wholes.append(self._digest_of(range(first, first + files), between) if files else known)
            first += files
        return _whole_of(wholes)

    def again(self) -> Opened:
        """What lies at the paths by now, opened in the same way. Raises OSError."""
        found = opened(self.paths, self.part.place, self.part.kind, self.part)
        found.names, found.groups, found.part = self.names, self.groups, self.part
        found.part = found.quick()
        return found

    def _digest_of(self, files: Sequence[int], between: Callable[[], object]) -> str:
        whole, count = hashlib.sha256(), 0
        for index in files:
            for start in range(0, self.sizes[index], _PIECE):
                data = self._read(index, start, min(_PIECE, self.sizes[index] - start))
                whole.update(data)
                count += len(data)
                between()
        return f"{count}-{whole.hexdigest()}"

    def _read(self, index: int, start: int, count: int) -> bytes:
        return os.pread(self.handles[index], count, start)

    def give(self) -> None:
        """Another one has its files, and closes them."""
        self._closed = True

    def close(self) -> None:
        """Let go of the files; what is mapped stays."""
        if not self._closed:
            self._closed = True
            for handle in self.handles:
                with suppress(OSError):
                    os.close(handle)

    def __del__(self) -> None:
        self.close()


def opened(paths: Sequence[Path], place: str, kind: InputKind = "data", part: Input | None = None) -> Opened:
    """``paths``, held open. ``part``: their identity, where it is known. Raises OSError, with the path."""
    handles: list[int] = []
    how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would keep us waiting for who writes into it
    try:
        for path in paths:
            handles.append(os.open(path, how))  # noqa: PERF401 - those before it are closed
        sizes = tuple(os.fstat(handle).st_size for handle in handles)
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    first = part or Input(kind, place, len(sizes), sum(sizes))
    found = Opened(first, tuple(paths), tuple(handles), sizes)
    found.seen = found.stat()
    if part is None:
        found.part = found.quick()
    return found


def opened_while(
    path: Path | Sequence[Path], place: str, read: Callable[[], _T], part: Input | None = None
) -> tuple[Opened, _T]:
    """``path`` (a folder: all files in it; or several files) held open, and what ``read`` makes of it, which
    opens it by itself: of the very same files, also where somebody puts others there meanwhile. Raises
    OSError, and whatever ``read`` does.
    """
    for _ in range(_TRIES):
        held = opened(_files(path) if isinstance(path, Path) else path, place, part=part)
        made = read()
        if held.lies_there():
            return held, made
        held.close()
    raise OSError(f"{path} is replaced again and again")


def together(place: str, held: Sequence[tuple[str, Opened]]) -> Opened:
    """The files of several sources, or of several parts of one, by name, as one; who held them does so no
    more.
    """
    parts = [each for _, each in held]
    groups = tuple(
        group for each in parts for group in each.groups or ((len(each.handles), each.part.whole),)
    )
    wholes = [whole for _, whole in groups]
    found = Opened(
        Input("data", place, sum(each.part.files for each in parts), sum(sum(each.sizes) for each in parts)),
        tuple(path for each in parts for path in each.paths),
        tuple(handle for each in parts for handle in each.handles),
        tuple(size for each in parts for size in each.sizes),
        all(each.watched for each in parts),
        tuple(seen for each in parts for seen in each.seen),
        lambda: all(each.fresh() for each in parts),
        tuple(
            f"{name}/{of}"
            for name, each in held
            for of in each.names or tuple(path.name for path in each.paths)
        ),
        groups,
    )
    for each in parts:
        each.give()
    found.part = found.blocks()
    if all(wholes):
        found.part = _with_whole(found.part, _whole_of(wholes))
    return found


def joined(
    place: str, named: Sequence[str], contents: Sequence[bytes], whole: str, kind: InputKind = "data"
) -> Input:
    """The identity of files that were read into one piece, whose size and SHA-256 is ``whole``."""
    sizes = [len(content) for content in contents]
    found = identity(kind, place, named, sizes, lambda i, start, count: contents[i][start : start + count])
    return _with_whole(found, whole)


def identity(
    kind: InputKind,
    place: str,
    named: Sequence[str],
    sizes: Sequence[int],
    read: Callable[[int, int, int], bytes],
) -> Input:
    """Of files ``named`` so, of ``sizes``; ``read(index, start, count)`` gives bytes of one. Reads 4 MiB and
    no more, however much there is.
    """
    blocks = hashlib.blake2b(digest_size=16)
    blocks.update(repr((list(named), list(sizes))).encode())
    few = len(sizes) <= MAX_LISTED
    of_file = [hashlib.blake2b(digest_size=8) for _ in sizes] if few else []
    for index, start, count in _chosen(sizes):
        data = read(index, start, count)
        blocks.update(data)
        if few:
            of_file[index].update(data)
    listing = {
        name or Path(place).name: f"{size}-{digest.hexdigest()}"
        for name, size, digest in zip(named, sizes, of_file, strict=False)
    }
    return Input(kind, place, len(sizes), sum(sizes), blocks.hexdigest(), "", listing)


def _chosen(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(file, start, count) of the blocks that are read: the first and the last bytes, and one somewhere in
    each stretch between; all, where they are few. The same wherever sizes are.
    """
    total = sum(sizes)
    if total <= _NUM_BLOCKS * _BLOCK:
        starts = list(range(0, total, _BLOCK))
    else:
        dice, stretch = random.Random(f"blocks {total}"), total / _NUM_BLOCKS  # noqa: S311 - the same for all
        inner = [int((n + dice.random()) * stretch) for n in range(1, _NUM_BLOCKS - 1)]
        starts = [0, *inner, total - _BLOCK]
    ends = list(accumulate(sizes))
    for start in starts:
        at, left = start, min(_BLOCK, total - start)
        while left > 0:
            index = bisect_right(ends, at)
            count = min(left, ends[index] - at)
            yield index, at - (ends[index] - sizes[index]), count
            at, left = at + count, left - count


def _whole_of(wholes: Sequence[str]) -> str:
    """Size and digest of several sources, by those of each."""
    size = sum(int(whole.partition("-")[0]) for whole in wholes)
    return f"{size}-{hashlib.sha256(' '.join(wholes).encode()).hexdigest()}"


def _with_whole(found: Input, whole: str) -> Input:
    return msgspec.structs.replace(found, whole=whole)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _inode_at(path: Path) -> tuple[int, int] | None:
    found = signature_at(path)
    return found and (found.device, found.inode)
