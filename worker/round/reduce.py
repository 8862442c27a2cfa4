"""Gradient sums of a round: own sums per (bucket, use), contributions of the other holders, totals.

A holder that has computed nothing of a bucket, as a redundant holder, says so without tensors, and gets the
sums of the others. Owns the exactly-once check: for every use of a bucket the ledgers of all contributors
must partition the step's micro-batches, asserted at every step. Totals are kept out of place; own sums stay
as they are until the commit, so that after a failure they can be contributed again under the next epoch.

Every holder sends its sums to every other holder of the bucket and adds up, integers as they come and floats
in device order: one hop, nothing to rebuild when a holder dies. That costs (holders - 1) times the bucket per
device, as little as any exchange for the two copies of f = 1 (docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from oobleckd.planner.plan import Layout
from oobleckd.protocol.parts import Vote
from oobleckd.worker import sums
from oobleckd.worker.round.gather import Contribution, Gathered, Gathering, key_of
from oobleckd.worker.round.messenger import Messenger
from oobleckd.worker.round.tasks import Board
from oobleckd.worker.runtime.yielding_lock import Released
from oobleckd.worker.state.store import Store


class SumCopy(msgspec.Struct, frozen=True):
    """What travels with a copy of sums: layer -> micro-batches in those of its buckets; buckets with a NaN or
    an overflow; losses.
    """

    done: dict[int, tuple[int, ...]]
    nan: tuple[int, ...]
    overflow: tuple[int, ...]
    losses: dict[int, float]


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sum of a bucket over all replicas, and what follows from it, by key.

    ``total``: in wire form, float64 integers (exact) or float32. ``grads``: mean gradients, float32, of the
    parameters' shapes; empty where ``what`` has a NaN or an overflow. ``norms``: squared, float64.
    ``exponents``: for the next step.
    """

    what: Contribution
    total: list[Tensor]
    grads: list[Tensor]
    norms: tuple[float, ...]
    exponents: tuple[int, ...]


