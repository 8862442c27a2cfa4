"""The exchange of gradient sums of a round: who sends what of which bucket to whom, and when a bucket has the
means of all.

Every holder of a bucket sends what it has added up to those who make means of its slices (``makers``), and
they give the means to the other holders. In a round that evaluates there is one bucket, the head's, without
sums: its holders exchange the losses. Owns the exactly-once check over all holders: for every use of a bucket
their ledgers must partition the step's micro-batches, asserted at every step by who makes a mean, and once
more by who is given it, with the ledgers that come with it. Has no sums: those, and adding them up, are
``oobleckd.worker.round.reduce``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleckd.planner.plan import Layout
from oobleckd.worker.round_machine.commands import Contribute, Give
from oobleckd.worker.round_machine.ledger import Ledger
from oobleckd.worker.round_machine.makers import NOTHING, Makes, makers

Donors = Mapping[int, Mapping[str, int]]
"""Bucket -> device -> the slices whose means everybody takes from it; together all of the bucket."""
NO_DONORS: Donors = {}
_BEFORE = ""
"""In place of who gave means that are kept from an earlier epoch, to be given to others."""


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


class Given(msgspec.Struct, frozen=True):
    """What is said of means of ``slices`` of a bucket. ``ledgers``: of each holder, what was in its sums, of
    which they were made; ``losses``: of all.
    """

    slices: int
    ledgers: dict[str, dict[int, tuple[int, ...]]]
    losses: dict[int, float] = {}


@dataclass(slots=True)
class Exchange:
    """One device's part in it. ``of_model``: of each bucket of the model, the layers that use it, and
    ``numbers``: of each of its slices how many numbers it has. ``shards``: of each bucket the slices of each
    rank (none: holders have all), and ``ranks`` those of devices. Sums of a shard are exchanged among those
    who hold it, and what the host is to know of its means goes to all who hold any of the bucket.
    ``per_step``: micro-batches of the present step, ``per_next``: of the one after it. ``num_evaluated``:
    those that the present round evaluates (0: it is a try at a step); ``twice``: a second holder makes each
    mean; ``layers``: those held here; ``head``: the last layer.

    ``epoch`` and ``round`` it goes on under; not ``open``: a report was answered, so nothing is sent until
    the decision. ``held``: buckets held here -> their uses here. ``makers``: of each of them, who makes what.
    ``sources``: whose sums a bucket waits for here (none: nothing is made here, or it is made). ``donors``:
    buckets whose means are here or there already. ``heard``: bucket -> source -> what came. ``here``: bucket
    -> slices of which the means are here; ``given``: bucket -> by whom some were. ``reduced``: buckets of
    which all are. ``among``: the layout, the live and ``twice``, that ``makers`` are of. ``looked_at``:
    ``ledger.completions`` when what is complete was last looked for.
    """

    device: str
    of_model: Sequence[tuple[int, ...]]
    numbers: Sequence[Sequence[int]]
    per_step: int = 0
    per_next: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    num_evaluated: int = 0
    twice: bool = False
    layers: Collection[int] = ()
    head: int = -1
    epoch: int = 0
    round: int = 0
    open: bool = True
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    makers: dict[int, dict[str, Makes]] = field(default_factory=dict)
    sources: dict[int, tuple[str, ...]] = field(default_factory=dict)
    donors: Donors = field(default_factory=dict)
    heard: dict[int, dict[str, Contribution]] = field(default_factory=dict)
    contributed: set[int] = field(default_factory=set)
    here: dict[int, int] = field(default_factory=dict)
    given: dict[int, dict[str, Given]] = field(default_factory=dict)
    reduced: dict[int, Given] = field(default_factory=dict)
    among: tuple[int, frozenset[str], bool] = (-1, frozenset(), False)
    looked_at: int = -1
    shards: Sequence[Sequence[int]] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)

    def cut(self, numbers: Sequence[Sequence[int]], shards: Sequence[Sequence[int]]) -> None:
        """Buckets are cut otherwise from the next layout on."""
        self.numbers, self.shards = numbers, shards

    def adopt(self, layout: Layout) -> None:
        """The layers held are those of ``layout``."""
        is_sharded = layout.devices_per_stage > 1
        self.ranks = {device: layout.rank(device) for device in layout.holdings} if is_sharded else {}
        self.layers = layout.holdings[self.device].layers() if self.device in layout.holdings else ()
        self.head = layout.num_layers - 1
        self._hold()

    def begin(
        self,
        round_: int,
        ledger: Ledger,
        steps: tuple[int, int],
        num_evaluated: int = 0,
        *,
        twice: bool = False,
    ) -> None:
        """A new round, of which nothing is here. ``steps``: micro-batches of its step and of the one after
        it; ``num_evaluated``: those of a round that evaluates; ``twice``: a second holder makes each mean.
        """
        self.round, self.ledger, (self.per_step, self.per_next) = round_, ledger, steps
        self.twice = twice
        self.reduced, self.here, self.given = {}, {}, {}
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

    def all_of(self, bucket: int) -> int:
        """All slices of a bucket; an evaluation's has one."""
        return 1 if self.num_evaluated else (1 << len(self.numbers[bucket])) - 1

    def enter(self, epoch: int, layout: Layout, live: frozenset[str], donors: Donors) -> None:
        """Exchange under ``epoch`` among ``live`` devices; means of the buckets of ``donors`` are taken from
        there. Once for an epoch and a round.
        """
        self.epoch, self.donors, self.open = epoch, dict(donors), True
        self.contributed, self.looked_at = set(), -1
        # Two hops, either of which can be stopped at any moment, and nothing to rebuild when a holder dies:
        # own sums stay until the commit, and the others know who owns what now. (D-exactness-022)
        among = layout.epoch, live, self.twice
        if self.among != among:  # most rounds are among the same ones as the last
            self.among = among
            self.holders = {bucket: self._holders(bucket, layout, live) for bucket in self.held}
            self.makers = {bucket: self._makers(bucket) for bucket in self.held}
        self.heard = {bucket: {} for bucket in self.held}
        self.given = {bucket: self.given.get(bucket, {}) for bucket in self.held}
        for bucket in self.held:
            self._enter(bucket)

    def _enter(self, bucket: int) -> None:
        """What of ``bucket`` is here and what is to come, under a new epoch."""
        self.sources[bucket] = ()
        # Means of another shard may have died with whoever had them: then all of them are made anew, here as
        # well, for those to whom they were not given.
        is_made = bucket not in self.reduced or self._is_sharded
        if is_made and bucket not in self.donors and self.made_here(bucket):
            holders = self.holders[bucket]
            self.sources[bucket] = tuple(filter(self.is_alike, holders)) if self.shards else holders
        if bucket in self.reduced:
            return
        mine = self.donors[bucket].get(self.device, 0) if bucket in self.donors else 0
        assert not mine & ~self.here.get(bucket, 0), f"bucket {bucket}: to give what is not here"
        self.here[bucket] = mine
        self.given[bucket] = {_BEFORE: self.of_means(bucket, mine)} if mine else {}

    def ready(self) -> tuple[Contribute | Give, ...]:
        """What is complete here and was not sent under this epoch. It counts as sent from now on."""
        # Asked between any two layers and pieces of work, and most of them complete nothing.
        if not self.open or self.looked_at == self.ledger.completions:
            return ()
        self.looked_at = self.ledger.completions
        found = [b for b in self.held if b not in self.contributed and self._may_contribute(b)]
        self.contributed.update(found)
        return tuple(self._donated(b) if b in self.donors else self._contribute(b) for b in found)

    def _contribute(self, bucket: int) -> Contribute:
        makers = sorted((peer, makes.slices) for peer, makes in self.makers[bucket].items())
        shares = (share for share in makers if share[0] != self.device and self.is_alike(share[0]))
        return Contribute(bucket, tuple(shares))

    def _donated(self, bucket: int) -> Give:
        peers = tuple(peer for peer in self.holders[bucket] if peer != self.device)
        return Give(bucket, self.donors[bucket][self.device], peers)

    # ------------------------------------------------------------------ sums, where means are made

    def made_here(self, bucket: int) -> int:
        """Slices of ``bucket`` of which this device makes the means, from everybody's sums."""
        return self.makers[bucket].get(self.device, NOTHING).slices

    def made_by_now(self, bucket: int) -> int:
        """Slices whose means here this device has made itself; none of a bucket that came from donors."""
        given = self.given[bucket].get(self.device)
        return given.slices if given is not None else 0

    def wants(self, bucket: int, source: str) -> bool:
        """Whether the sums of ``source`` are still to come."""
        return source in self.sources.get(bucket, ()) and source not in self.heard[bucket]

    def hear(self, bucket: int, source: str, what: Contribution) -> Give | None:
        """A contribution of this epoch and round that ``wants`` asked for. With the last one the means of
        ``made_here`` are here, and it is asserted that every micro-batch is in them exactly once; then
        returns to whom they are to be given, which may be nobody.
        """
        assert self.wants(bucket, source), f"bucket {bucket}: {source} contributes once, if at all"
        self.heard[bucket][source] = what
        if len(self.heard[bucket]) < len(self.sources[bucket]):
            return None
        sources, self.sources[bucket] = self.sources[bucket], ()
        heard = self.heard[bucket]
        losses = {mb: loss for source in sources for mb, loss in heard[source].losses.items()}
        ledgers = {source: heard[source].ledger for source in sources}
        made = Given(self.made_here(bucket), ledgers, losses)
        if bucket in self.reduced:
            self._check(bucket, made)
        else:
            self._take(bucket, self.device, made)
        makes = self.makers[bucket]
        owns = makes[self.device].owns
        peers = (peer for peer in self.holders[bucket] if not makes.get(peer, NOTHING).slices & owns)
        return Give(bucket, owns, tuple(peers) if owns else ())

    # ------------------------------------------------------------------ means

    def wants_means(self, bucket: int, giver: str) -> bool:
        """Whether means from ``giver`` are still to come."""
        return bool(self._to_be_given(bucket, giver)) and giver not in self.given[bucket]

    def hear_means(self, bucket: int, giver: str, given: Given) -> None:
        """Means of this epoch and round that ``wants_means`` asked for. With the last ones the bucket is
        reduced.
        """
        assert self.wants_means(bucket, giver), f"bucket {bucket}: {giver} gives once, if at all"
        assert given.slices == self._to_be_given(bucket, giver), f"bucket {bucket}: others than {giver} has"
        self._take(bucket, giver, given)

    def of_means(self, bucket: int, slices: int) -> Given:
        """What is said of means that are here."""
        known = next(iter(self.given[bucket].values()))
        return msgspec.structs.replace(known, slices=slices)

    def forget(self, bucket: int) -> None:
        """Means that are here are not right after all: what somebody contributed is wrong. They are made anew
        under the next epoch, among those who live then.
        """
        self.reduced.pop(bucket, None)
        self.here[bucket], self.given[bucket] = 0, {}

    def _take(self, bucket: int, giver: str, given: Given) -> None:
        assert not given.slices & self.here[bucket], f"bucket {bucket}: a mean is given once"
        self._check(bucket, given)
        self.given[bucket][giver] = given
        self.here[bucket] |= given.slices
        if self.here[bucket] == self.all_of(bucket):
            self.reduced[bucket] = given

    def _to_be_given(self, bucket: int, giver: str) -> int:
        """Slices of which ``giver`` gives this device the means under this epoch."""
        if bucket not in self.held or bucket in self.reduced or giver == self.device:
            return 0
        if bucket in self.donors:
            return self.donors[bucket].get(giver, 0)
        owns = self.makers[bucket].get(giver, NOTHING).owns
        return 0 if owns & self.made_here(bucket) else owns

    # ------------------------------------------------------------------ the whole

    @property
    def complete(self) -> bool:
        """Whether every bucket held here is reduced."""
        return len(self.reduced) == len(self.held)

    @property
    def told(self) -> dict[int, tuple[int, int]]:
        """Bucket -> the slices of which means are here, and all that it has; of none where none are."""
        found = ((bucket, here & self._own(bucket)) for bucket, here in self.here.items())
        return {bucket: (here, self.all_of(bucket)) for bucket, here in found if here}

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
        self.among = (-1, frozenset(), False)

    def _holders(self, bucket: int, layout: Layout, live: frozenset[str]) -> tuple[str, ...]:
        return tuple(sorted({device for use in self.uses[bucket] for device in layout.holders(use)} & live))

    def _makers(self, bucket: int) -> dict[str, Makes]:
        holders = self.holders[bucket]
        if not self._is_sharded:
            numbers = (1,) if self.num_evaluated else self.numbers[bucket]
            return makers(bucket, numbers, holders, twice=self.twice)
        found: dict[str, Makes] = {}
        for rank, slices in enumerate(self.shards[bucket]):
            alike = [device for device in holders if self.ranks[device] == rank]
            found |= makers(bucket, self.numbers[bucket], alike, twice=self.twice, slices=slices)
        return found

    @property
    def _is_sharded(self) -> bool:
        # Losses lie with whoever computed them, whatever its rank.
        return bool(self.shards) and not self.num_evaluated

    def is_alike(self, peer: str) -> bool:
        """Whether ``peer`` holds the same shard of what it holds."""
        return not self._is_sharded or self.ranks[peer] == self.ranks[self.device]

    def _own(self, bucket: int) -> int:
        """The slices that this device holds."""
        if not self._is_sharded:
            return self.all_of(bucket)
        return self.shards[bucket][self.ranks[self.device]]

    def _may_contribute(self, bucket: int) -> bool:
        if bucket in self.donors:
            return self.device in self.donors[bucket]
        return all(self.ledger.complete(use) for use in self.held[bucket])

    def _check(self, bucket: int, given: Given) -> None:
        """Assert that the means are of every micro-batch exactly once."""
        everything = list(range(self.num_micro_batches))
        for use in self.uses[bucket]:
            counted = sorted(mb for ledger in given.ledgers.values() for mb in ledger.get(use, ()))
            assert counted == everything, f"bucket {bucket}, layer {use}: counted {counted}"
