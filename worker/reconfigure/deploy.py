"""Brings a new layout in: finds which state is missing here and who sends it, and sends what others miss.

Owns the copying between ``Deploy`` and ``Ready``; the present layout stays untouched until ``Resume``, so a
failure in between costs nothing but the copy. What was pre-copied (``precopy_target``) is taken where it is
the state of this boundary, and asked for where it is not: a source that has sent ahead says so in a message
in place of the state, and the target answers with the buckets that it wants all the same. These messages
share the link with the state: they are lost only if the link is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from oobleckd.planner.plan import Layers, Range, Transfer
from oobleckd.protocol.messages import Deploy
from oobleckd.words import count
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.models import Layer
from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.store import Store

STATE, SENT, WANTED = "T", "P", "Q"
"""Kinds of tensor messages: state; buckets that were pre-copied; those of them that are wanted
all the same.
"""
KINDS = frozenset({STATE, SENT, WANTED})


def expected(store: Store, transfers: tuple[Transfer, ...], target: str) -> dict[int, str]:
    """Bucket -> the device that sends it to ``target``. Source and target compute the same."""
    sources: dict[int, str] = {}
    for transfer in transfers:
        if transfer.target == target:
            for bucket in store.spec.buckets_of(transfer.layer):
                sources.setdefault(bucket, transfer.source)
    return sources


def outgoing(store: Store, transfers: tuple[Transfer, ...], source: str) -> dict[str, list[int]]:
    """Target -> the buckets that ``source`` sends to it."""
    targets = sorted({transfer.target for transfer in transfers if transfer.source == source})
    return {
        target: [bucket for bucket, sender in expected(store, transfers, target).items() if sender == source]
        for target in targets
    }


@dataclass(slots=True)
class Deployment:
    """One ``Deploy`` being carried out on this device. ``precopy_source`` and ``precopy_target``: what it
    sent and got by pre-copy for this plan.

    ``awaited``: buckets still to come, each from its source in ``coming``. ``promised``: target -> buckets
    that it may ask for.
    """

    message: Deploy
    store: Store
    messenger: Messenger
    faults: Faults
    precopy_source: PreCopySource | None = None
    precopy_target: PreCopyTarget | None = None
    incoming: dict[int, BucketState] = field(default_factory=dict)
    coming: dict[int, str] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    promised: dict[str, frozenset[int]] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    copied_bytes: int = 0
    staged_bytes: int = 0

    @property
    def layers(self) -> Layers | None:
        """What this device will hold; None if it leaves the job."""
        return self.message.layout.holdings.get(self.message.device)

    def bound(self, layer: int) -> Layer:
        """One of ``layers`` as it will be, once all that it needs is here. Nothing of the store changes."""
        needed = self.store.spec.buckets_of(layer)
        here = self.store.buckets | self.incoming
        state = {bucket: here[bucket] for bucket in needed}
        alone = Store(self.store.spec, self.store.device)
        alone.adopt(Layers.of(Range(layer, layer + 1)), state)
        return alone.layers[layer]

    @property
    def at_work(self) -> bool:
        """Whether tensor messages may come that it has to take in."""
        return bool(self.awaited or self.promised)

    def start(self) -> None:
        """Send what others need, then load, initialise or await what is missing. Raises UserError."""
        self._check_model()
        layout, device = self.message.layout, self.message.device
        self.store.divide(layout.devices_per_stage, layout.rank(device))
        self._send()
        needed = self.store.needed(self.layers) if self.layers else ()
        if self.message.source == "copy":
            missing = {bucket for bucket in needed if bucket not in self.store.buckets}
            self.coming = expected(self.store, self.message.transfers, self.message.device)
            unsent = missing - self.coming.keys()
            assert not unsent, f"no source for buckets {sorted(unsent)}"
            self.awaited = missing
        elif self.message.source == "init":
            self.incoming = {bucket: self.store.fresh(bucket) for bucket in needed}
        else:
            self.incoming = self.store.loaded(Path(self.message.source), needed)

    def _check_model(self) -> None:
        """Whether the model is here what it was where it was measured: it is looked up in a folder anew."""
        here, planned = self.store.spec.num_layers, self.message.layout.num_layers
        if here != planned:
            raise UserError(
                f"model.checkpoint: {self.message.spec.model.checkpoint}: the model has "
                f"{count(here, 'layer')} here, and had {planned} where it was measured",
                "put the same folder on every node, leave it as it is, and submit again",
            )

    def advance(self) -> bool:
        """Take in what has arrived; whether anything had."""
        if self.awaited and self.precopy_target is not None and self.precopy_target.advance(stopped=True):
            return True
        answered = self._answer()
        told = self._hear_what_was_sent()
        return self._receive() or answered or told

    def _send(self) -> None:
        message = self.message
        for target, buckets in outgoing(self.store, message.transfers, message.device).items():
            sent = (
                self.precopy_source.sent_to(target) & set(buckets)
                if self.precopy_source is not None
                else frozenset()
            )
            for bucket in buckets:
                if bucket not in sent:
                    self._send_state(target, bucket)
            if sent:
                # A source cannot know what arrived, and a target would wait for ever for what was lost. So
                # the source promises and the target asks, over the new links, whose loss is seen as ever.
                # (D-precopy-003)
                self.promised[target] = sent
                self._say(target, SENT, sent)

    def _send_state(self, target: str, bucket: int) -> None:
        state = self.store.buckets[bucket]
        meta = msgspec.msgpack.encode(state.exponents)
        self.messenger.send(target, (STATE, self.message.epoch, bucket), state.storages(), meta)
        self.faults.reach("copy", self.message.counters.round)

    def _say(self, peer: str, kind: str, buckets: frozenset[int]) -> None:
        meta = msgspec.msgpack.encode(sorted(buckets))
        self.messenger.send(peer, (kind, self.message.epoch, self.message.device), [], meta)

    def _heard(self, kind: str, peer: str) -> list[int] | None:
        message = self.messenger.take((kind, self.message.epoch, peer))
        return None if message is None else msgspec.msgpack.decode(message.meta, type=list[int])

    def _answer(self) -> bool:
        """Send what targets want after all."""
        answered = False
        for target in sorted(self.promised):
            wanted = self._heard(WANTED, target)
            if wanted is not None:
                del self.promised[target]
                for bucket in wanted:
                    self._send_state(target, bucket)
                answered = True
        return answered

    def _hear_what_was_sent(self) -> bool:
        """Take what was pre-copied, as a source says that no more of it comes, and ask for the rest."""
        heard = False
        for source in sorted({self.coming[bucket] for bucket in self.awaited}):
            sent = self._heard(SENT, source)
            if sent is None:
                continue
            heard = True
            while self.precopy_target is not None and self.precopy_target.advance(stopped=True):
                pass  # what came on the way of the word before it
            wanted = self.awaited & set(sent)
            wanted -= {bucket for bucket in sorted(wanted) if self._take_precopied(bucket)}
            if wanted:
                self._say(source, WANTED, frozenset(wanted))
        return heard

    def _take_precopied(self, bucket: int) -> bool:
        """Whether the bucket is here already, as it is at this boundary."""
        state = (
            self.precopy_target.state_at(bucket, self.message.counters)
            if self.precopy_target is not None
            else None
        )
        if state is None:
            return False
        self.incoming[bucket] = state
        self.staged.add(bucket)
        self.staged_bytes += state.num_bytes
        self.awaited.discard(bucket)
        return True

    def _receive(self) -> bool:
        """Take in state that was sent."""
        received = False
        for bucket in sorted(self.awaited):
            message = self.messenger.take((STATE, self.message.epoch, bucket))
            if message is None:
                continue
            exponents = msgspec.msgpack.decode(message.meta, type=tuple[int, ...])
            self.incoming[bucket] = BucketState.received(self.store.shape(bucket), message.tensors, exponents)
            self.copied_bytes += self.incoming[bucket].num_bytes
            self.awaited.discard(bucket)
            received = True
            self.faults.reach("copy", self.message.counters.round)
        return received
