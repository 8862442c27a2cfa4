"""The exchange of gradient sums of a round: who sends which bucket to whom, and when a bucket has the sums of
all.

Every holder of a bucket sends what it has added up to every other one. In a round that evaluates there is one
bucket, the head's, without sums: its holders send each other the losses. Owns the exactly-once check over all
holders: for every use of a bucket their ledgers must partition the step's micro-batches, asserted at every
step. Has no sums: those, and adding them up, are ``oobleckd.worker.round.reduce``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleckd.planner.plan import Layout
from oobleckd.worker.round_machine.commands import Contribute
from oobleckd.worker.round_machine.ledger import Ledger


class Contribution(msgspec.Struct, frozen=True):
    """What is said of a holder's sums of a bucket.

    ``ledger``: use -> micro-batches in them. ``losses``: micro-batch -> loss, in a round that evaluates;
    those of a step, NaN and overflow travel among the tensors, as nobody waits for them before the vote.
    """

    ledger: dict[int, tuple[int, ...]]
    losses: dict[int, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the sums: they are zeros, and do not travel."""
        return not any(self.ledger.values())


@dataclass(slots=True)
class Exchange:
    """One device's part in it. ``of_model``: of each bucket of the model, the layers that use it;
    ``per_step``: micro-batches of the present step, ``per_next``: of the one after it. ``num_evaluated``:
    those that the present round evaluates (0: it is a try at a step); ``layers``: those held here; ``head``:
    the last layer.

    ``epoch`` and ``round`` it goes on under; not ``open``: a report was answered, so nothing is sent until
    the decision. ``held``: buckets held here -> their uses here. ``sources``: whose sums a bucket waits for
    (none: it is reduced). ``donors``: buckets that are taken whole from somebody. ``heard``: bucket -> source
    -> what came. ``reduced``: bucket -> all contributions as one. ``among``: the layout and the live that
    ``holders`` are of. ``looked_at``: ``ledger.completions`` when what is complete was last looked for.
    """

    device: str
    of_model: Sequence[tuple[int, ...]]
    per_step: int = 0
    per_next: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    num_evaluated: int = 0
    layers: Collection[int] = ()
    head: int = -1
    epoch: int = 0
    round: int = 0
    open: bool = True
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    sources: dict[int, tuple[str, ...]] = field(default_factory=dict)
    donors: dict[int, str] = field(default_factory=dict)
    heard: dict[int, dict[str, Contribution]] = field(default_factory=dict)
    contributed: set[int] = field(default_factory=set)
    reduced: dict[int, Contribution] = field(default_factory=dict)
    among: tuple[int, frozenset[str]] = (-1, frozenset())
    looked_at: int = -1

    def adopt(self, layout: Layout) -> None:
        """The layers held are those of ``layout``."""
        self.layers = layout.holdings[self.device].layers() if self.device in layout.holdings else ()
        self.head = layout.num_layers - 1
        self._hold()

    def begin(self, round_: int, ledger: Ledger, steps: tuple[int, int], num_evaluated: int = 0) -> None:
        """A new round, of which nothing is here. ``steps``: micro-batches of its step and of the one after
        it; ``num_evaluated``: those of a round that evaluates.
        """
        self.round, self.ledger, (self.per_step, self.per_next) = round_, ledger, steps
        self.reduced = {}
        if num_evaluated != self.num_evaluated:
            self.num_evaluated = num_evaluated
            self._hold()

    @property
    def uses(self) -> Sequence[tuple[int, ...]]:
        """Of each bucket of the round, the layers that use it."""
        return ((self.head,),) if self.num_evaluated else self.of_model

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the round."""
        return self.num_evaluated or self.per_step

    def enter(self, epoch: int, layout: Layout, live: frozenset[str], donors: Mapping[int, str]) -> None:
        """Exchange under ``epoch`` among ``live`` devices; buckets of ``donors`` are taken from there. Once
        for an epoch and a round.
        """
        self.epoch, self.donors, self.open = epoch, dict(donors), True
        self.contributed, self.looked_at = set(), -1
        # Every holder sends to every other one: one hop, to be stopped at any moment, and nothing to
        # rebuild when a holder dies. As cheap as a ring for two or three copies. (D-exactness-004)
        if self.among != (layout.epoch, live):  # most rounds are among the same ones as the last
            self.among = layout.epoch, live
            self.holders = {bucket: self._holders(bucket, layout, live) for bucket in self.held}
        self.sources = {bucket: self._sources(bucket) for bucket in self.held}
        self.heard = {bucket: {} for bucket in self.held}

    def ready(self) -> tuple[Contribute, ...]:
        """What is complete here and was not sent under this epoch. It counts as sent from now on."""
        # Asked between any two layers and pieces of work, and most of them complete nothing.
        if not self.open or self.looked_at == self.ledger.completions:
            return ()
        self.looked_at = self.ledger.completions
        found = [b for b in self.held if b not in self.contributed and self._may_contribute(b)]
        self.contributed.update(found)
        return tuple(Contribute(bucket, self._peers(bucket), bucket in self.donors) for bucket in found)

    def wants(self, bucket: int, source: str) -> bool:
        """Whether the sums of ``source`` are still to come."""
        return source in self.sources.get(bucket, ()) and source not in self.heard[bucket]

    def hear(self, bucket: int, source: str, what: Contribution) -> Sequence[str] | None:
        """A contribution of this epoch and round that ``wants`` asked for. With the last one the bucket is
        reduced, and it is asserted that every micro-batch is in it exactly once; then returns the sources in
        the order in which floats are added.
        """
        assert self.wants(bucket, source), f"bucket {bucket}: {source} contributes once, if at all"
        self.heard[bucket][source] = what
        if len(self.heard[bucket]) < len(self.sources[bucket]):
            return None
        sources, self.sources[bucket] = self.sources[bucket], ()
        self.reduced[bucket] = self._merged(bucket, [self.heard[bucket][source] for source in sources])
        return sources

    def forget(self, bucket: int) -> None:
        """A bucket that was reduced is not after all: what somebody contributed is wrong. It is reduced anew
        under the next epoch, among those who live then.
        """
        del self.reduced[bucket]

    @property
    def complete(self) -> bool:
        """Whether every bucket held here is reduced."""
        return len(self.reduced) == len(self.held)

    def counted(self, bucket: int) -> dict[int, tuple[int, ...]]:
        """Use -> micro-batches that are in this device's own sums of the bucket."""
        return self.ledger.counted(self.held[bucket])

    @property
    def shared(self) -> list[int]:
        """Buckets that others hold, too."""
        return [bucket for bucket, holders in self.holders.items() if len(holders) > 1]

    def _hold(self) -> None:
        uses = enumerate(self.uses)
        here = {bucket: tuple(use for use in of if use in self.layers) for bucket, of in uses}
        self.held = {bucket: of for bucket, of in here.items() if of}
        self.among = (-1, frozenset())

    def _holders(self, bucket: int, layout: Layout, live: frozenset[str]) -> tuple[str, ...]:
        return tuple(sorted({device for use in self.uses[bucket] for device in layout.holders(use)} & live))

    def _peers(self, bucket: int) -> tuple[str, ...]:
        return tuple(peer for peer in self.holders[bucket] if peer != self.device)

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
        return all(self.ledger.complete(use) for use in self.held[bucket])

    def _merged(self, bucket: int, whats: Sequence[Contribution]) -> Contribution:
        everything = tuple(range(self.num_micro_batches))
        ledger: dict[int, tuple[int, ...]] = {}
        for use in self.uses[bucket]:
            counted = sorted(mb for what in whats for mb in what.ledger.get(use, ()))
            assert tuple(counted) == everything, f"bucket {bucket}, layer {use}: counted {counted}"
            ledger[use] = everything
        return Contribution(ledger, {mb: loss for what in whats for mb, loss in what.losses.items()})