@dataclass(slots=True)
class Reducer:
    """The reduce side of one device's round. ``released``: entered where sums are added to or copied, so that
    a report is answered meanwhile.
    """

    device: str
    store: Store
    messenger: Messenger
    num_micro_batches: int
    exact: bool
    guarded: bool = False
    released: Released = nullcontext
    parts: dict[tuple[int, int], sums.Sum] = field(default_factory=dict)
    nan: set[int] = field(default_factory=set)  # inherited; of its own, the parts know
    overflow: set[int] = field(default_factory=set)
    losses: dict[int, float | Tensor] = field(default_factory=dict)  # those of a GPU are asked for at the end
    inherited: list[tuple[sums.Sum, Sequence[Tensor]]] = field(default_factory=list)
    reduced: dict[int, Reduced] = field(default_factory=dict)
    contributed: set[int] = field(default_factory=set)
    heard: dict[int, Gathered] = field(default_factory=dict)
    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    donors: dict[int, str] = field(default_factory=dict)
    board: Board = field(default_factory=lambda: Board(""))
    epoch: int = 0
    round: int = 0
    among: tuple[int, frozenset[str]] = (-1, frozenset())  # the layout and the live that ``holders`` are of
    looked_at: int = -1  # ``board.changes`` when what is complete was last looked for

    def adopt(self) -> None:
        """The layers held have changed: keep a sum for each (bucket, use) of them, 8 bytes a parameter (4
        where not exact), and free the others.
        """
        wanted = {(bucket, use) for bucket in self.store.buckets for use in self.store.uses(bucket)}
        self.parts = {key: self.parts.get(key) or self._sum(key[0]) for key in sorted(wanted)}
        self.looked_at, self.among = -1, (-1, frozenset())

    def begin(self, round_: int, board: Board) -> None:
        """A new round, with the ledger of ``board``: sums, losses and totals of the last one are gone."""
        self.round, self.board, self.looked_at = round_, board, -1
        for part in self.parts.values():
            part.zero_()
        self.nan, self.overflow, self.losses, self.reduced = set(), set(), {}, {}
        self.inherited = []

    def enter(self, epoch: int, layout: Layout, live: frozenset[str], donors: Mapping[int, str]) -> None:
        """Exchange under ``epoch`` among ``live`` devices; buckets of ``donors`` are taken from there.

        Once for an epoch and a round: whatever peers send of it is added to from now on.
        """
        self.epoch, self.donors = epoch, dict(donors)
        for part, tensors in self.inherited:
            part.merge(tensors)
        self.inherited = []
        self.contributed, self.looked_at = set(), -1
        # Every holder sends to every other one: one hop, to be stopped at any moment, and nothing to
        # rebuild when a holder dies. As cheap as a ring for two or three copies. (D-exactness-004)
        if self.among != (layout.epoch, live):  # most rounds are among the same ones as the last
            self.among = layout.epoch, live
            self.holders = {bucket: self._holders(bucket, layout, live) for bucket in self.store.buckets}
        # An exchange is entered once for a generation and a round: what readers have added to it cannot be
        # taken out again. (D-exactness-012)
        self.heard = {bucket: Gathered(self._sources(bucket), self.exact) for bucket in self.holders}
        self.messenger.gather(Gathering(epoch, self.round, self.heard))

    def add(self, layer: int, micro_batch: int, grads: Mapping[int, Sequence[Tensor]]) -> None:
        """Weight gradients of (micro-batch, layer) go into the ledger and the sums.

        ``grads``: bucket -> a float32 tensor for each key, on the store's device; the layer must be owed.

        The ledger first: who is asked in the middle of it says that they are in, as they will be before
        anything else is done with the sums.
        """
        # An addition takes 4 ms of a core and more; a report is answered meanwhile. The decision waits for
        # the loop, so what the ledger says is so by the time that anybody acts on it. (D-recovery-022)
        self.board.count(layer, micro_batch)
        with self.released():
            for bucket, tensors in grads.items():
                part, exponents = self.parts[bucket, layer], self.store.buckets[bucket].exponents
                part.add(tensors, exponents, self._num_contributions(bucket))

    def copied(self, layers: Sequence[int]) -> tuple[SumCopy, list[Tensor]]:
        """What is in the sums of ``layers`` by now, out of place and on the host: a tensor per key, by layer
        and bucket.
        """
        done = {layer: tuple(sorted(self.board.done[layer])) for layer in layers if self.board.done[layer]}
        uses = [(bucket, layer) for layer in done for bucket in self.store.spec.buckets_of(layer)]
        counted = done.get(self.store.spec.num_layers - 1, ())
        with self.released():
            nan, overflow = self._flags(uses)
            losses = {mb: float(self.losses[mb]) for mb in counted}
            what = SumCopy(done, tuple(sorted(nan)), tuple(sorted(overflow)), losses)
            return what, [tensor for use in uses for tensor in self.parts[use].copy()]

    def _flags(self, uses: Sequence[tuple[int, int]]) -> tuple[set[int], set[int]]:
        """Buckets of ``uses`` with NaN, and those with an overflow, in their sums."""
        buckets = {bucket for bucket, _ in uses}
        flags = [(bucket, *self.parts[bucket, use].flags) for bucket, use in uses]
        nan = self.nan & buckets | {bucket for bucket, nan, _ in flags if nan}
        return nan, self.overflow & buckets | {bucket for bucket, _, overflow in flags if overflow}

    def inherit(self, what: SumCopy, tensors: Sequence[Tensor]) -> None:
        """The sums of a peer that is dead count as this device's. They are added when the next epoch is
        entered: whoever asks what is here does not wait for that.
        """
        rest = iter(tensors)
        for layer, micro_batches in what.done.items():
            for bucket in self.store.spec.buckets_of(layer):
                shapes = self.store.spec.buckets[bucket].shapes
                # Not added yet: whoever asks what is here must not wait for it. Exact sums compose, so it
                # does not matter when they are. (D-recovery-018)
                self.inherited.append((self.parts[bucket, layer], [next(rest) for _ in shapes]))
            for micro_batch in micro_batches:
                self.board.inherit(layer, micro_batch)
        self.nan |= set(what.nan)
        self.overflow |= set(what.overflow)
        self.losses |= what.losses

    def contribute(self) -> bool:
        """Send every bucket that is complete here, once under each epoch; whether any was sent. Never waits
        for a peer. Raises SumsChanged where the memory of guarded sums is not what was added up.
        """
        if self.looked_at == self.board.changes:
            return False  # asked between any two pieces of work, and most of them add nothing
        self.looked_at = self.board.changes
        ready = [b for b in self.heard if b not in self.contributed and self._may_contribute(b)]
        for bucket in ready:
            self.contributed.add(bucket)
            self._contribute(bucket)
        return bool(ready)

    def hear(self, bucket: int, source: str, what: Contribution, tensors: Sequence[Tensor]) -> None:
        """A contribution of this epoch and round: ``tensors`` by key in wire form, none if they were added as
        they came (``gather``) or ``what`` is empty. The last one reduces the bucket, and asserts that every
        micro-batch is in it exactly once.
        """
        if bucket in self.heard:
            self._take(bucket, source, what, tensors)

    @property
    def complete(self) -> bool:
        """Whether every bucket held here is reduced."""
        return len(self.reduced) == len(self.heard)

    def vote(self) -> Vote:
        """What this device knows of the round once it is ``complete``: squared norms by bucket and key,
        losses by micro-batch, NaN and overflow; no flags.
        """
        losses: dict[int, float] = {}
        for part in self.reduced.values():
            losses |= part.what.losses
        return Vote(
            norms={bucket: part.norms for bucket, part in self.reduced.items()},
            losses=losses,
            # With infinite logits the gradients of cross-entropy can be finite, and the update would follow
            # a loss that says nothing. (D-training-002)
            nan=any(part.what.nan for part in self.reduced.values())
            or not all(map(math.isfinite, losses.values())),
            overflow=any(part.what.overflow for part in self.reduced.values()),
        )

    def _holders(self, bucket: int, layout: Layout, live: frozenset[str]) -> tuple[str, ...]:
        uses = self.store.spec.buckets[bucket].uses
        return tuple(sorted({device for use in uses for device in layout.holders(use)} & live))

    def _sum(self, bucket: int) -> sums.Sum:
        shapes = self.store.spec.buckets[bucket].shapes
        return sums.empty(shapes, self.exact, self.store.device, guarded=self.guarded)

    def _num_contributions(self, bucket: int) -> int:
        return self.num_micro_batches * len(self.store.spec.buckets[bucket].uses)

    def _sources(self, bucket: int) -> tuple[str, ...]:
        """Whose sums make up the bucket's total under this epoch; nobody's where it was made under an earlier
        one.
        """
        if bucket in self.reduced:
            return ()
        return (self.donors[bucket],) if bucket in self.donors else self.holders[bucket]

    def _may_contribute(self, bucket: int) -> bool:
        if bucket in self.donors:
            return self.donors[bucket] == self.device
        return all(self.board.complete(use) for use in self.store.uses(bucket))

    def _contribute(self, bucket: int) -> None:
        if bucket in self.donors:
            part = self.reduced[bucket]
            what, tensors = part.what, list(part.total)
        else:
            what, tensors = self._own(bucket)
        for peer in self.holders[bucket]:
            if peer != self.device:
                key = key_of(self.epoch, self.round, bucket, self.device)
                self.messenger.send(peer, key, tensors, msgspec.msgpack.encode(what))
        self._take(bucket, self.device, what, tensors)

    def _own(self, bucket: int) -> tuple[Contribution, list[Tensor]]:
        uses = self.store.uses(bucket)
        ledger = {use: tuple(sorted(self.board.done[use])) for use in uses}
        head = self.store.spec.num_layers - 1
        losses = {mb: float(loss) for mb, loss in self.losses.items()} if head in uses else {}
        nan, overflow = self._flags([(bucket, use) for use in uses])
        what = Contribution(ledger, bool(nan), bool(overflow), losses)
        parts = [self.parts[bucket, use].tensors for use in uses if ledger[use]]
        return what, sums.total(parts) if parts else []

    def _take(self, bucket: int, source: str, what: Contribution, tensors: Sequence[Tensor]) -> None:
        """One more contribution to a bucket, which with the last one is reduced."""
        heard = self.heard[bucket]
        if source not in heard.sources or source in heard.whats:
            return
        if not what.is_empty:
            heard.add(source, tensors)  # they may be there already
        if not heard.hear(source, what):
            return
        self.heard[bucket] = Gathered((), self.exact)
        merged = self._merged(bucket, [heard.whats[source] for source in heard.sources])
        self.reduced[bucket] = self._finish(bucket, merged, heard.total())

    def _merged(self, bucket: int, whats: Sequence[Contribution]) -> Contribution:
        everything = tuple(range(self.num_micro_batches))
        ledger: dict[int, tuple[int, ...]] = {}
        for use in self.store.spec.buckets[bucket].uses:
            counted = sorted(mb for what in whats for mb in what.ledger.get(use, ()))
            assert tuple(counted) == everything, f"bucket {bucket}, layer {use}: counted {counted}"
            ledger[use] = everything
        losses = {mb: loss for what in whats for mb, loss in what.losses.items()}
        return Contribution(ledger, any(w.nan for w in whats), any(w.overflow for w in whats), losses)

    def _finish(self, bucket: int, what: Contribution, total: list[Tensor]) -> Reduced:
        exponents = self.store.buckets[bucket].exponents
        if what.nan or what.overflow:
            return Reduced(what, total, [], (0.0,) * len(total), exponents)
        grads = sums.mean_grads(total, exponents, self.num_micro_batches, self.exact)
        norms = sums.squared_norms(grads)
        if not all(map(math.isfinite, norms)):  # float sums: what was not finite in a term is so in the sum
            return Reduced(msgspec.structs.replace(what, nan=True), total, [], (0.0,) * len(total), exponents)
        following = (
            sums.next_exponents(total, exponents, self._num_contributions(bucket))
            if self.exact
            else exponents
        )
        return Reduced(what, total, grads, norms, following)
