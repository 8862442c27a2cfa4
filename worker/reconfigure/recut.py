"""Makes shards for stages of another number of devices out of those that there are.

Owns which of them a device still waits for, and how they are put together: bucket by bucket, whole for a
moment in the memory of whoever wants a part of it. Does not own who sends which (``deploy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.shards import Shards
from oobleckd.worker.state.store import Store


@dataclass(slots=True)
class Recut:
    """Of what ``before`` says into what ``after`` does, of which this device is to have the shards of
    ``rank``.

    ``missing``: bucket -> ranks of shards that are still to come.
    """

    before: Shards
    after: Shards
    rank: int
    missing: dict[int, set[int]] = field(default_factory=dict)
    _whole: dict[int, BucketState] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, num_before: int, num_shards: int, rank: int) -> Recut:
        """For stages of ``num_shards`` devices, where they had ``num_before``."""
        before = store.shards
        if before.num_shards != num_before:  # a device that has nothing yet
            before = Shards(store.spec, store.device, num_before)
        return cls(before, Shards(store.spec, store.device, num_shards), rank)

    def begin(self, buckets: Iterable[int], store: Store) -> list[int]:
        """Wait for all shards of ``buckets`` but for those in ``store``; which of these buckets are
        complete.
        """
        self.missing = {bucket: set(range(self.before.num_shards)) for bucket in buckets}
        mine = sorted(self.missing.keys() & store.buckets.keys())
        return [
            bucket
            for bucket in mine
            if self.take(
                bucket, store.rank, store.buckets[bucket].storages(), store.buckets[bucket].exponents
            )
        ]

    def take(self, bucket: int, rank: int, storages: Sequence[Tensor], exponents: Sequence[int]) -> bool:
        """The shard of ``rank`` of ``bucket``, a storage for each slot; whether it was the last of them."""
        shape, device = self.before.whole_shape(bucket), self.before.device
        if bucket not in self._whole:
            self._whole[bucket] = BucketState(shape, shape.zeros(device), tuple(exponents))
        of_shard = self.before.shape(bucket, rank)
        views = {slot.name: slot.cut(flat) for slot, flat in zip(of_shard.slots, storages, strict=True)}
        self.before.fill(bucket, rank, views, self._whole[bucket])
        self.missing[bucket].discard(rank)
        return not self.missing[bucket]

    def made(self, bucket: int) -> BucketState:
        """The new shard for this device of a ``bucket`` of which all has come."""
        return self.after.cut(bucket, self.rank, self._whole.pop(bucket))
