"""Channels inside one process that do nothing until the test lets them: every moment of a break can be had.

In place of NCCL and gloo, which move payloads when they like. A payload moves when ``Yard.let`` allows it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from oobleckd.worker.groups.store import ChannelOver, ChannelStore

TIMEOUT_S = 30.0


class Yard:
    """Where the channels of one process meet, by name."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.payloads: dict[str, deque[Tensor]] = {}
        self.allowed: Counter[str] = Counter()
        self.aborted: list[str] = []
        self.never_ends = False

    def let(self, name: str, count: int = 1) -> None:
        """Allow ``count`` more payloads on the channel ``"EPOCH SENDER > RECEIVER"``; its opening
        takes one.
        """
        with self.changed:
            self.allowed[name] += count
            self.changed.notify_all()


class YardChannel:
    """One end."""

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard, self.name, self.over = yard, name, False

    def open(self) -> None:
        """Nothing to connect."""

    def send(self, payload: Tensor) -> None:
        with self.yard.changed:
            self.yard.payloads.setdefault(self.name, deque()).append(payload.clone())
            self.yard.changed.notify_all()
            self._until(lambda: not self.yard.payloads[self.name])

    def receive(self, payload: Tensor) -> None:
        with self.yard.changed:
            self._until(lambda: bool(self.yard.payloads.get(self.name)) and self.yard.allowed[self.name] > 0)
            self.yard.allowed[self.name] -= 1
            payload.copy_(self.yard.payloads[self.name].popleft())
            self.yard.changed.notify_all()

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """CPU tensors need nothing."""

    def abort(self) -> None:
        with self.yard.changed:
            self.over = True
            self.yard.aborted.append(self.name)
            self.yard.changed.notify_all()

    def _until(self, done: Callable[[], bool]) -> None:
        self.yard.changed.wait_for(lambda: done() or (self.over and not self.yard.never_ends), TIMEOUT_S)
        if self.over:
            raise ChannelOver("aborted")


class YardBackend:
    """Carries every message with a payload."""

    name = "yard"

    def __init__(self, yard: Yard, place: str = "") -> None:
        self.yard, self.place = yard, place

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        return any(tensor.numel() for tensor in tensors)

    def refusal(self, place: str) -> str:
        return "they are in one place" if place and place == self.place else ""

    def mark(self, tensors: Sequence[Tensor]) -> Callable[[], object]:
        return lambda: None

    def thread(self) -> AbstractContextManager[object]:
        return nullcontext()

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def channel(self, store: ChannelStore, rank: int, name: str) -> YardChannel:
        return YardChannel(self.yard, name)
