"""Memory of a process that the other processes of its node can read where it lies.

A window has the storages of one bucket's state, and the copies of it in bfloat16. Its *handle* is what
another process needs to open it. On a CPU it is a file without a name, on a GPU memory that the driver makes
for several processes (``card_memory``). Either is gone with the last process that has it, however that ends:
nothing is left behind after SIGKILL, and nothing is taken from who reads it. Owns the memory and where in it
what lies; not when it may be read (``group``).
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from oobleckd.worker.runtime.card_memory import CardMemory, card_of, is_refused
from oobleckd.worker.runtime.descriptors import Lender, borrowed
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.bucket_state import ALIGNED_BYTES, SlotShape, StateShape


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Where each slot of a bucket lies in its window: name -> (first byte, shape). Whoever knows the job and
    the rank knows it.
    """

    slots: Mapping[str, tuple[int, SlotShape]]
    num_bytes: int

    @classmethod
    def of(cls, shape: StateShape, rounded: SlotShape) -> WindowShape:
        """For a state of ``shape`` with the copies ``rounded``."""
        found, begin = {}, 0
        for slot in (*shape.slots, rounded):
            found[slot.name] = begin, slot
            begin += -(-slot.length * slot.dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(found, max(begin, ALIGNED_BYTES))

    def storages(self, memory: Tensor) -> dict[str, Tensor]:
        """By slot its numbers; ``memory``: all of the window, uint8."""
        return {
            name: memory[begin : begin + slot.length * slot.dtype.itemsize].view(slot.dtype)
            for name, (begin, slot) in self.slots.items()
        }


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """How another process of the node opens a window: descriptor ``number`` of the process ``pid``, which
    lends it at ``address``, where it has no name in ``/proc``.
    """

    pid: int
    number: int
    num_bytes: int
    address: bytes = b""


class Window(Protocol):
    """Memory that others of the node can read."""

    memory: Tensor
    """Zeros, uint8: at least as many bytes as were asked for. It lives as long as a tensor of it."""

    @property
    def handle(self) -> Handle:
        """For the others of the node, while this process lives."""

    def close(self) -> None:
        """Nobody can open it any more."""


class OpenedWindow(NamedTuple):
    """The ``memory`` of another process's window, uint8. ``close``: nobody may use it from then on."""

    memory: Tensor
    close: Callable[[], object]


class HostWindow:
    """A file in memory. Raises OSError where the system has none."""

    def __init__(self, num_bytes: int) -> None:
        self._number = -1
        self._number = os.memfd_create("oobleckd-shard", os.MFD_CLOEXEC)
        os.ftruncate(self._number, num_bytes)
        self.memory = _mapped(self._number, num_bytes)

    @property
    def handle(self) -> Handle:
        """For the others of the node, while this process lives."""
        return Handle(os.getpid(), self._number, self.memory.numel())

    def close(self) -> None:
        """Nobody can open it any more."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


class CardWindow:
    """Memory of the GPU ``card``, besides what torch has of it. Raises OSError where there is not as much."""

    def __init__(self, num_bytes: int, card: CardMemory, lender: Lender) -> None:
        self._lender, self._number = lender, -1
        mapped, self._number = card.made(num_bytes)
        self.memory = card.owned(mapped)
        lender.lend(self._number)

    @property
    def handle(self) -> Handle:
        """For the others of the node, while this process lives."""
        return Handle(os.getpid(), self._number, self.memory.numel(), self._lender.address)

    def close(self) -> None:
        """Nobody can open it any more."""
        number, self._number = self._number, -1
        if number >= 0:
            self._lender.end(number)
            os.close(number)

    def __del__(self) -> None:
        self.close()


def window(num_bytes: int, device: torch.device) -> Window:
    """Memory of ``device``. Raises OSError where there is not as much, and UserError where others could not
    read it.
    """
    if device.type != "cuda":
        return HostWindow(num_bytes)
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        # That one does not know which stream memory came from.
        raise UserError(
            f"resources.devices_per_stage: torch's allocator {allocator} does not go with it",
            "unset PYTORCH_CUDA_ALLOC_CONF, or set resources.devices_per_stage to 1",
        )
    try:
        return CardWindow(num_bytes, card_of(device), _lender())
    except OSError as error:
        if not is_refused(error):
            raise
        raise UserError(
            f"resources.devices_per_stage: no other device can read the memory of {device}: {error}",
            "set it to 1",
        ) from error


def opened(handle: Handle, device: torch.device) -> OpenedWindow:
    """The memory of another process's window, for ``device`` to read. Raises FileNotFoundError where that
    process is gone, TimeoutError where it does not answer, and OSError where it may not be read.
    """
    if device.type == "cuda":
        return of_card(handle, card_of(device))
    number = os.open(Path("/proc") / str(handle.pid) / "fd" / str(handle.number), os.O_RDWR | os.O_CLOEXEC)
    try:
        return OpenedWindow(_mapped(number, handle.num_bytes), lambda: None)
    finally:
        os.close(number)


def of_card(handle: Handle, card: CardMemory) -> OpenedWindow:
    """The same, for ``card``."""
    number = borrowed(handle.address, handle.number, handle.pid)
    try:
        mapped = card.opened(number, handle.num_bytes)
    finally:
        os.close(number)
    return OpenedWindow(card.seen(mapped), mapped.release)


@functools.cache
def _lender() -> Lender:
    return Lender()


def _mapped(number: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(number, num_bytes), dtype=torch.uint8)
