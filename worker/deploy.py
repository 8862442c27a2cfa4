"""A layout on its way in: which state is still missing, who sends it, and what to send to others.

Owns the copying between ``Deploy`` and ``Ready``; the present layout stays untouched until ``Resume``,
so a failure in between costs nothing but the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from oobleckd.protocol.messages import Deploy
from planner.plan import Layers, Transfer
from worker.faults import Faults
from worker.post import Post
from worker.store import BucketState, Store


def expected(store: Store, transfers: tuple[Transfer, ...], target: str) -> dict[int, str]:
    """Bucket -> the device that sends it to ``target``. Source and target compute the same."""
    sources: dict[int, str] = {}
    for transfer in transfers:
        if transfer.target == target:
            for bucket in store.spec.buckets_of(transfer.layer):
                sources.setdefault(bucket, transfer.source)
    return sources


@dataclass(slots=True)
class Deployment:
    """One ``Deploy`` being carried out on this device."""

    message: Deploy
    store: Store
    post: Post
    faults: Faults
    incoming: dict[int, BucketState] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    copied_bytes: int = 0

    @property
    def layers(self) -> Layers | None:
        """What this device will hold; None if it leaves the job."""
        return self.message.layout.holdings.get(self.message.device)

    def start(self) -> None:
        """Send what others need, then load, initialise or await what is missing. Raises UserError."""
        self._send()
        needed = self.store.needed(self.layers) if self.layers else ()
        if self.message.source == "copy":
            missing = {bucket for bucket in needed if bucket not in self.store.buckets}
            coming = expected(self.store, self.message.transfers, self.message.device)
            assert missing <= coming.keys(), f"no source for buckets {sorted(missing - coming.keys())}"
            self.awaited = missing
        elif self.message.source == "init":
            self.incoming = {bucket: self.store.fresh(bucket) for bucket in needed}
        else:
            self.incoming = self.store.loaded(Path(self.message.source), needed)

    def advance(self) -> bool:
        """Take in buckets that have arrived; whether all are here."""
        for bucket in sorted(self.awaited):
            letter = self.post.take(("T", self.message.epoch, bucket))
            if letter is None:
                continue
            exponents = msgspec.msgpack.decode(letter.meta, type=tuple[int, ...])
            self.incoming[bucket] = BucketState.received(letter.tensors, exponents)
            self.copied_bytes += sum(tensor.nbytes for tensor in letter.tensors)
            self.awaited.discard(bucket)
            self.faults.reach("copy", self.message.counters.round)
        return not self.awaited

    def _send(self) -> None:
        device = self.message.device
        for target in sorted({t.target for t in self.message.transfers if t.source == device}):
            for bucket, source in expected(self.store, self.message.transfers, target).items():
                if source != device:
                    continue
                state = self.store.buckets[bucket]
                meta = msgspec.msgpack.encode(state.exponents)
                self.post.send(target, ("T", self.message.epoch, bucket), state.tensors(), meta)
                self.faults.reach("copy", self.message.counters.round)
