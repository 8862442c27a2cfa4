"""Memory of a process that others of its node read where it lies: what they see, and what is left when it
dies.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.worker.state.bucket_state import PARAM, SlotShape, StateShape
from oobleckd.worker.state.window import Handle, HostWindow, WindowShape, opened
from tests.helpers.models import CPU

OWNER = """
import sys, msgspec, torch
from oobleckd.worker.state.window import HostWindow
window = HostWindow(4096)
window.memory.view(torch.float32)[:3] = torch.tensor([1.0, 2.0, 3.0])
sys.stdout.buffer.write(msgspec.msgpack.encode(window.handle))
sys.stdout.flush()
sys.stdin.readline()
window.memory.view(torch.float32)[0] = 7.0
print("changed", flush=True)
sys.stdin.readline()
"""


def test_another_process_reads_it_and_still_has_it_when_its_owner_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle = msgspec.msgpack.decode(os.read(owner.stdout.fileno(), 100), type=Handle)
        assert (handle.pid, handle.num_bytes) == (owner.pid, 4096)
        memory = opened(handle, CPU).memory.view(torch.float32)
        assert memory[:3].tolist() == [1.0, 2.0, 3.0]
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == b"changed\n"
        assert memory[0] == 7.0
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert memory[:3].tolist() == [7.0, 2.0, 3.0]
    with pytest.raises(OSError, match="No such file"):
        opened(handle, CPU)


SIZE = 1_234_944
"""Bytes of a window that no other test has."""


def shown(num_bytes: int) -> list[str]:
    """The lines of this process's memory map that are of a window of so many bytes."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if "oobleckd-shard" in line and end - begin == -(-num_bytes // 4096) * 4096:
            found.append(line)
    return found


def test_a_window_that_nobody_has_any_more_is_gone() -> None:
    window = HostWindow(SIZE)
    handle, memory = window.handle, window.memory
    window.close()
    with pytest.raises(OSError, match="No such file"):
        opened(handle, CPU)
    memory.fill_(1)  # as long as a tensor of it lives
    assert len(shown(SIZE)) == 1
    del window, memory
    gc.collect()
    assert not shown(SIZE)


def test_what_lies_where_in_it() -> None:
    slots = (
        SlotShape.of(PARAM, torch.float32, {0: (3, 5), 1: (7,)}),
        SlotShape.of("moment", torch.bfloat16, {0: (3, 5)}),
    )
    shape = StateShape(slots)
    where = WindowShape.of(shape, shape.rounded([1]))
    window = HostWindow(where.num_bytes)
    storages = where.storages(window.memory)
    assert {name: (flat.dtype, flat.numel()) for name, flat in storages.items()} == {
        PARAM: (torch.float32, slots[0].length),
        "moment": (torch.bfloat16, slots[1].length),
        "rounded": (torch.bfloat16, 128),
    }
    for number, flat in enumerate(storages.values()):
        assert flat.data_ptr() % 256 == 0
        assert not flat.any()
        flat.fill_(number + 1)
    assert [flat[0].item() for flat in storages.values()] == [1.0, 2.0, 3.0]


def test_of_a_shard_without_numbers() -> None:
    where = WindowShape.of(StateShape(()), StateShape(()).rounded([]))
    window = HostWindow(where.num_bytes)
    assert where.storages(window.memory)["rounded"].numel() == 0
