"""Memory that this process shares with peers on its host: a large tensor message is written there once, and
its receiver reads it where it lies.

A socket copies every message into the kernel and out again, into pages that are cleared first. Owns the
pieces on both sides: of the sender which are lent, and how many there may be; of the receiver how long it has
them. A piece is a memory file (``memfd_create``) of one page of its own and what the message needs. In its
first byte is whether it is lent: the sender sets that, and the receiver clears it with the last tensor in it;
nobody waits. With its last process it is gone, whoever was killed. Knows no messages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from itertools import count

MOST = 3
"""Pieces are made for so many of the largest messages: one is written, one read, and one lies ready."""
_HEAD_BYTES = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FREE, _LENT = 0, 1


class LendError(ValueError):
    """What came is no piece, or not of the size that a message needs."""


class LentPiece:
    """One memory file of this process, which ``link`` has been given or was given last. ``fd`` is open as
    long as anybody has this object: a frame on its way does.
    """

    __slots__ = ("__weakref__", "_memory", "fd", "link", "number")

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.link: object = None
        self.fd = os.memfd_create("tensor messages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, _HEAD_BYTES + num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)  # a reader could not survive that it is cut
        self._memory = mmap.mmap(self.fd, 0)

    @property
    def num_bytes(self) -> int:
        """Of messages that it is for."""
        return len(self._memory) - _HEAD_BYTES

    @property
    def is_free(self) -> bool:
        """Whether nobody has a tensor in it."""
        return self._memory[0] == _FREE

    @property
    def data(self) -> memoryview:
        """What a message is written into."""
        return memoryview(self._memory)[_HEAD_BYTES:]

    def lend(self, link: object) -> None:
        """From now on ``link``'s, until its receiver has no tensor in it."""
        self.link = link
        self._memory[0] = _LENT

    def give_back(self) -> None:
        """Nobody was told of it."""
        self._memory[0] = _FREE

    def end(self) -> None:
        """It is lent no more. Whoever still reads it does so; what nobody reads goes back to the system at
        once, also where a peer has it mapped.
        """
        if self.is_free:
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE)


class Lending:
    """The pieces of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[LentPiece] = []
        self._numbers = count()
        self._largest = 0

    def lend(self, num_bytes: int, link: object) -> LentPiece | None:
        """A piece for a message of ``num_bytes`` (> 0) that goes out on ``link``. None where as much is lent
        as may be, or the system has no such memory: then the message goes through the socket.
        """
        with self._lock:
            self._largest = max(self._largest, num_bytes)
            found = self._chosen(num_bytes)
            if found is not None:
                found.lend(link)
            return found

    def _chosen(self, num_bytes: int) -> LentPiece | None:
        free = sorted((piece for piece in self._pieces if piece.is_free), key=lambda piece: piece.num_bytes)
        large = [piece for piece in free if num_bytes <= piece.num_bytes]
        if large and large[0].num_bytes <= num_bytes + num_bytes // 4:
            return large[0]
        # Nobody waits for a piece: what finds none goes through the socket. (D-transport-011)
        # A new one is cleared by the kernel, which takes as long as writing it: where there may be no more,
        # one that is too large does, and small ones make room.
        while self._num_bytes() + num_bytes > MOST * self._largest:
            if large or not free:
                return large[0] if large else None
            self._end(free.pop(0))
        return self._new(num_bytes)

    def _new(self, num_bytes: int) -> LentPiece | None:
        try:
            piece = LentPiece(next(self._numbers), num_bytes)
        except (OSError, ValueError):
            return None
        self._pieces.append(piece)
        return piece

    def over(self, link: object) -> None:
        """``link`` has ended. What it had borrowed is not lent again: its receiver may read it still."""
        with self._lock:
            for piece in [piece for piece in self._pieces if piece.link is link and not piece.is_free]:
                self._end(piece)

    def clear(self) -> None:
        """Lend none of them again. What nobody reads goes back to the system; the rest when nobody does."""
        with self._lock:
            # Also those that are lent: their readers would free them a moment later, for nobody.
            while self._pieces:
                self._end(self._pieces[-1])
            self._largest = 0

    @property
    def numbers(self) -> frozenset[int]:
        """Of the pieces that there are. None comes twice."""
        with self._lock:
            return frozenset(piece.number for piece in self._pieces)

    @property
    def num_bytes(self) -> int:
        """Of all pieces, lent or not."""
        with self._lock:
            return self._num_bytes()

    def _num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self._pieces)

    def _end(self, piece: LentPiece) -> None:
        self._pieces.remove(piece)
        piece.end()


class Borrowed:
    """The pieces of one peer that came on one link."""

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}

    def learn(self, number: int, fd: int) -> None:
        """``fd`` is the piece of this ``number``; it is closed. Raises LendError, OSError."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size <= _HEAD_BYTES:
                raise LendError("memory that its owner could cut")
            self._memory[number] = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def forget(self, numbers: Iterable[int]) -> None:
        """Those are not lent any more."""
        for number in numbers:
            self._memory.pop(number, None)

    def take(self, number: int, num_bytes: int) -> memoryview:
        """What is in the piece: free again as soon as nothing refers to it, tensors that were made of it
        included. Raises LendError.
        """
        memory = self._memory.get(number)
        if memory is None or len(memory) < _HEAD_BYTES + num_bytes:
            raise LendError(f"no piece {number} with {num_bytes} bytes")
        borrowed = memoryview(memory)[_HEAD_BYTES:]
        weakref.finalize(borrowed, _give_back, memory).atexit = False
        return borrowed


def _give_back(memory: mmap.mmap) -> None:
    memory[0] = _FREE


LENDING = Lending()
"""Of this process."""
