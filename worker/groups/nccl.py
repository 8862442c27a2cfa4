"""Channels over NCCL, for CUDA tensors of devices on GPUs of their own.

Written from the sources of torch and NCCL; what of it has run on a GPU is said in docs/groups.md.

- One operation of a channel is under way at a time, and the host looks whether it is done before anything
  else may depend on it. A kernel that was queued behind a receive would run on garbage after an abort.
- What is sent is complete before the send is queued, so no kernel of ours ever waits for computation.
- All torch would do by itself about errors and timeouts is off (``_SETTINGS``): the group decides.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from oobleckd.worker.groups.backend import RECEIVER, SENDER, Channel, Pair
from oobleckd.worker.groups.store import ChannelOver, ChannelStore

MIN_BYTES = 1 << 16
"""Below this the transport is as quick: header, launch and acknowledgement cost about what two copies do."""

SHARED_GPU_VERSION = (2, 30)
SHARED_GPU_SETTING = "NCCL_MULTI_RANK_GPU_ENABLE"

_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # no watchdog that ends the process
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",  # seconds; else an abort waits half an hour for an init
}
_TIMEOUT = timedelta(hours=1)  # torch's own, which only logs
_STUCK_S = 30.0  # one payload, after its header
_POLL_S = 1e-4
_GRACE_S = 1.0  # between NCCL's word that an operation is done and our event behind it


class NcclBackend:
    """NCCL on ``device``. Raises nothing; ``ChannelOver`` comes from the channels."""

    name = "nccl"

    def __init__(self, device: torch.device) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._device = device
        self.place = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        """All on this GPU, and large enough."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return num_bytes >= MIN_BYTES and all(tensor.device == self._device for tensor in tensors)

    def refusal(self, place: str) -> str:
        """NCCL takes one rank a GPU, unless it is new and was told to take more."""
        if place != self.place or shares_gpus(nccl_version(), os.environ):
            return ""
        return f"both are on {place}, and this NCCL takes one rank a GPU"

    def mark(self, _tensors: Sequence[Tensor]) -> Callable[[], object]:
        """An event behind what was queued so far; waiting for it burns no processor."""
        computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        return computed.synchronize

    def thread(self) -> AbstractContextManager[object]:
        """A stream of its own: the legacy default one would wait for all computation."""
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def empty(self, num_bytes: int) -> Tensor:
        """Memory of this GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def channel(self, store: ChannelStore, rank: int, _name: str) -> Channel:
        """One end."""
        return _NcclChannel(store, rank, self._device)


class _NcclChannel:
    def __init__(self, store: ChannelStore, rank: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._device = device
        self._aborted = threading.Event()
        self._group: Pair | None = None

    def open(self) -> None:
        # The communicator itself is made by the first operation. Priority: torch has 32 streams of each kind,
        # and
        # NCCL's must not be ours, which wait for them.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.blocking = 0
        options._timeout = _TIMEOUT  # noqa: SLF001 - the only way to say it
        self._check()
        self._group = cast("Pair", dist.ProcessGroupNCCL(self._store, self._rank, 2, options))
        self._check()

    def send(self, payload: Tensor) -> None:
        self._finish(self._ready().send([payload], RECEIVER, 0))

    def receive(self, payload: Tensor) -> None:
        self._finish(self._ready().recv([payload], SENDER, 0))

    def settle(self, tensors: Sequence[Tensor]) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        for tensor in tensors:
            # Its memory must not return to this stream's pool while the computing stream uses it.
            tensor.record_stream(torch.cuda.default_stream(self._device))

    def abort(self) -> None:
        self._aborted.set()
        if self._group is not None:
            self._group.abort()

    def _finish(self, work: dist.Work) -> None:
        """Wait until the operation has run to its end on the GPU."""
        work.wait()  # our stream waits for NCCL's; the host does not
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + _STUCK_S
        told = False
        while not done.query():  # type: ignore[no-untyped-call]
            if not told and work.is_completed():
                told, deadline = True, time.monotonic() + _GRACE_S
            if time.monotonic() > deadline:
                raise ChannelOver("NCCL reported an error" if told else f"stuck for {_STUCK_S:.0f} s")
            if self._aborted.wait(_POLL_S):
                break
        self._check()  # after the look at the event: an abort ends kernels, too

    def _ready(self) -> Pair:
        self._check()
        assert self._group is not None, "the channel was not opened"
        return self._group

    def _check(self) -> None:
        if self._aborted.is_set():
            raise ChannelOver("aborted")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded: torch tells the one that it was built with, and a newer one may
    stand in for that.
    """
    # torch tells a constant, and a newer library in its place takes several ranks on one GPU.
    # (D-transport-010)
    number = ctypes.c_int()
    try:
        known = (
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0
        )  # the loaded one has this name
    except (OSError, AttributeError):  # it is a part of torch's own library
        known = False
    if not known:
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def shares_gpus(version: Sequence[int], environ: Mapping[str, str]) -> bool:
    """Whether NCCL of ``version`` takes several ranks on one GPU, with these settings."""
    return tuple(version[:2]) >= SHARED_GPU_VERSION and environ.get(SHARED_GPU_SETTING) == "1"
