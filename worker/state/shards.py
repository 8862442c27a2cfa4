"""What of each bucket the device of which rank holds, and what its state there consists of.

Pure functions of the job, the kind of device and the number of shards, so whoever knows these knows what
every other one has. Owns no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.models import ModelSpec
from oobleckd.worker.optimizers.plan import uncut
from oobleckd.worker.state.bucket_state import BucketState, StateShape
from oobleckd.worker.state.optimizer import parameters_of, state_shape


@dataclass(slots=True)
class Shards:
    """Of the buckets of ``spec`` on devices such as ``device``, ``num_shards`` each."""

    spec: ModelSpec
    device: torch.device
    num_shards: int = 1
    _slicings: dict[int, sums.Slicing] = field(default_factory=dict)
    _shards: dict[tuple[int, int], sums.Shard] = field(default_factory=dict)
    _shapes: dict[tuple[int, int], StateShape] = field(default_factory=dict)
    _whole: dict[int, StateShape] = field(default_factory=dict)

    def slicing(self, bucket: int) -> sums.Slicing:
        """How the parameters of ``bucket`` are cut into slices."""
        if bucket not in self._slicings:
            whole: frozenset[int] = frozenset()
            if self.num_shards > 1:
                whole = uncut(self.spec.job.optimizer, parameters_of(self.spec, [bucket]))
            shapes = self.spec.buckets[bucket].shapes
            self._slicings[bucket] = sums.slicing(shapes, self.device, self.num_shards, whole)
        return self._slicings[bucket]

    @property
    def cuts(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Of each bucket of the model how many numbers each of its slices has, and which of them each rank
        holds; the latter of none, where holders have all.
        """
        cut = [self.slicing(bucket.index) for bucket in self.spec.buckets]
        if self.num_shards == 1:
            return [each.numbers for each in cut], []
        ranks = [sums.shards(bucket, each, self.num_shards) for bucket, each in enumerate(cut)]
        return [each.numbers for each in cut], ranks

    def shard(self, bucket: int, rank: int) -> sums.Shard:
        """What of ``bucket`` the device of ``rank`` holds."""
        if (bucket, rank) not in self._shards:
            slicing = self.slicing(bucket)
            slices = sums.shards(bucket, slicing, self.num_shards)[rank]
            self._shards[bucket, rank] = sums.Shard(slicing, slices, self.spec.buckets[bucket].shapes)
        return self._shards[bucket, rank]

    def shape(self, bucket: int, rank: int) -> StateShape:
        """What the state of that consists of: its "keys" are the parts of the shard."""
        if self.num_shards == 1:
            return self.whole_shape(bucket)
        if (bucket, rank) not in self._shapes:
            shard = self.shard(bucket, rank)
            parts = tuple(zip(shard.keys, shard.shapes, strict=True))
            params = parameters_of(self.spec, [bucket])
            self._shapes[bucket, rank] = state_shape(self.spec.job.optimizer, params, parts)
        return self._shapes[bucket, rank]

    def whole_shape(self, bucket: int) -> StateShape:
        """What the state of all of ``bucket`` consists of."""
        if bucket not in self._whole:
            self._whole[bucket] = state_shape(self.spec.job.optimizer, parameters_of(self.spec, [bucket]))
        return self._whole[bucket]

    def rounded(self, bucket: int, rank: int, layers: Iterable[int]) -> list[int]:
        """Of the parts of ``rank`` the positions of those that one of ``layers`` computes with in
        bfloat16.
        """
        what = self.spec.buckets[bucket]
        names = {name for layer in set(layers) & set(what.uses) for name in self.spec.rounded(layer)}
        return [part for part, key in enumerate(self.shard(bucket, rank).keys) if what.keys[key] in names]

    def cut(self, bucket: int, rank: int, whole: BucketState) -> BucketState:
        """The shard of ``rank`` of the ``whole`` state of ``bucket``: that itself, where it is all of it."""
        if self.num_shards == 1:
            return whole
        shape = self.shape(bucket, rank)
        state = BucketState(shape, shape.zeros(self.device), whole.exponents)
        views = {slot.name: state.views(slot.name) for slot in shape.slots}
        with torch.no_grad():
            for its, mine in self.pieces(bucket, rank, views, whole):
                mine.copy_(its)
        return state

    def fill(
        self,
        bucket: int,
        rank: int,
        views: Mapping[str, Mapping[int, Tensor]],
        whole: BucketState,
    ) -> None:
        """Put the shard of ``rank``, whose ``views`` are by slot and part, into the ``whole`` state of
        ``bucket``.
        """
        with torch.no_grad():
            for its, mine in self.pieces(bucket, rank, views, whole):
                its.copy_(mine)

    def pieces(
        self,
        bucket: int,
        rank: int,
        views: Mapping[str, Mapping[int, Tensor]],
        whole: BucketState,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same numbers of the ``whole`` state of ``bucket`` and of the shard of ``rank``, whose ``views``
        are by slot and part; detached.
        """
        parts = self.shard(bucket, rank).parts
        for slot in whole.shape.slots:
            of_whole = whole.views(slot.name)
            for part, mine in views.get(slot.name, {}).items():
                key, begin, end = parts[part]
                its = of_whole[key].detach()
                yield its if its.shape == mine.shape else its.view(-1)[begin:end], mine.detach()
