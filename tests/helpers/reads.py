"""Counts what the host reads of tensors: on a GPU each read waits until all before it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from oobleckd.worker.round_machine.commands import Command
from oobleckd.worker.training.executor import Executor

_READS = {"tolist", "cpu", "nonzero"}
"""Of Python's side; a single number (``item``, ``bool``, ``float``) is seen as the kernel that fetches it."""


class _Calls(TorchFunctionMode):
    def __init__(self, count: Counter[str], place: list[str]) -> None:
        super().__init__()
        self.count, self.place = count, place

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self.count[self.place[-1]] += 1
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    def __init__(self, count: Counter[str], place: list[str]) -> None:
        super().__init__()
        self.count, self.place = count, place

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count[self.place[-1]] += 1
        return func(*args, **(kwargs or {}))


class HostReads:
    """``by_round`` counts the reads of every device and round, by the command that was obeyed ("": by
    none of them, where messages are heard).
    """

    def __init__(self, patch: Any) -> None:
        self.by_round: dict[tuple[str, int], Counter[str]] = {}
        self._count: Counter[str] = Counter()
        self._place = [""]
        advance, do = Executor.advance, Executor._do

        def advanced(executor: Executor) -> bool:
            self._count = self.by_round.setdefault((executor.device, executor.counters.round), Counter())
            with _Calls(self._count, self._place), _Kernels(self._count, self._place):
                return advance(executor)

        def done(executor: Executor, command: Command) -> None:
            self._place.append(type(command).__name__)
            try:
                do(executor, command)
            finally:
                self._place.pop()

        patch.setattr(Executor, "advance", advanced)
        patch.setattr(Executor, "_do", done)


def kernels_of(act: Callable[[], object]) -> set[str]:
    """The kernels that ``act`` runs, by their names."""
    names: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names():
        act()
    return names
