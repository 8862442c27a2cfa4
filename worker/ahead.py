"""What a source sends ahead of a plan that is to come: the state of some buckets, and then what every update of it was made from.

Owns when and what is sent: the state of the boundary before the round under way, at once, and at each commit after it the mean gradients (as they
went into the optimizer, so after clipping), counters and exponents. With them the target makes the very same update (``staging``). Of a round nothing is
sent before its commit, so an update that is taken back is not among it: who has made one early sends the state at the commit. A letter that is lost
costs a copy in the stop and nothing else, so nothing is acknowledged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleckd.protocol.parts import Counters
from worker.post import Post
from worker.reduce import Reduced
from worker.snapshot import copies
from worker.store import Store

STATE, UPDATE = "S", "U"
"""Kinds of letters, with the keys (kind, number, bucket) and (kind, number, source, round)."""
KINDS = frozenset({STATE, UPDATE})


class Staged(msgspec.Struct, frozen=True):
    """What travels with the tensors of a bucket: the state is that of the boundary ``counters``."""

    counters: Counters
    exponents: tuple[int, ...]


class Update(msgspec.Struct, frozen=True):
    """What travels with the gradients of a round, which lie in the order of ``exponents``: bucket -> its exponents ``after`` it.

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
class Ahead:
    """One preparation at one source. ``buckets``: target -> those that it gets from here; ``rounds`` are left in which something is sent.

    ``broken``: peers a link to whom has broken since, which may lack something.
    """

    number: int
    device: str
    post: Post
    buckets: Mapping[str, Sequence[int]]
    rounds: int
    broken: set[str] = field(default_factory=set)
    began: bool = False

    def begin(self, counters: Counters, store: Store) -> None:
        """Send the state, once: ``store`` has that of the boundary ``counters``."""
        if not self.began and self.rounds > 0:
            self.began = True
            self._send_states(counters, store)

    def committed(
        self, before: Counters, after: Counters, store: Store, reduced: Mapping[int, Reduced]
    ) -> None:
        """The round between the two boundaries is committed, and ``store`` has the state after it."""
        if self.rounds <= 0:
            return
        if not self.began:
            self.begin(after, store)
            return
        self.rounds -= 1
        for target in self._whole():
            buckets = self.buckets[target]
            update = Update(before, after, {bucket: store.buckets[bucket].exponents for bucket in buckets})
            grads = [grad for bucket in buckets for grad in reduced[bucket].grads] if update.applied else []
            key = (UPDATE, self.number, self.device, before.round)
            if self.post.send(target, key, grads, msgspec.msgpack.encode(update)) is False:
                self.broken.add(target)

    def sent_to(self, target: str) -> frozenset[int]:
        """Buckets that ``target`` has, as far as is known here."""
        whole = self.began and self.rounds > 0 and target in self._whole()
        return frozenset(self.buckets[target]) if whole else frozenset()

    def _whole(self) -> list[str]:
        return [target for target in self.buckets if target not in self.broken]

    def _send_states(self, counters: Counters, store: Store) -> None:
        wanted = sorted({bucket for target in self._whole() for bucket in self.buckets[target]})
        states, under_way = copies({bucket: store.buckets[bucket] for bucket in wanted}, store.device)
        if under_way is not None:
            under_way.synchronize()
        for target in self._whole():
            for bucket in self.buckets[target]:
                state = states[bucket]
                meta = msgspec.msgpack.encode(Staged(counters, state.exponents))
                if self.post.send(target, (STATE, self.number, bucket), state.tensors(), meta) is False:
                    self.broken.add(target)
                    break
