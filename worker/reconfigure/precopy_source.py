"""Sends state ahead of a plan that is to come: some buckets, and then what every update of them was made
from.

Owns when and what is sent: the state of the boundary before the round under way, at once, and at each commit
after it the mean gradients (as they went into the optimizer, so after clipping), counters and exponents. With
them the target makes the very same update (``precopy_target``). Of a round nothing is sent before its commit,
so an update that is taken back is not among it: who has made one early sends the state at the commit. A
tensor message that is lost costs a copy in the stop and nothing else, so nothing is acknowledged here. What
has not left when all hold is taken back, as its update would be sent besides: it is copied as it is then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from oobleckd.protocol.parts import Counters
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.round.reduce import Reduced
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.host_copy import Hosted
from oobleckd.worker.state.store import Store

STATE, UPDATE = "S", "U"
"""Kinds of tensor messages, with the keys (kind, number, bucket) and (kind, number, source, round)."""
KINDS = frozenset({STATE, UPDATE})


class PreCopiedState(msgspec.Struct, frozen=True):
    """What travels with the tensors of a bucket: the state is that of the boundary ``counters``."""

    counters: Counters
    exponents: tuple[int, ...]


class Update(msgspec.Struct, frozen=True):
    """What travels with the gradients of a round, which lie in the order of ``exponents``: bucket -> its
    exponents ``after`` it.

    A round that was not applied has no gradients.
    """

    before: Counters
    after: Counters
    exponents: dict[int, tuple[int, ...]]

    @property
    def applied(self) -> bool:
        """Whether weights changed."""
        return self.after.applied > self.before.applied


@dataclass(slots=True)
class PreCopySource:
    """One pre-copy at one source. ``buckets``: target -> those that it gets from here; ``rounds`` are left in
    which something is sent.

    ``broken``: peers a link to whom has broken since, which may lack something. ``updated``: the state was,
    since it was sent. ``copied``: the state as it is sent; beside a GPU it leaves when its copy is there,
    from the thread that made it (``lock``), and no update leaves before.
    """

    number: int
    device: str
    messenger: Messenger
    buckets: dict[str, list[int]]
    rounds: int
    broken: set[str] = field(default_factory=set)
    updated: bool = False
    copied: Hosted | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def began(self) -> bool:
        """Whether there is a state that is sent."""
        return self.copied is not None

    def begin(self, counters: Counters, store: Store) -> None:
        """Send the state, once: ``store`` has that of the boundary ``counters``."""
        if not self.began and self.rounds > 0:
            self._copy(counters, store)

    def committed(
        self, before: Counters, after: Counters, store: Store, reduced: Mapping[int, Reduced], *, hold: bool
    ) -> None:
        """The round between the two boundaries is committed, and ``store`` has the state after it. ``hold``:
        so that all may stop.
        """
        if self.rounds <= 0:
            return
        if self.copied is None:
            if not hold:
                self.begin(after, store)
            return
        # The snapshot is of one boundary, whole, so that a stream has one counter: no update may leave
        # before it. (D-precopy-005)
        self.copied.states()
        self.rounds -= 1
        # A bucket that leaves after its update would be sent twice. One that has begun to leave is not
        # interrupted: a layer's state is the longest that training waits for. (D-precopy-014)
        if hold and not self.updated:
            self._recall()
        self.updated = True
        for target in self._whole():
            buckets = self.buckets[target]
            if not buckets:
                continue
            # Gradients and not the state again: they are a third of it, and a second copy would be as old
            # as the first when it arrives. (D-precopy-001)
            update = Update(before, after, {bucket: store.buckets[bucket].exponents for bucket in buckets})
            grads = [grad for bucket in buckets for grad in reduced[bucket].grads] if update.applied else []
            key = (UPDATE, self.number, self.device, before.round)
            if self.messenger.send(target, key, grads, msgspec.msgpack.encode(update)) is False:
                self.broken.add(target)

    def stop(self) -> None:
        """Nothing more of it is wanted: what has not left is taken back."""
        with self.lock:
            self.rounds = 0
        for target in self.buckets:
            self.messenger.recall(target, lambda key: key[0] in KINDS and key[1] == self.number)

    def sent_to(self, target: str) -> frozenset[int]:
        """Buckets that ``target`` has, as far as is known here."""
        left = self.copied is not None and self.copied.arrived
        whole = left and self.rounds > 0 and target in self._whole()
        return frozenset(self.buckets[target]) if whole else frozenset()

    def _recall(self) -> None:
        """What is still to leave follows as it is now. Of a bucket whose updates are on their way already it
        would be missed.
        """
        for target in self._whole():
            taken = self.messenger.recall(target, lambda key: key[:2] == (STATE, self.number))
            late = {int(key[2]) for key in taken}
            self.buckets[target] = [bucket for bucket in self.buckets[target] if bucket not in late]

    def _whole(self) -> list[str]:
        return [target for target in self.buckets if target not in self.broken]

    def _copy(self, counters: Counters, store: Store) -> None:
        wanted = {bucket for target in self._whole() for bucket in self.buckets[target]}
        self.copied = Hosted(store, wanted, lambda states: self._send_states(counters, states))

    def _send_states(self, counters: Counters, states: Mapping[int, BucketState]) -> None:
        with self.lock:
            for target in self._whole() if self.rounds > 0 else ():
                for bucket in self.buckets[target]:
                    state = states[bucket]
                    meta = msgspec.msgpack.encode(PreCopiedState(counters, state.exponents))
                    if (
                        self.messenger.send(target, (STATE, self.number, bucket), state.storages(), meta)
                        is False
                    ):
                        self.broken.add(target)
                        break
