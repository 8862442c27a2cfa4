"""What devices of a world hold of tensors, counted at every operation, as no allocator of a CPU does.

Owns the count: a storage is of the device that made it, from then on until nothing refers to it.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oobleckd.protocol.job import Job
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Key
from tests.helpers.engine import Cuts, LocalMessenger, World


class HeldByDevice(TorchDispatchMode):
    """``now`` and ``most``: bytes by device, of storages that were made within ``of`` it."""

    def __init__(self) -> None:
        super().__init__()
        self.now: defaultdict[str, int] = defaultdict(int)
        self.most: defaultdict[str, int] = defaultdict(int)
        self._device = ""
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    @contextmanager
    def of(self, device: str) -> Iterator[None]:
        """Within, what is made is that of ``device``."""
        before, self._device = self._device, device
        try:
            yield
        finally:
            self._device = before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type == "cpu":
                self._note(each.untyped_storage())
        return out

    def _note(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        device, num_bytes = self._device, storage.nbytes()

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.now[device] -= num_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.now[device] += num_bytes
        self.most[device] = max(self.most[device], self.now[device])


class _InTurn(random.Random):
    """Nothing is late, and devices take turns: as where all are as fast."""

    _turn = 0

    def random(self) -> float:
        return 1.0

    def choice(self, seq: Any) -> Any:
        self._turn += 1
        return seq[self._turn % len(seq)]


class MeasuredWorld(World):
    """A world of devices that are alike, whose memory is counted, in ``held``."""

    held: HeldByDevice

    def __init__(self, job: Job, stages: dict[str, Cuts], run_dir: Path) -> None:
        super().__init__(job, stages, 0, run_dir)
        self.random = _InTurn()

    def run(self, limit: int = 200_000) -> None:
        with self.held:
            super().run(limit)

    def _add(self, device: str) -> None:
        if not hasattr(self, "held"):
            self.held = HeldByDevice()
        with self.held, self.held.of(device):
            super()._add(device)
        self.nodes[device].messenger.__class__ = _CountedMessenger

    def _begin(self, device: str) -> None:
        with self.held, self.held.of(device):
            super()._begin(device)

    def _in(self, device: str, act: Callable[[Executor], object]) -> bool:
        with self.held.of(device):
            return super()._in(device, act)


class _CountedMessenger(LocalMessenger):
    """What is sent is the receiver's."""

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> None:
        assert isinstance(self.world, MeasuredWorld)
        with self.world.held.of(peer):
            super().send(peer, key, tensors, meta)
