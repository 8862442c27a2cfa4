"""Memory of a GPU that others can map: the driver's calls, what lives as long as what, and where it ends.

The driver is one of ours (``cudadriver``), as there is no GPU here; tests/gpu has a real one.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.worker.runtime import card_memory
from oobleckd.worker.runtime.card_memory import (
    AccessDesc,
    AllocationProp,
    CardMemoryError,
    card_of,
    mapped_bytes,
)
from oobleckd.worker.runtime.deaths import death_of, is_broken_card, is_out_of_memory
from oobleckd.worker.runtime.descriptors import Lender
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state import window as window_module
from oobleckd.worker.state.window import CardWindow, Handle, opened, window
from tests.helpers.cards import CUDA
from tests.helpers.cudadriver import GRAIN, NOT_PERMITTED, OUT_OF_MEMORY, CudaDriver, HostCard

OWNER = """
import sys, msgspec, torch
from oobleckd.worker.runtime.descriptors import Lender
from oobleckd.worker.state.window import CardWindow
from tests.helpers.cudadriver import CudaDriver, HostCard
window = CardWindow(4096, HostCard(CudaDriver()), Lender())
window.memory.view(torch.float32)[:3] = torch.tensor([1.0, 2.0, 3.0])
sys.stdout.buffer.write(msgspec.msgpack.encode(window.handle))
sys.stdout.flush()
sys.stdin.readline()
window.memory.view(torch.float32)[0] = 7.0
print("changed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def driver() -> CudaDriver:
    return CudaDriver()


@pytest.fixture
def card(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> HostCard:
    card = HostCard(driver)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setitem(card_memory._CARDS, CUDA, card)
    return card


def test_structures_are_those_of_the_driver() -> None:
    """Sizes and places as cuda.h has them, on Linux of 64 bits."""
    places = {name: getattr(AllocationProp, name).offset for name, *_ in AllocationProp._fields_}
    assert ctypes.sizeof(AllocationProp) == 32
    assert places == {
        "type": 0, "requestedHandleTypes": 4, "location": 8, "win32HandleMetaData": 16, "allocFlags": 24,
    }  # fmt: skip
    assert (ctypes.sizeof(AccessDesc), AccessDesc.flags.offset) == (12, 8)


def test_another_process_reads_it_and_still_has_it_when_its_owner_was_killed(
    card: HostCard, driver: CudaDriver
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        handle = msgspec.msgpack.decode(os.read(owner.stdout.fileno(), 200), type=Handle)
        assert (handle.pid, handle.num_bytes) == (owner.pid, GRAIN)
        found = opened(handle, CUDA)
        memory = found.memory.view(torch.float32)
        assert memory[:3].tolist() == [1.0, 2.0, 3.0]
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == b"changed\n"
        assert memory[0] == 7.0
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert memory[:3].tolist() == [7.0, 2.0, 3.0]
    assert (driver.handles, len(driver.mapped), card.waits) == ({}, 1, 1)
    with pytest.raises(FileNotFoundError):
        opened(handle, CUDA)
    found.close()
    found.close()
    assert (driver.mapped, driver.reserved, card.waits) == ({}, {}, 2)


def test_it_lives_as_long_as_a_tensor_of_it(card: HostCard, driver: CudaDriver) -> None:
    made = window(GRAIN + 1, CUDA)
    assert isinstance(made, CardWindow)
    assert made.memory.numel() == 2 * GRAIN
    assert not made.memory.any()
    assert (driver.used, mapped_bytes(CUDA)) == (2 * GRAIN, 2 * GRAIN)
    part, handle = made.memory[5:9], made.handle
    made.close()
    with pytest.raises(FileNotFoundError):
        opened(handle, CUDA)
    del made
    gc.collect()
    assert part.fill_(3).tolist() == [3] * 4
    assert driver.used == 2 * GRAIN
    del part
    gc.collect()
    assert (driver.used, mapped_bytes(CUDA), driver.reserved, card.waits) == (0, 0, {}, 2)


def test_a_descriptor_of_a_window_that_is_closed_leads_to_no_other_file(card: HostCard) -> None:
    made = window(1, CUDA)
    handle = made.handle
    made.close()
    with Path(os.devnull).open("rb") as other:
        os.dup2(other.fileno(), handle.number)
    with pytest.raises(FileNotFoundError):
        opened(handle, CUDA)
    os.close(handle.number)
    assert card.mapped_bytes == GRAIN


def test_what_torch_keeps_is_given_back_before_there_is_too_little(
    driver: CudaDriver, card: HostCard
) -> None:
    driver.num_bytes = 3 * GRAIN
    kept = [window(GRAIN, CUDA)]
    card.give_back = kept.clear  # type: ignore[method-assign]
    made = window(3 * GRAIN, CUDA)
    assert driver.used == 3 * GRAIN == made.memory.numel()
    with pytest.raises(
        CardMemoryError, match=r"cuMemCreate: out of memory \(2\), tried to allocate 4194304"
    ) as full:
        window(2 * GRAIN, CUDA)
    assert full.value.errno == errno.ENOMEM
    assert is_out_of_memory(full.value)
    death = death_of(full.value, "deploy")
    assert death is not None
    assert (driver.used, driver.handles, len(driver.reserved)) == (3 * GRAIN, {}, 1)


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"]
)
def test_what_fails_on_the_way_leaves_nothing(card: HostCard, driver: CudaDriver, call: str) -> None:
    driver.fails[call] = NOT_PERMITTED
    with pytest.raises(UserError, match=rf"devices_per_stage: .*cuda:0.*{call}: not permitted \(800\)"):
        window(GRAIN, CUDA)
    gc.collect()
    assert (driver.handles, driver.mapped, driver.reserved, card.mapped_bytes) == ({}, {}, {}, 0)


def test_a_gpu_that_may_not_read_another_one_says_so(
    card: HostCard, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = CudaDriver()
    made = CardWindow(GRAIN, HostCard(other), Lender())
    driver.peers = False
    with pytest.raises(CardMemoryError, match=r"cuMemSetAccess: not permitted"):
        opened(made.handle, CUDA)
    gc.collect()
    assert (driver.handles, driver.mapped, driver.reserved, card.mapped_bytes) == ({}, {}, {}, 0)


def test_without_a_driver_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_memory, "_CARDS", {})
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert mapped_bytes(CUDA) == 0
    with pytest.raises(OSError, match=r"libcuda\.so\.1"):
        card_of(CUDA)
    with pytest.raises(UserError, match=r"resources\.devices_per_stage: no other device can read .*libcuda"):
        window(GRAIN, CUDA)


def test_errors_that_cuda_has_no_text_for(card: HostCard, driver: CudaDriver) -> None:
    driver.fails["cuMemCreate"] = 4711
    with pytest.raises(CardMemoryError, match=r"cuMemCreate: an unknown error \(4711\)"):
        card.made(1)
    driver.fails["cuMemCreate"] = OUT_OF_MEMORY
    with pytest.raises(CardMemoryError, match=r"out of memory"):
        card.made(1)
    assert card.given_back == 1


def test_a_broken_card_is_no_matter_of_the_job_s(card: HostCard, driver: CudaDriver) -> None:
    driver.fails["cuMemMap"] = 719
    with pytest.raises(CardMemoryError) as broken:
        window(GRAIN, CUDA)
    assert is_broken_card(broken.value)


def test_another_allocator_of_torch_is_refused(card: HostCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(UserError, match="cudaMallocAsync") as refused:
        window(GRAIN, CUDA)
    assert "PYTORCH_CUDA_ALLOC_CONF" in refused.value.hint


def test_on_a_cpu_windows_are_files() -> None:
    assert window_module.window(5, torch.device("cpu")).memory.numel() == 5
