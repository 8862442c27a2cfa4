"""Counts the bytes that a piece of code moves between memory and a processor, by what its operations read and
write.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oobleckd.worker.optimizers.compiled import CompiledPass
from oobleckd.worker.optimizers.one_pass import Update, UpdatedKeys
from oobleckd.worker.optimizers.rule import UpdateStep
from oobleckd.worker.sums.kernels import ChunkFigures, Kernels, SumMemory

_MOVE_NOTHING = frozenset({
    "_reshape_alias", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
})  # fmt: skip
"""Operations that make a tensor of memory as it is."""


class Traffic(TorchDispatchMode):
    """``num_bytes``: of all operations in its scope, each tensor that one reads or writes once; ``told``: of
    kernels, as they say themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._hidden = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (self._hidden or func._schema.name.split("::")[1] in _MOVE_NOTHING):
            read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            self.moved(tree_leaves((args, read)))
            self.moved(tree_leaves(args[0] if out is None else out))  # None: a list is changed in place
        return out

    def moved(self, values: Iterable[Any]) -> None:
        self.num_bytes += sum(value.nbytes for value in values if isinstance(value, Tensor))

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Operations whose numbers stay in the cache, or that somebody else counts."""
        self._hidden, before = True, self._hidden
        try:
            yield
        finally:
            self._hidden = before


def counted_update(update: Update, traffic: Traffic) -> Update:
    """``update``, with the bytes that it moves counted by ``traffic``: those of one pass, if it is one, else
    those of three.
    """

    def counted(keys: UpdatedKeys, step: UpdateStep, scale: float) -> None:
        with traffic.hidden():
            update(keys, step, scale)
        slots = [tensor for tensors in keys.slots.values() for tensor in tensors]
        copies = [copy for copy in keys.rounded if copy is not None]
        traffic.moved([*keys.params, *slots] * 2)
        traffic.moved([*keys.grads, *copies])
        if isinstance(update, CompiledPass):
            traffic.moved(keys.grads if scale != 1.0 else [])
        else:
            traffic.moved([*keys.grads, *keys.grads] if scale != 1.0 else [])
            traffic.moved([copy.float() for copy in copies])

    return counted


class Counted(Kernels):
    """``kernels``, with the bytes that they move by their docstrings counted by ``traffic``. ``squared``: the
    squares go through memory, as on a GPU.
    """

    def __init__(self, kernels: Kernels, traffic: Traffic, *, squared: bool) -> None:
        self._kernels, self._traffic, self._squared = kernels, traffic, squared

    def memory(self, sizes: Sequence[int], device: torch.device) -> SumMemory:
        return self._kernels.memory(sizes, device)

    def add(
        self, memory: SumMemory, grads: Sequence[Tensor], exponents: Sequence[int], *, first: bool
    ) -> None:
        self._traffic.moved([*grads, memory.flat, *(() if first else (memory.flat,))])
        with self._traffic.hidden():
            self._kernels.add(memory, grads, exponents, first=first)

    def checksum(self, flat: Tensor) -> Tensor:
        self._traffic.moved([flat])
        with self._traffic.hidden():
            return self._kernels.checksum(flat)

    def square(self, words: Tensor) -> tuple[Tensor, Tensor]:
        self._traffic.moved([words])
        with self._traffic.hidden():
            return self._kernels.square(words)

    def finish(
        self, parts: Sequence[Sequence[Tensor]], divisors: Sequence[float], into: Sequence[Tensor], chunk: int
    ) -> ChunkFigures:
        with self._traffic.hidden():
            figures = self._kernels.finish(parts, divisors, into, chunk)
        self._traffic.moved([*itertools.chain.from_iterable(parts), *into, *figures])
        if self._squared:
            self._traffic.moved([*parts[0], *parts[0]])  # squares in float64: written, and read again
        return figures
