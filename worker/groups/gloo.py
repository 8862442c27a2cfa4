"""Channels over gloo, for CPU tensors of processes on one host. For tests only: the transport is better.

It stands in for NCCL where there is no GPU: groups that block, that take their time to end, and that lose
what was under way. gloo cannot be interrupted, so ``abort`` shuts down the channel's sockets under it; they
are known by the loopback address that the channel has for itself. Its ports are open to this host,
unauthenticated.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from oobleckd.worker.groups.backend import RECEIVER, SENDER, Channel, Pair
from oobleckd.worker.groups.store import ChannelOver, ChannelStore

_STUCK = timedelta(seconds=10)
"""One payload, or the connecting. Less than a group gives its channels to end (``group.ABORT_S``): a peer
that dies just when gloo's own thread begins to write to it wakes nobody who waits for that payload, and its
socket is closed by then.
"""


class GlooBackend:
    """Carries every CPU message that has a payload: the more, the better the test."""

    name = "gloo"
    place = ""

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        """All on the CPU, and not empty."""
        return any(tensor.numel() for tensor in tensors) and all(tensor.is_cpu for tensor in tensors)

    def refusal(self, place: str) -> str:
        """Only of a device that is on something else."""
        return "" if place == self.place else f"it is on {place} and this device on a CPU"

    def mark(self, _tensors: Sequence[Tensor]) -> Callable[[], object]:
        """CPU tensors are there when the call returns that makes them."""
        return lambda: None

    def thread(self) -> AbstractContextManager[object]:
        """Nothing special."""
        return nullcontext()

    def empty(self, num_bytes: int) -> Tensor:
        """CPU memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def channel(self, store: ChannelStore, rank: int, name: str) -> Channel:
        """One end."""
        return _GlooChannel(store, rank, _address(name))


class _GlooChannel:
    def __init__(self, store: ChannelStore, rank: int, address: str) -> None:
        self._store = store
        self._rank = rank
        self._address = address
        self._aborted = threading.Event()
        self._group: Pair | None = None

    def open(self) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        device = dist.ProcessGroupGloo.create_device(hostname=self._address)
        for name, value in {"_devices": [device], "_threads": 1, "_timeout": _STUCK}.items():
            setattr(options, name, value)
        self._check()
        self._group = cast("Pair", dist.ProcessGroupGloo(self._store, self._rank, 2, options))
        self._check()

    def send(self, payload: Tensor) -> None:
        self._finish(self._ready().send([payload], RECEIVER, 0))

    def receive(self, payload: Tensor) -> None:
        self._finish(self._ready().recv([payload], SENDER, 0))

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """CPU tensors need nothing."""

    def abort(self) -> None:
        self._aborted.set()
        for entry in Path("/proc/self/fd").iterdir():
            # A descriptor may be closed and its number given away under us: what we then look at is another
            # socket, whose address is not ours.
            with suppress(OSError):
                if entry.is_socket():
                    with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                        if self._is_ours(sock):
                            sock.shutdown(socket.SHUT_RDWR)

    def _finish(self, work: dist.Work) -> None:
        work.wait()
        self._check()

    def _ready(self) -> Pair:
        self._check()
        assert self._group is not None, "the channel was not opened"
        return self._group

    def _check(self) -> None:
        if self._aborted.is_set():
            raise ChannelOver("aborted")

    def _is_ours(self, sock: socket.socket) -> bool:
        # A listening socket that is shut down under gloo ends the process (std::terminate).
        if sock.family != socket.AF_INET or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return self._address in {sock.getsockname()[0], sock.getpeername()[0]}


def _address(name: str) -> str:
    """A loopback address that no other channel of this process has."""
    a, b, c = hashlib.blake2b(name.encode(), digest_size=3).digest()
    return f"127.{64 + a % 128}.{b}.{c}"
