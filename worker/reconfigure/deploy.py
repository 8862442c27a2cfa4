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
from torch import Tensor

from oobleckd.planner.plan import Layers, Range, Transfer, shard_rank
from oobleckd.protocol.messages import Deploy
from oobleckd.words import count
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.models import Layer
from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget
from oobleckd.worker.reconfigure.reshard import Reshard
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.store import Store
from oobleckd.worker.transport.mailbox import Key, TensorMessage

STATE, SENT, WANTED = "T", "P", "Q"
"""Kinds of tensor messages: state; buckets that were pre-copied; those of them that are wanted
all the same.
"""
KINDS = frozenset({STATE, SENT, WANTED})


def expected(store: Store, transfers: tuple[Transfer, ...], target: str) -> dict[int, str]:
    """Bucket -> the device that sends its shard to ``target``. Source and target compute the same."""
    return {bucket: source for (bucket, _), source in _senders(store, transfers, target, 1).items()}


def outgoing(
    store: Store, transfers: tuple[Transfer, ...], source: str, num_shards: int = 1
) -> dict[str, list[int]]:
    """Target -> the buckets that ``source`` sends to it. ``num_shards``: of each bucket that are sent to one
    target.
    """
    targets = sorted({transfer.target for transfer in transfers if transfer.source == source})
    senders = {target: _senders(store, transfers, target, num_shards) for target in targets}
    return {
        target: [bucket for (bucket, _), sender in senders[target].items() if sender == source]
        for target in targets
    }


def _senders(
    store: Store, transfers: tuple[Transfer, ...], target: str, num_shards: int
) -> dict[tuple[int, int], str]:
    """(Bucket, rank) -> who sends ``target`` something of that shard of it, of so many."""
    found: dict[tuple[int, int], str] = {}
    for transfer in transfers:
        if transfer.target == target:
            rank = shard_rank(transfer.source, num_shards)
            for bucket in store.spec.buckets_of(transfer.layer):
                found.setdefault((bucket, rank), transfer.source)
    return found


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
    reshard: Reshard | None = None

    @property
    def rank(self) -> int:
        """Whose shards this device will hold."""
        return self.message.layout.rank(self.message.device)

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
        num_shards = self.message.layout.devices_per_stage
        if self.message.held_per_stage:
            self.reshard = Reshard.of(self.store, self.message.held_per_stage, num_shards, self.rank)
        else:
            self.store.divide(num_shards, self.rank)
        self._send()
        needed = self.store.needed(self.layers) if self.layers else ()
        if self.reshard is not None:
            self.awaited = set(needed)
            for bucket in self.reshard.begin(needed, self.store):
                self._has_all(bucket)
        elif self.message.source == "copy":
            missing = {bucket for bucket in needed if bucket not in self.store.buckets}
            self.coming = expected(self.store, self.message.transfers, self.message.device)
            unsent = missing - self.coming.keys()
            assert not unsent, f"no source for buckets {sorted(unsent)}"
            self.awaited = missing
        elif self.message.source == "init":
            self.incoming = {bucket: self.store.fresh(bucket) for bucket in needed}
        else:
            self.incoming = self.store.loaded(Path(self.message.source), needed)

    def adopt(self) -> None:
        """Bring what was prepared into force: the store holds it, and nothing else."""
        self.store.divide(self.message.layout.devices_per_stage, self.rank)
        self.store.adopt(self.layers, self.incoming)

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
        if self.reshard is not None:
            self._send_parts(self.reshard)
            return
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

    def _send_parts(self, reshard: Reshard) -> None:
        """Send what others lack of the shards that are here for those that they are to have."""
        message, before = self.message, reshard.before.num_shards
        for target, buckets in outgoing(self.store, message.transfers, message.device, before).items():
            rank = message.layout.rank(target)
            for bucket in buckets:
                if reshard.old_rank in reshard.senders(bucket, rank):
                    state = self.store.buckets[bucket]
                    self._send_tensors(target, bucket, reshard.given(bucket, state, rank), state.exponents)

    def _send_state(self, target: str, bucket: int) -> None:
        state = self.store.buckets[bucket]
        self._send_tensors(target, bucket, state.storages(), state.exponents)

    def _send_tensors(
        self, target: str, bucket: int, tensors: list[Tensor], exponents: tuple[int, ...]
    ) -> None:
        meta = msgspec.msgpack.encode(exponents)
        self.messenger.send(target, self._key(bucket, self.store.rank), tensors, meta)
        self.faults.reach("copy", self.message.counters.round)

    def _key(self, bucket: int, rank: int) -> Key:
        """Of the state of ``bucket`` from a device of ``rank``."""
        return (STATE, self.message.epoch, bucket, rank)

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
        for source in sorted({self.coming[bucket] for bucket in self.awaited & self.coming.keys()}):
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
            ranks = (self.rank,) if self.reshard is None else tuple(sorted(self.reshard.missing[bucket]))
            for rank in ranks:
                message = self.messenger.take(self._key(bucket, rank))
                if message is not None:
                    self._take(bucket, rank, message)
                    received = True
                    self.faults.reach("copy", self.message.counters.round)
        return received

    def _take(self, bucket: int, rank: int, message: TensorMessage) -> None:
        """The state of ``bucket`` from a device of ``rank``."""
        exponents = msgspec.msgpack.decode(message.meta, type=tuple[int, ...])
        if self.reshard is not None:
            self.copied_bytes += sum(tensor.nbytes for tensor in message.tensors)
            if self.reshard.take(bucket, rank, message.tensors, exponents):
                self._has_all(bucket)
            return
        self.incoming[bucket] = BucketState.received(self.store.shape(bucket), message.tensors, exponents)
        self.copied_bytes += self.incoming[bucket].num_bytes
        self.awaited.discard(bucket)

    def _has_all(self, bucket: int) -> None:
        """The new shard of ``bucket`` is complete."""
        assert self.reshard is not None
        self.incoming[bucket] = self.reshard.made(bucket)
        self.awaited.discard(bucket)
