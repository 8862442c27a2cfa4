"""Shard groups of a simulated world: the worker's own, over buckets that have no tensors.

Real is who says when that it has updated, whom that keeps from computing, which slices are whose, and which
gradients go to whom. Not real are windows: that all of a group have the same weights while one of them reads
those of the others is asserted (``SimShardGroup.check``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oobleckd.planner.plan import Layers
from oobleckd.worker import sums
from oobleckd.worker.sharding.group import GRADIENTS, ShardGroup
from oobleckd.worker.state.bucket_state import BucketState, StateShape
from tests.helpers.simstore import CPU, NOTHING, Carried, Gradient

if TYPE_CHECKING:
    from tests.helpers.simdevice import SimDevice


class SimShard(NamedTuple):
    """Slices of a bucket (a bitmap)."""

    slices: int
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def cut(self, _tensors: Sequence[Any], _slices: int) -> list[Any]:
        return []

    def of_parts(self, by_key: Sequence[int]) -> Sequence[int]:
        return by_key


@dataclass(frozen=True)
class SimShards:
    """``num_slices`` of each of ``num_buckets``, divided as the worker divides them."""

    num_shards: int
    num_slices: int
    num_buckets: int

    @property
    def cuts(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        numbers = [(1 << 20,) * self.num_slices] * self.num_buckets
        if self.num_shards == 1:
            return numbers, []
        return numbers, [self.of(bucket) for bucket in range(self.num_buckets)]

    def rounded(self, _bucket: int, _rank: int, _layers: object) -> list[int]:
        """No numbers, no copies of them."""
        return []

    @property
    def device(self) -> torch.device:
        return CPU

    def shard(self, bucket: int, rank: int) -> SimParts:
        """What ``rank`` holds of a ``bucket``, as parts that can be told apart."""
        slices = self.of(bucket)[rank] if self.num_shards > 1 else (1 << self.num_slices) - 1
        return SimParts(tuple(sums.KeyRange(0, number, number + 1) for number in sums.members(slices)))

    def shape(self, _bucket: int, _rank: int) -> StateShape:
        return NOTHING

    def whole_shape(self, _bucket: int) -> StateShape:
        return NOTHING

    def of(self, bucket: int) -> tuple[int, ...]:
        """Of each rank its slices."""
        cut: Any = SimCut((1 << 20,) * self.num_slices)
        return sums.shards(bucket, cut, self.num_shards)


class SimParts(NamedTuple):
    """What a reshard asks of a shard."""

    parts: tuple[sums.KeyRange, ...]


class SimCut(NamedTuple):
    """What ``sums.shards`` asks of a slicing."""

    numbers: tuple[int, ...]


@dataclass
class SimMemory:
    """Windows that nobody opens."""

    handles: dict[int, Any] = field(default_factory=dict)

    def adopt(self, _buckets: object, _layers: object) -> None:
        pass


class SimShardGroup(ShardGroup):
    """What goes to others of the group are ``Gradient`` in place of tensors."""

    sim: SimDevice

    @classmethod
    def of(cls, sim: SimDevice, group: ShardGroup) -> SimShardGroup:
        """In the place of ``group``."""
        found = cls(group.device, group.store, group.messenger)
        found.sim = sim
        return found

    def send_all(
        self, round_: int, layer: int, micro_batch: int, grads: Sequence[Any], told: Sequence[Any]
    ) -> None:
        """``grads``: by rank."""
        key = (GRADIENTS, round_, layer, micro_batch, self.device)
        for rank, peer in self.others.items():
            carried: Any = Carried((grads[rank], list(told)))
            self.messenger.send(peer, key, [carried])

    def received(self, _layer: int, tensors: Sequence[Any]) -> Any:
        (carried,) = tensors
        return carried.what

    def whole(self, bucket: int) -> BucketState:
        mine = self.store.buckets[bucket].exponents
        for store in self._stores():
            assert store.buckets[bucket].exponents == mine, "a checkpoint of shards of two boundaries"
        return BucketState(NOTHING, {}, mine)

    def check(self, layers: Layers, weights: tuple[int, int]) -> None:
        """Whoever of the group lives has the same ``weights`` of ``layers`` now."""
        for store in self._stores():
            found = store.weights(layers)
            assert found == weights, f"{self.device} reads {found} of another one, and has {weights}"

    def _stores(self) -> list[Any]:
        devices = [self.sim.world.device(name) for name in self.others.values()]
        executors = [device.executor for device in devices if device is not None and device.alive]
        return [
            executor.store
            for executor in executors
            if executor is not None and executor.machine.layout.epoch == self.epoch
        ]


def shared_out(
    by_bucket: Mapping[int, Gradient], micro_batch: int, shards: SimShards
) -> list[dict[int, list[Gradient]]]:
    """By rank the part of gradients: what is wrong with one is in one part, which has numbers at all."""
    fine = Gradient(nan=False, overflow=False)
    found: list[dict[int, list[Gradient]]] = [{} for _ in range(shards.num_shards)]
    for bucket, grad in by_bucket.items():
        ranks = [rank for rank, slices in enumerate(shards.of(bucket)) if slices]
        odd = ranks[micro_batch % len(ranks)]
        for rank, parts in enumerate(found):
            parts[bucket] = [grad if rank == odd else fine]
    return found
