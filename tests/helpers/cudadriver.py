"""CUDA's driver on a machine without one: memory that is made, mapped and handed on as it does that, of files
in memory.

Real are mappings, descriptors, what lives as long as what, and other processes; not real is a GPU. Structures
and numbers are those of cuda.h, read here as the driver reads them.
"""

# ruff: noqa: N802 - the driver's names
from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oobleckd.worker.runtime.card_memory import CardMemory, MappedMemory
from tests.helpers.models import CPU

GRAIN = 2 << 20
INVALID, OUT_OF_MEMORY, NOT_PERMITTED = 1, 2, 800
TEXTS = {INVALID: b"invalid argument", OUT_OF_MEMORY: b"out of memory", NOT_PERMITTED: b"not permitted"}
_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class CudaDriver:
    """``num_bytes``: of the GPU's memory, which ``used`` counts down. ``peers``: whether GPUs read each
    other's memory. ``fails``: by the name of a call, what it results in from now on.
    """

    num_bytes: int = 1 << 30
    peers: bool = True
    fails: dict[str, int] = field(default_factory=dict)
    handles: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    _made: dict[int, int] = field(default_factory=dict)
    _next: int = 1000

    @property
    def used(self) -> int:
        """Bytes that this process has made and not given back: those with a handle or a mapping."""
        return sum(self._made[inode] for inode in self._live())

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            object.__getattribute__(self, "calls").append(name)
            if result := object.__getattribute__(self, "fails").get(name):
                return lambda *_: result
        return object.__getattribute__(self, name)

    # ------------------------------------------------------------------ the driver's calls

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = TEXTS.get(result)
        return 0

    def cuMemGetAllocationGranularity(self, grain: Any, prop: Any, option: int) -> int:
        grain._obj.value = GRAIN
        return 0 if option == 0 and self._is_shareable(prop) else INVALID

    def cuMemCreate(self, handle: Any, size: Any, prop: Any, flags: Any) -> int:
        if size.value % GRAIN or flags.value or not self._is_shareable(prop):
            return INVALID
        if self.used + size.value > self.num_bytes:
            return OUT_OF_MEMORY
        number = os.memfd_create("cuda", os.MFD_CLOEXEC)
        os.ftruncate(number, size.value)
        self._made[os.fstat(number).st_ino] = size.value
        handle._obj.value = self._handle(number)
        return 0

    def cuMemExportToShareableHandle(self, found: Any, handle: Any, kind: int, flags: Any) -> int:
        if kind != 1 or flags.value:
            return INVALID
        found._obj.value = os.dup(self.handles[handle.value])
        os.set_inheritable(found._obj.value, False)
        return 0

    def cuMemImportFromShareableHandle(self, handle: Any, found: Any, kind: int) -> int:
        if kind != 1:
            return INVALID
        handle._obj.value = self._handle(os.dup(found.value))
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        os.close(self.handles.pop(handle.value))
        return 0

    def cuMemAddressReserve(self, pointer: Any, size: Any, grain: Any, where: Any, flags: Any) -> int:
        if size.value % GRAIN or grain.value or where.value or flags.value:
            return INVALID
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pointer._obj.value = _libc.mmap(None, size.value, 0, private, -1, 0)
        self.reserved[pointer._obj.value] = size.value
        return 0

    def cuMemMap(self, pointer: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        number = self.handles[handle.value]
        there = os.fstat(number)
        if self.reserved.get(pointer.value) != size.value or offset.value or flags.value:
            return INVALID
        if there.st_size != size.value:
            return INVALID
        _libc.mmap(pointer.value, size.value, 0, mmap.MAP_SHARED | _FIXED, number, 0)
        self.mapped[pointer.value] = there.st_ino
        return 0

    def cuMemSetAccess(self, pointer: Any, size: Any, access: Any, count: Any) -> int:
        wanted = access._obj
        if (wanted.location.type, wanted.flags, count.value) != (1, 3, 1) or pointer.value not in self.mapped:
            return INVALID
        if not self.peers and self.mapped[pointer.value] not in self._made:
            return NOT_PERMITTED
        _libc.mprotect(ctypes.c_void_p(pointer.value), ctypes.c_size_t(size.value), 3)
        return 0

    def cuMemUnmap(self, pointer: Any, size: Any) -> int:
        del self.mapped[pointer.value]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        _libc.mmap(pointer.value, size.value, 0, private, -1, 0)
        return 0

    def cuMemAddressFree(self, pointer: Any, size: Any) -> int:
        if pointer.value in self.mapped or self.reserved.pop(pointer.value) != size.value:
            return INVALID
        _libc.munmap(pointer.value, size.value)
        return 0

    # ------------------------------------------------------------------

    def _is_shareable(self, prop: Any) -> bool:
        wanted = prop._obj
        return (wanted.type, wanted.requestedHandleTypes, wanted.location.type) == (1, 1, 1)

    def _handle(self, number: int) -> int:
        self._next += 1
        self.handles[self._next] = number
        return self._next

    def _live(self) -> set[int]:
        handles = {os.fstat(number).st_ino for number in self.handles.values()}
        return (handles | set(self.mapped.values())) & self._made.keys()


class _Array:
    """What numpy asks, of a mapping that it keeps alive."""

    def __init__(self, mapped: MappedMemory) -> None:
        self._mapped = mapped
        self.__array_interface__ = mapped.__cuda_array_interface__


class HostCard(CardMemory):
    """A GPU whose memory the CPU can read. ``waits``: how often the host waited for it; ``given_back``: and
    torch gave back what it keeps.
    """

    waits = given_back = 0

    def __init__(self, driver: CudaDriver) -> None:
        library: Any = driver
        super().__init__(CPU, library)

    def owned(self, mapped: MappedMemory) -> Tensor:
        """A numpy array keeps what it is of, as torch does."""
        return torch.from_numpy(np.asarray(_Array(mapped)))

    def settle(self) -> None:
        """Nothing is under way."""
        self.waits += 1

    def give_back(self) -> None:
        """Nothing is kept."""
        self.given_back += 1
