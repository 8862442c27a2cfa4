"""What a device that trains holds of tensors for as long as it trains: its state, sums and means, and the
layers that are gathered while they are computed.

Owns the count: bytes of storages, whoever refers to them, each once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import NamedTuple

import pytest
from torch import Tensor

from oobleckd.worker.state.gathered import GatheredLayer
from oobleckd.worker.training.executor import Executor
from tests.helpers.engine import World

_NOTHING_IN = (type, ModuleType, FunctionType, BuiltinFunctionType)


class Resident(NamedTuple):
    """Bytes of a device: of its ``state`` with copies in bfloat16, of its own ``sums``, and of ``means``."""

    state: int
    sums: int
    means: int


class ResidentWorld(World):
    """A world of devices whose ``resident`` bytes are counted where a step is reduced: nothing is missing
    then.
    """

    resident: dict[str, Resident]

    def _in(self, device: str, act: Callable[[Executor], object]) -> bool:
        found = super()._in(device, act)
        executor = self.nodes[device].executor
        if len(executor.reducer.reduced) == len(executor.store.buckets):
            self.__dict__.setdefault("resident", {})[device] = resident(executor)
        return found


def resident(executor: Executor) -> Resident:
    """Of a device, by now."""
    store, reducer = executor.store, executor.reducer
    if store.memory is not None:
        state = sum(store.memory.own(bucket).numel() for bucket in store.buckets)
    else:
        state = held_by(store.buckets.values())
    return Resident(state, held_by(reducer.parts.values()), held_by(reducer.means.values()))


def held_by(things: Iterable[object]) -> int:
    """Bytes of all storages that are reached from ``things``."""
    found: dict[int, int] = {}
    known: set[int] = set()
    left: list[object] = list(things)
    while left:
        thing = left.pop()
        if id(thing) in known or isinstance(thing, _NOTHING_IN):
            continue
        known.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        else:
            left += gc.get_referents(thing)
    return sum(found.values())


class GatheredNow:
    """Bytes of the layers that are gathered, in all devices of this process together: ``now``, and at
    ``most``. One of them computes at a time.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        take, drop = GatheredLayer.take, GatheredLayer.drop
        held: dict[int, int] = {}

        def taking(layer: GatheredLayer) -> None:
            take(layer)
            held[id(layer)] = layer.num_bytes
            self.most = max(self.most, sum(held.values()))

        def dropping(layer: GatheredLayer) -> None:
            drop(layer)
            held.pop(id(layer), None)

        patch.setattr(GatheredLayer, "take", taking)
        patch.setattr(GatheredLayer, "drop", dropping)
