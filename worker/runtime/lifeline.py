"""A lock that a process holds all its life, so that others hear of its death at once and without asking.

A robust mutex in memory shared by both sides (pthread_mutexattr_setrobust(3)): when a holder dies, the kernel
hands the lock to the one who waits for it as the first thing it does, before it frees the holder's memory
and long before its sockets close. Measured with 3 GB in use: 3 ms, where a pidfd tells after 660 ms.
Owns the lock and nothing else; who waits, and what an end means, is the caller's.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

_SIZE_BYTES = mmap.PAGESIZE
_ATTR_BYTES = 64  # pthread_mutexattr_t: 4 or 8 bytes in glibc and musl
_PROCESS_SHARED = 1
_ROBUST = 1
_libc = ctypes.CDLL(None)


class Lifeline:
    """The watcher's side. ``fd`` (the shared memory) and ``held_fd`` go to the process that is watched.

    ``held_fd`` is an eventfd, readable once the process holds the lock. Raises OSError.
    """

    __slots__ = ("_mutex", "fd", "held_fd")

    def __init__(self) -> None:
        self.fd = os.memfd_create("lifeline")
        os.ftruncate(self.fd, _SIZE_BYTES)
        self._mutex = _map(self.fd)
        attributes = ctypes.create_string_buffer(_ATTR_BYTES)
        _check(_libc.pthread_mutexattr_init, attributes)
        _check(_libc.pthread_mutexattr_setpshared, attributes, _PROCESS_SHARED)
        # The kernel hands a dying process's lock on before it frees its memory. Polling /proc saw an end as
        # early and took 2 to 4 % of a core per agent. (D-detection-001)
        _check(_libc.pthread_mutexattr_setrobust, attributes, _ROBUST)
        _check(_libc.pthread_mutex_init, ctypes.byref(self._mutex), attributes)
        self.held_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def is_held(self) -> bool:
        """Whether the process has taken the lock; True once, then ``held_fd`` is silent."""
        try:
            return os.eventfd_read(self.held_fd) > 0
        except BlockingIOError:
            return False

    def wait(self) -> None:
        """Block until the holder dies. Only once the process holds the lock. Raises OSError."""
        if _libc.pthread_mutex_lock(ctypes.byref(self._mutex)) != errno.EOWNERDEAD:
            raise OSError(errno.EPROTO, "a life line was let go by a process that lives")

    def close(self) -> None:
        """Close the descriptors. The memory stays until nobody waits any more."""
        os.close(self.fd)
        os.close(self.held_fd)


def hold(fd: int, held_fd: int) -> None:
    """Hold the lock in the memory ``fd`` until the calling thread ends, and say so. Raises OSError.

    Call it from the main thread: it ends with the process.
    """
    mutex = _map(fd)
    _check(_libc.pthread_mutex_lock, ctypes.byref(mutex))
    _kept.append(mutex)
    os.eventfd_write(held_fd, 1)
    os.close(fd)
    os.close(held_fd)


_kept: list[ctypes.Array[ctypes.c_char]] = []  # a mutex must stay mapped while it is held


def _map(fd: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _SIZE_BYTES).from_buffer(mmap.mmap(fd, _SIZE_BYTES))


def _check(call: Callable[..., int], *args: object) -> None:
    code = call(*args)
    if code:
        raise OSError(code, os.strerror(code))
