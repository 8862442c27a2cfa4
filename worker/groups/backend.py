"""What a backend must be able to do. ``nccl`` is the real one; ``gloo`` stands in for it in tests on a CPU.

A channel is a process group of two ranks, the sender (0) and the receiver (1), used in one direction and by
one thread. (NCCL runs both directions between two ranks on one stream, in which two sends that meet would
block each other; and ``abort`` concerns a whole process group.) A group of more ranks that can be reshaped,
such as torch's ``_reconfigure``, fits behind ``Backend`` as well: ``channel`` then gives views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from oobleckd.worker.groups.store import ChannelStore

SENDER, RECEIVER = 0, 1


class Pair(Protocol):
    """What a channel uses of torch's process groups, whose stubs do not say it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Begin to send."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Begin to receive."""

    def abort(self) -> None:
        """End what is under way (gloo: nothing)."""


class Channel(Protocol):
    """One end of a channel. All but ``abort`` is called by one thread; RuntimeError says that the channel is
    broken.
    """

    def open(self) -> None:
        """Connect to the other end; waits for it."""

    def send(self, payload: Tensor) -> None:
        """Send bytes (uint8, one dimension); returns when ``payload`` was read to its end."""

    def receive(self, payload: Tensor) -> None:
        """Fill ``payload``. Returns only when the host knows that it is complete: nothing may compute on
        less.
        """

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """Make ``tensors``, which this thread made of a payload, safe for the thread that computes."""

    def abort(self) -> None:
        """End it, from any thread and at any time, again if need be: all calls under way raise soon."""


class Backend(Protocol):
    """A kind of process group on this device."""

    name: str
    place: str
    """The accelerator that this device computes on, named so that no other has the same name."""

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a message with these tensors should go by this backend: it must be able to, and
        gain by it.
        """

    def refusal(self, place: str) -> str:
        """Why there can be no channel to a device on ``place``; empty when there can."""

    def mark(self, tensors: Sequence[Tensor]) -> Callable[[], object]:
        """Call it where ``tensors`` were computed; what it returns waits until they are there."""

    def thread(self) -> AbstractContextManager[object]:
        """What a channel's thread runs in."""

    def empty(self, num_bytes: int) -> Tensor:
        """Room for a payload."""

    def channel(self, store: ChannelStore, rank: int, name: str) -> Channel:
        """An end of the channel ``name``, not open yet."""
