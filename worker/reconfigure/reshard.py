"""Makes shards for stages of another number of devices out of those that there are.

Owns what of a shard the holder of another one is sent, and what a device still waits for. Nobody has more
than his shard of before and the one that he is to have. Does not own who sends which (``deploy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.shards import Shards
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums import KeyRange


class Overlap(NamedTuple):
    """Numbers ``begin`` to ``end`` of a key, that are in part ``before`` of one shard and ``after`` of
    another.
    """

    before: int
    after: int
    begin: int
    end: int


@dataclass(slots=True)
class Reshard:
    """Of what ``before`` says into what ``after`` does. This device had the shards of ``old_rank``, and is to
    have those of ``rank``.

    ``missing``: bucket -> old ranks of whose shards something is still to come.
    """

    before: Shards
    after: Shards
    old_rank: int
    rank: int
    missing: dict[int, set[int]] = field(default_factory=dict)
    _made: dict[int, BucketState] = field(default_factory=dict)
    _overlaps: dict[tuple[int, int, int], tuple[Overlap, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, num_before: int, num_shards: int, rank: int) -> Reshard:
        """For stages of ``num_shards`` devices, where they had ``num_before``."""
        is_known = store.shards.num_shards == num_before  # else a device that has nothing yet
        before = store.shards if is_known else store.cut_for(num_before)
        return cls(before, store.cut_for(num_shards), store.rank, rank)

    def senders(self, bucket: int, rank: int) -> tuple[int, ...]:
        """The old ranks that have something of ``bucket`` for the device that is to be of ``rank``; one of
        them, which tells the exponents, where there is nothing to have.
        """
        return tuple(old for old in range(self.before.num_shards) if self._shared(bucket, old, rank)) or (0,)

    def begin(self, buckets: Iterable[int], store: Store) -> list[int]:
        """Wait for all that is needed of ``buckets`` but for what is in ``store``; which of these are
        complete.
        """
        self.missing = {bucket: set(self.senders(bucket, self.rank)) for bucket in buckets}
        mine = [bucket for bucket in sorted(store.buckets) if self.old_rank in self.missing.get(bucket, ())]
        return [
            bucket
            for bucket in mine
            if self.take(
                bucket,
                self.old_rank,
                self.given(bucket, store.buckets[bucket], self.rank),
                store.buckets[bucket].exponents,
            )
        ]

    def given(self, bucket: int, state: BucketState, rank: int) -> list[Tensor]:
        """What the device that is to be of ``rank`` lacks of ``bucket`` and has here, in ``state``: for each
        slot a flat copy.
        """
        # Both ends know both layouts, so nobody is sent what he would only cut away. (D-recovery-031)
        shared = self._shared(bucket, self.old_rank, rank)
        parts = self.before.shard(bucket, self.old_rank).parts
        found = []
        for slot in self.before.whole_shape(bucket).slots:  # a shard may have none of some
            views = state.views(slot.name)
            pieces = [
                _numbers(views[each.before], parts[each.before], each)
                for each in shared
                if each.before in views
            ]
            nothing = torch.empty(0, dtype=slot.dtype, device=self.before.device)
            found.append(torch.cat(pieces) if pieces else nothing)
        return found

    def take(self, bucket: int, old_rank: int, tensors: Sequence[Tensor], exponents: Sequence[int]) -> bool:
        """What ``given`` returned where the shard of ``old_rank`` was; whether it was the last that was
        missing of ``bucket``.
        """
        if bucket not in self._made:
            shape = self.after.shape(bucket, self.rank)
            self._made[bucket] = BucketState(shape, shape.zeros(self.after.device), tuple(exponents))
        state, parts = self._made[bucket], self.after.shard(bucket, self.rank).parts
        with torch.no_grad():
            for slot, sent in zip(self.before.whole_shape(bucket).slots, tensors, strict=True):
                views, begin = state.views(slot.name), 0
                for each in self._shared(bucket, old_rank, self.rank):
                    if each.after in views:
                        mine = _numbers(views[each.after], parts[each.after], each)
                        mine.copy_(sent[begin : begin + len(mine)])
                        begin += len(mine)
                assert begin == len(sent), f"bucket {bucket}: {len(sent)} numbers sent, {begin} wanted"
        self.missing[bucket].discard(old_rank)
        return not self.missing[bucket]

    def made(self, bucket: int) -> BucketState:
        """The new shard for this device of a ``bucket`` of which all has come."""
        return self._made.pop(bucket)

    def _shared(self, bucket: int, old_rank: int, rank: int) -> tuple[Overlap, ...]:
        key = (bucket, old_rank, rank)
        if key not in self._overlaps:
            before, after = self.before.shard(bucket, old_rank).parts, self.after.shard(bucket, rank).parts
            self._overlaps[key] = tuple(_overlaps(before, after))
        return self._overlaps[key]


def _overlaps(before: Sequence[KeyRange], after: Sequence[KeyRange]) -> Iterator[Overlap]:
    """What two shards share, in key order, as both are."""
    one = other = 0
    while one < len(before) and other < len(after):
        mine, its = before[one], after[other]
        if mine.key == its.key:
            begin, end = max(mine.begin, its.begin), min(mine.end, its.end)
            if begin < end:
                yield Overlap(one, other, begin, end)
        if (mine.key, mine.end) <= (its.key, its.end):
            one += 1
        else:
            other += 1


def _numbers(view: Tensor, part: KeyRange, shared: Overlap) -> Tensor:
    """Of ``view``, a slot of ``part``, what is shared, flat. All of it, where that is the whole part: of a
    slot that has other numbers than its key (a factored one), whose key is not cut.
    """
    flat = view.detach().view(-1)
    if (shared.begin, shared.end) == (part.begin, part.end):
        return flat
    return flat[shared.begin - part.begin : shared.end - part.begin]
