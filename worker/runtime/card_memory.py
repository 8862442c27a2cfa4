"""Memory of a GPU that other processes can map, too, and that is there as long as anybody has it.

Owns the calls of CUDA's driver for that (its "virtual memory management"): memory is made apart from the
addresses that it is seen at, and known to others by a descriptor. It is freed with its last mapping and its
last descriptor, and stays where its maker was killed; what ``cudaIpcGetMemHandle`` names is valid only while
its maker lives. torch's allocator knows nothing of it (``mapped_bytes``).
"""

# Of NCCL and of torch's own sharing neither survives a SIGKILL in the middle. (D-devices-023)

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_PINNED, _ON_DEVICE, _DESCRIPTOR, _READ_WRITE, _LEAST = 1, 1, 1, 3, 0
"""Of cuda.h: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE,
CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
CU_MEM_ALLOC_GRANULARITY_MINIMUM.
"""
_OUT_OF_MEMORY = 2
_REFUSED = frozenset({1, 101, 217, 800, 801})
"""CUresults: an invalid value or device, no access to another GPU's memory, not permitted, not supported."""
_NO_FLAGS = ctypes.c_ulonglong(0)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = [
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", AllocationFlags),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Library(Protocol):
    """What is called of ``libcuda``; each returns a CUresult."""

    def __getattr__(self, name: str, /) -> Callable[..., int]:
        """The function of this name."""


class CardMemoryError(OSError):
    """The driver did not do what it was asked for. ``errno``: ENOMEM, or EIO; ``error_code``: its CUresult,
    as torch's errors have it.
    """

    def __init__(self, call: str, result: int, text: str) -> None:
        super().__init__(errno.ENOMEM if result == _OUT_OF_MEMORY else errno.EIO, f"{call}: {text}")
        self.error_code = result


class MappedMemory:
    """``num_bytes`` of memory at the address ``pointer`` of this process, for the GPU ``card``."""

    def __init__(self, card: CardMemory, pointer: int, num_bytes: int) -> None:
        self.pointer, self.num_bytes = pointer, num_bytes
        self._card: CardMemory | None = card

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """As torch and numba know it: ``num_bytes`` numbers, uint8."""
        return {
            "shape": (self.num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 2,
        }  # fmt: skip

    def release(self) -> None:
        """Have it no more: nobody may use the address from now on. Waits for what the GPU was told to do."""
        card, self._card = self._card, None
        if card is not None:
            card.unmap(self.pointer, self.num_bytes)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then it goes with the process
            self.release()


class CardMemory:
    """The GPU ``device`` of this process. ``library``: CUDA's driver; that of the system, where it is not
    given. Raises OSError where there is none.
    """

    mapped_bytes = 0
    """What is mapped of this GPU's own memory; of other GPUs' nothing is counted."""

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        self.device = device
        self._cuda = library or cast("Library", ctypes.CDLL("libcuda.so.1"))
        self._index = device.index or 0
        self._own: dict[int, int] = {}
        self.settle()  # the driver knows this thread from then on
        self._changing = threading.RLock()  # memory may be given back wherever Python collects garbage

    # ------------------------------------------------------------------ memory

    def made(self, num_bytes: int) -> tuple[MappedMemory, int]:
        """New memory of at least ``num_bytes``, with zeros, and a descriptor of it, which is the caller's to
        close. Raises CardMemoryError; ENOMEM, where there is not as much.
        """
        prop = AllocationProp(_PINNED, _DESCRIPTOR, Location(_ON_DEVICE, self._index))
        grain = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(prop), _LEAST)
        size = -(-num_bytes // grain.value) * grain.value
        handle = self._new(size, prop)
        try:
            mapped, descriptor = self._map(handle, size), ctypes.c_int(-1)
            with self._changing:
                self._own[mapped.pointer] = size
                self.mapped_bytes += size
            self.seen(mapped).zero_()
            told = ctypes.byref(descriptor), handle, _DESCRIPTOR, _NO_FLAGS
            self._call("cuMemExportToShareableHandle", *told)
        finally:
            self._call("cuMemRelease", handle)
        os.set_inheritable(descriptor.value, False)
        return mapped, descriptor.value

    def opened(self, descriptor: int, num_bytes: int) -> MappedMemory:
        """The memory that has ``descriptor``, whoever made it, of whichever GPU of this host: ``num_bytes``,
        all of it. Raises CardMemoryError where this GPU may not read that one's.
        """
        handle = ctypes.c_ulonglong()
        number = ctypes.c_void_p(descriptor)  # by value, in the place of a pointer
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), number, _DESCRIPTOR)
        try:
            return self._map(handle, num_bytes)
        finally:
            self._call("cuMemRelease", handle)

    def unmap(self, pointer: int, num_bytes: int) -> None:
        """Take the memory at ``pointer`` from there. Waits for what the GPU was told to do."""
        self.settle()
        self._call("cuMemUnmap", _address(pointer), _size(num_bytes))
        self._call("cuMemAddressFree", _address(pointer), _size(num_bytes))
        with self._changing:
            self.mapped_bytes -= self._own.pop(pointer, 0)

    def _new(self, size: int, prop: AllocationProp) -> ctypes.c_ulonglong:
        handle = ctypes.c_ulonglong()
        what = ctypes.byref(handle), _size(size), ctypes.byref(prop), _NO_FLAGS
        doing = f"tried to allocate {size} bytes"
        try:
            self._call("cuMemCreate", *what, doing=doing)
        except CardMemoryError as error:
            if error.errno != errno.ENOMEM:
                raise
            self.give_back()  # what torch keeps for tensors to come is free, and not to the driver
            self._call("cuMemCreate", *what, doing=doing)
        return handle

    def _map(self, handle: ctypes.c_ulonglong, size: int) -> MappedMemory:
        pointer = ctypes.c_ulonglong()
        self._call(
            "cuMemAddressReserve", ctypes.byref(pointer), _size(size), _size(0), _address(0), _NO_FLAGS
        )
        try:
            self._call("cuMemMap", pointer, _size(size), _size(0), handle, _NO_FLAGS)
        except CardMemoryError:
            self._call("cuMemAddressFree", pointer, _size(size))
            raise
        mapped = MappedMemory(self, pointer.value, size)
        access = AccessDesc(Location(_ON_DEVICE, self._index), _READ_WRITE)
        self._call("cuMemSetAccess", pointer, _size(size), ctypes.byref(access), _size(1))
        return mapped

    def _call(self, name: str, *arguments: object, doing: str = "") -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            said = (text.value or b"an unknown error").decode(errors="replace")
            raise CardMemoryError(name, result, f"{said} ({result})" + f", {doing}" * bool(doing))

    # ------------------------------------------------------------------ torch

    def owned(self, mapped: MappedMemory) -> Tensor:
        """All of ``mapped``, of this GPU, uint8; it stays mapped as long as any tensor of it is there."""
        return torch.as_tensor(mapped, device=self.device)

    def seen(self, mapped: MappedMemory) -> Tensor:
        """All of ``mapped``, of whichever GPU, uint8, for this one to read: until ``mapped`` is released."""
        # Whose memory it is torch would ask the driver, and take the number of a GPU that may not be visible
        # to this process. A copy within one GPU finds its source by the address.
        storage: Any = torch._C._construct_storage_from_data_pointer(  # noqa: SLF001 - no public call says so
            mapped.pointer, self.device, mapped.num_bytes
        )
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def settle(self) -> None:
        """Wait for what the GPU was told to do."""
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Have Python and torch return the memory that nobody uses."""
        gc.collect()
        torch.cuda.empty_cache()


_CARDS: dict[torch.device, CardMemory] = {}


def card_of(device: torch.device) -> CardMemory:
    """That of this process. Raises OSError where CUDA's driver is not there."""
    if device not in _CARDS:
        _CARDS[device] = CardMemory(device)
    return _CARDS[device]


def is_refused(error: OSError) -> bool:
    """Whether ``error`` says that memory cannot be had in this way: not that there is too little of it, or
    that a card is broken.
    """
    return error.errno != errno.ENOMEM and getattr(error, "error_code", 1) in _REFUSED


def mapped_bytes(device: torch.device) -> int:
    """Of the memory of ``device`` what this process has of it besides torch's."""
    return _CARDS[device].mapped_bytes if device in _CARDS else 0


def _address(pointer: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(pointer)


def _size(num_bytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(num_bytes)
