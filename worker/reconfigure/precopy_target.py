"""Receives state ahead of a plan, beside the store, and keeps it current by making its sources' updates in
the order of their rounds.

Nothing counts on it. It is no part of a layout, of what a device holds or of the commit: a ``Deploy`` takes
out of it what is exactly the state of its boundary, and copies the rest (``deploy``). The optimizer is a pure
function of state, gradients, step and number of updates, so what is here is bit for bit what the sources
have. Owns the replay, a bucket at a time, so that whoever calls can train in between. What has arrived and is
not replayed yet stays in the mailbox. Beside an accelerator, which has no room for any of this while it
trains, all of it stays in the host's memory, and is replayed once all have stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters
from oobleckd.worker.checkpointing.snapshot import pinned
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.reconfigure.precopy_source import KINDS, STATE, UPDATE, PreCopiedState, Update
from oobleckd.worker.round.update import update_bucket
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.store import Store
from oobleckd.worker.transport.mailbox import Key


@dataclass(slots=True)
class _Stream:
    """From one ``source``. ``wanted``: buckets whose state is here, or may still come. ``counters``: the
    boundary whose state is here, but for what is ``left`` of ``update``: buckets and their gradients.
    """

    source: str
    wanted: frozenset[int]
    states: dict[int, BucketState] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    update: Update | None = None
    left: list[tuple[int, list[Tensor]]] = field(default_factory=list)

    @property
    def missing(self) -> frozenset[int]:
        """Buckets whose state is not here."""
        return self.wanted - self.states.keys()


class PreCopyTarget:
    """Preparation ``number`` at one target. ``sources``: bucket -> who sends it; ``store`` knows the model
    and where tensors are to be.
    """

    def __init__(
        self, number: int, job: Job, store: Store, messenger: Messenger, sources: Mapping[int, str]
    ) -> None:
        self.number = number
        self.told = False
        self._job, self._store, self._messenger = job, store, messenger
        self._beside = store.device.type != "cpu"
        self._streams = [
            _Stream(source, frozenset(bucket for bucket, sender in sources.items() if sender == source))
            for source in sorted(set(sources.values()))
        ]

    def advance(self, *, stopped: bool = False) -> bool:
        """Take in the state of a bucket, or make one update of one; False if nothing is to be done until more
        arrives, or until all have ``stopped``.
        """
        # A device beside a GPU is full by design, so what was pre-copied waits in the host's memory and is
        # replayed in the stop. (D-precopy-012)
        replays = stopped or not self._beside
        return any(self._receive(stream) or (replays and self._replay(stream)) for stream in self._streams)

    @property
    def caught_up(self) -> bool:
        """Whether all that was sent is here, as far as this device knows, and as much of it is replayed as
        can be.
        """
        return all(
            not stream.missing and (self._beside or not self._has_update(stream)) for stream in self._streams
        )

    @property
    def round(self) -> int:
        """The first round that is not in all of the state."""
        return min((stream.counters.round for stream in self._streams), default=0)

    def state_at(self, bucket: int, counters: Counters) -> BucketState | None:
        """The bucket's state at the boundary ``counters``, if that is what is here."""
        for stream in self._streams:
            # Counters name one state of one history, so equality is all that has to be known: a message
            # that was lost or late shows as another round, and costs a copy. (D-precopy-002)
            if bucket in stream.states and stream.update is None and stream.counters == counters:
                return stream.states[bucket].on(self._store.device)
        return None

    def _has_update(self, stream: _Stream) -> bool:
        return stream.update is not None or self._messenger.has(self._next(stream, stream.counters))

    def _next(self, stream: _Stream, counters: Counters) -> Key:
        return (UPDATE, self.number, stream.source, counters.round)

    def _receive(self, stream: _Stream) -> bool:
        for bucket in sorted(stream.missing):
            message = self._messenger.take((STATE, self.number, bucket))
            if message is not None:
                what = msgspec.msgpack.decode(message.meta, type=PreCopiedState)
                tensors = [pinned(tensor) for tensor in message.tensors] if self._beside else message.tensors
                stream.states[bucket] = BucketState.received(
                    self._store.shape(bucket), tensors, what.exponents
                )
                stream.counters = what.counters
                return True
        return False

    def _replay(self, stream: _Stream) -> bool:
        if stream.update is None and not self._begin(stream):
            return False
        update = stream.update
        assert update is not None
        if stream.left:
            bucket, grads = stream.left[0]
            if bucket not in stream.states:
                return False  # it is on its way: an update speaks of no other
            stream.left.pop(0)
            self._update(stream, bucket, grads, update)
        if not stream.left:
            stream.update, stream.counters = None, update.after
        return True

    def _update(self, stream: _Stream, bucket: int, grads: list[Tensor], update: Update) -> None:
        """One bucket's, by the same kernels with which its source made it."""
        here = self._store.device
        state = stream.states[bucket].on(here)
        if update.applied:
            update_bucket(self._job, state, [grad.to(here) for grad in grads], update.before)
        state.exponents = update.exponents[bucket]
        stream.states[bucket] = state

    def _begin(self, stream: _Stream) -> bool:
        """The next round, if what it was made from is here."""
        if not stream.states:
            return False
        message = self._messenger.take(self._next(stream, stream.counters))
        if message is None:
            return False
        update = msgspec.msgpack.decode(message.meta, type=Update)
        assert update.before == stream.counters, f"{update.before} after {stream.counters}"
        stream.update, tensors = update, list(message.tensors)
        for bucket in update.exponents:
            count = len(self._store.shard(bucket).parts) if update.applied else 0
            grads, tensors = tensors[:count], tensors[count:]
            if (
                bucket in stream.wanted
            ):  # the target may hold a tied weight that its source sends with a layer
                stream.left.append((bucket, grads))
        return True


def is_of(key: Key, number: int) -> bool:
    """Whether a message with that key belongs to pre-copy ``number`` or to one before it."""
    return key[0] in KINDS and int(key[1]) <= number
