"""Memory of a process that the other processes of its node can read where it lies.

A window has the storages of one bucket's state, and the copies of it in bfloat16. Its *handle* is what
another process needs to open it. On a CPU it is a file without a name, which is gone with the last process
that has it, however that ends: nothing is left behind after SIGKILL. Owns the memory and where in it what
lies; not when it may be read (``group``).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

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
    """How another process of the node opens a window: descriptor ``number`` of the process ``pid``."""

    pid: int
    number: int
    num_bytes: int


class Window:
    """``memory``: zeros, uint8 (num_bytes,), on a CPU. Raises OSError where the system has none."""

    def __init__(self, num_bytes: int) -> None:
        self._number = os.memfd_create("oobleckd-shard", os.MFD_CLOEXEC)
        os.ftruncate(self._number, num_bytes)
        self.memory = _mapped(self._number, num_bytes)

    @property
    def handle(self) -> Handle:
        """For the others of the node, while this process lives."""
        return Handle(os.getpid(), self._number, self.memory.numel())

    def close(self) -> None:
        """Nobody can open it any more. The memory lives as long as a tensor of it."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


def opened(handle: Handle) -> Tensor:
    """The memory of another process's window, uint8. Raises OSError where that process is gone."""
    number = os.open(Path("/proc") / str(handle.pid) / "fd" / str(handle.number), os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(number, handle.num_bytes)
    finally:
        os.close(number)


def _mapped(number: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(number, num_bytes), dtype=torch.uint8)
