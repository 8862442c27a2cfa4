"""Gradient sums of a round: own sums per (bucket, use), contributions of the other holders, the means.

A holder that has computed nothing of a bucket, as a redundant holder, says so without tensors, and gets the
means all the same. Own sums stay as they are until the commit, so that after a failure they can be
contributed again under the next epoch. Of a bucket that is reduced mean gradients are kept and a few figures,
and not the total: whoever lacks some is given these, and has the same bits. Owns the tensors; who sends what
to whom, and that every micro-batch is in a total exactly once, is
``oobleckd.worker.round_machine.exchange``'s.

Memory, in bytes a parameter where sums are exact: 8 of own sums, always; 4 of mean gradients, from the time
that the first slice is there to the commit. Of slices that are made here 8 more from the time that the first
of the others has contributed until the last has: one sum of theirs grows.

Nothing here is read by the host before ``look``, which reads once for all buckets: on a GPU each read waits
until all that was asked of it is done. What a sum's memory was found to be is read there as well, before
anybody votes; and before a device says what it has reduced (``report``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.corruption import of_numbers
from oobleckd.protocol.parts import RouterFigures, Vote
from oobleckd.worker import sums
from oobleckd.worker.messaging.gather import Gathered, Gathering, key_of, means_key_of
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.round import marks
from oobleckd.worker.round.means import NO_MEANS, Means
from oobleckd.worker.round.weights import WeightsOf
from oobleckd.worker.round_machine.commands import Contribute, Give
from oobleckd.worker.round_machine.copies import SumCopy
from oobleckd.worker.round_machine.exchange import Contribution, Exchange, Given
from oobleckd.worker.runtime.yielding_lock import Released
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums.guard import MeansChanged, SumsChanged


class RouterTold(NamedTuple):
    """Of one router in a step: the means of its losses, as micro-batches count, and the tokens of each expert
    over all of them.
    """

    aux_loss: float
    z_loss: float
    tokens: tuple[int, ...]


class ReadFigures(NamedTuple):
    """Figures of a bucket and the losses that came with it by micro-batch, as numbers of the host; of layers
    with a router what that told. ``squares``: of each chunk the sum of squares of the mean gradient.
    """

    figures: sums.BucketFigures
    losses: dict[int, float]
    routers: dict[int, RouterTold] = {}  # noqa: RUF012 - nobody writes to it
    squares: Sequence[float] = ()


@dataclass(slots=True)
class Reduced:
    """What follows from the sums of a bucket over all replicas: all ``means``. ``read``: what their figures
    say, once that is known.
    """

    means: Means
    read: ReadFigures | None = None

    @property
    def grads(self) -> list[Tensor]:
        """Mean gradients by key, float32, of the parameters' shapes; they mean nothing where ``told`` has a
        NaN or an overflow.
        """
        return self.means.grads

    @property
    def told(self) -> ReadFigures:
        """What the figures say, which were read before the vote."""
        assert self.read is not None, "figures are read before anything is made of them"
        return self.read


class Reducer:
    """The sums of one device's round, of ``step``. ``weights_of``: how much its micro-batches count;
    ``released``: entered where sums are added to or copied, so that a report is answered meanwhile;
    ``reached``: called whenever means were given, to one more holder or by another. ``upset``: what is to be
    done to a mean of the next that are made here, for faults on demand.

    ``parts``: (bucket, use) -> own sums, of the shard that is here. ``nan`` and ``overflow``: buckets with
    one in what was inherited; of its own, the parts know. ``losses``: by micro-batch, on the device where
    they came out of it; ``routed``: what a router told of a micro-batch (``BlockRouter``), by layer and
    micro-batch, on the device. ``inherited``: sums that are in the ledger, and added when the next epoch is
    entered. ``gathered``: what was contributed of slices whose means are made here; ``means``: what is here
    of any bucket, and ``reduced``: of those of which all is.
    """

    def __init__(
        self,
        exchange: Exchange,
        store: Store,
        messenger: Messenger,
        weights_of: WeightsOf,
        *,
        exact: bool,
        guarded: bool = False,
        released: Released = nullcontext,
        reached: Callable[[], None] = lambda: None,
    ) -> None:
        self.exchange, self.store, self.messenger, self.weights_of = exchange, store, messenger, weights_of
        self.step = 0
        self.upset: Callable[[Tensor], object] | None = None
        self.exact, self.guarded, self.released, self.reached = exact, guarded, released, reached
        self.parts: dict[tuple[int, int], sums.Sum] = {}
        self._cut_as: object = None  # the store's ``shards`` that ``parts`` are of
        self.nan: set[int] = set()
        self.overflow: set[int] = set()
        self.losses: dict[int, float | Tensor] = {}
        self.routed: dict[marks.Place, Tensor] = {}
        self.inherited: list[tuple[sums.Sum, Sequence[Tensor]]] = []
        self.gathered: dict[int, Gathered] = {}
        self.means: dict[int, Means] = {}
        self.reduced: dict[int, Reduced] = {}

    def adopt(self) -> None:
        """The layers held have changed: keep a sum for each (bucket, use) of them, 8 bytes a parameter (4
        where not exact), and free the others.
        """
        if self._cut_as is not self.store.shards:
            self._cut_as, self.parts = self.store.shards, {}
        # Of the store and not of the exchange, which has no bucket of the model in a round that evaluates.
        wanted = sorted((bucket, use) for bucket in self.store.buckets for use in self.store.uses(bucket))
        self.parts = {key: self.parts.get(key) or self._sum(key[0]) for key in wanted}

    def begin(self, step: int) -> None:
        """A new round, of ``step``: sums, losses and totals of the last one are gone."""
        self.step = step
        for part in self.parts.values():
            part.zero_()
        self.nan, self.overflow, self.losses, self.routed = set(), set(), {}, {}
        self.means, self.reduced = {}, {}
        self.inherited = []

    def forget(self) -> None:
        """What was added up of the round counts for nothing. Means that are here are right all the same."""
        for part in self.parts.values():
            part.zero_()
        self.nan, self.overflow, self.losses, self.routed = set(), set(), {}, {}
        self.inherited = []

    def enter(self) -> None:
        """The exchange has entered a new epoch or round: what peers send of it is added to from now on."""
        for part, tensors in self.inherited:
            part.merge(tensors)
        self.inherited = []
        # An exchange is entered once for a generation and a round: what readers have added to it cannot be
        # taken out again. (D-exactness-012)
        exchange = self.exchange
        self.means = {bucket: means for bucket, means in self.means.items() if exchange.here.get(bucket)}
        self.gathered = {b: Gathered(sources, self.exact) for b, sources in exchange.sources.items()}
        self.messenger.gather(Gathering(exchange.epoch, exchange.round, self.gathered))

    def add(self, layer: int, micro_batch: int, grads: Mapping[int, Sequence[Tensor]]) -> None:
        """Weight gradients of (micro-batch, layer) go into the ledger and the sums.

        ``grads``: bucket -> a tensor for each part of the shard here, on the store's device; the layer must
        be owed.

        The ledger first: who is asked in the middle of it says that they are in, as they will be before
        anything else is done with the sums.
        """
        # An addition takes 4 ms of a core and more; a report is answered meanwhile. The decision waits for
        # the loop, so what the ledger says is so by the time that anybody acts on it. (D-recovery-022)
        self.exchange.ledger.count(layer, micro_batch)
        with self.released():
            for bucket, tensors in grads.items():
                part, exponents = self.parts[bucket, layer], self.store.buckets[bucket].exponents
                if self.store.memory is not None:
                    exponents = self.store.shard(bucket).of_parts(exponents)
                part.add(tensors, exponents, self._num_contributions(bucket, self.exchange.per_step))

    def told_of(self, layer: int, micro_batch: int) -> list[Tensor]:
        """What is told of a micro-batch beside the gradients of ``layer``, which have come in."""
        if not self.store.spec.num_told(layer):
            return []
        told = self._told_of(layer, micro_batch)
        return [told if isinstance(told, Tensor) else torch.tensor(told, device=self.store.device)]

    def note(self, layer: int, micro_batch: int, told: Sequence[Tensor]) -> None:
        """The same of another device, whose gradients come in next."""
        for each in told:
            if layer == self.exchange.head:
                self.losses[micro_batch] = each
            else:
                self.routed[layer, micro_batch] = each

    def copied(self, layers: Sequence[int]) -> tuple[SumCopy, list[Tensor]]:
        """What is in the sums of ``layers`` by now, out of place and on the host: a tensor per key, by layer
        and bucket, and behind them, of each layer with a router, what that told by micro-batch.
        """
        done = {layer: counted for layer, counted in self.exchange.ledger.counted(layers).items() if counted}
        uses = [(bucket, layer) for layer in done for bucket in self.store.spec.buckets_of(layer)]
        counted = done.get(self.exchange.head, ())
        with self.released():
            nan, overflow = self._flags(uses)
            losses = {mb: float(self.losses[mb]) for mb in counted}
            what = SumCopy(done, tuple(sorted(nan)), tuple(sorted(overflow)), losses)
            copies = [tensor for use in uses for tensor in self.parts[use].copy()]
            return what, copies + [torch.stack(told).cpu() for told in self._routed(done)]

    def _routed(self, ledger: Mapping[int, Sequence[int]]) -> list[list[Tensor]]:
        """What routers told of the micro-batches of a ``ledger``, by layer."""
        layers = [layer for layer in ledger if self.store.spec.num_experts(layer)]
        return [[self.routed[layer, micro_batch] for micro_batch in ledger[layer]] for layer in layers]

    def _flags(self, uses: Sequence[tuple[int, int]]) -> tuple[set[int], set[int]]:
        """Buckets of ``uses`` with NaN, and those with an overflow, in their sums."""
        buckets = {bucket for bucket, _ in uses}
        flags = [(bucket, *self.parts[bucket, use].flags) for bucket, use in uses]
        nan = self.nan & buckets | {bucket for bucket, nan, _ in flags if nan}
        return nan, self.overflow & buckets | {bucket for bucket, _, overflow in flags if overflow}

    def inherit(self, what: SumCopy, tensors: Sequence[Tensor]) -> None:
        """The sums of a peer that is dead count as this device's, and are in its ledger. They are added when
        the next epoch is entered: whoever asks what is here does not wait for that.
        """
        rest = iter(tensors)
        for layer in what.done:
            for bucket in self.store.spec.buckets_of(layer):
                shapes = self.store.shard(bucket).shapes
                # Not added yet: whoever asks what is here must not wait for it. Exact sums compose, so it
                # does not matter when they are. (D-recovery-018)
                self.inherited.append((self.parts[bucket, layer], [next(rest) for _ in shapes]))
        for layer, micro_batches in what.done.items():
            if self.store.spec.num_experts(layer):
                told = next(rest).to(self.store.device).unbind()
                self.routed |= zip(((layer, mb) for mb in micro_batches), told, strict=True)
        self.nan |= set(what.nan)
        self.overflow |= set(what.overflow)
        self.losses |= what.losses

    def contribute_ready(self) -> bool:
        """Send every bucket that is complete here, once under each epoch; whether any was sent. Never waits
        for a peer. On a CPU raises SumsChanged where the memory of guarded sums is not what was added up.
        """
        ready = self.exchange.ready()
        for command in ready:
            if isinstance(command, Give):
                self.give(command)
            else:
                self.contribute(command)
        return bool(ready)

    def contribute(self, command: Contribute) -> None:
        """Send the sums of a bucket to those who make means of it, and take in here what is made here."""
        bucket, here = command.bucket, self.exchange
        what, total, beside = self._own(bucket)
        key, meta = key_of(here.epoch, here.round, bucket, here.device), msgspec.msgpack.encode(what)
        for peer, slices in command.shares:
            self.messenger.send(peer, key, self._share(bucket, total, slices, beside), meta)
        if mine := here.made_here(bucket):
            self.hear(bucket, here.device, what, self._share(bucket, total, mine, beside))

    def _share(
        self, bucket: int, total: Sequence[Tensor], slices: int, beside: Tensor | None
    ) -> list[Tensor]:
        """What is contributed of ``slices``: nothing, where there are no sums."""
        return [] if beside is None else [*self.store.shard(bucket).cut(total, slices), beside]

    def hear(
        self,
        bucket: int,
        source: str,
        what: Contribution,
        tensors: Sequence[Tensor],
        *,
        added: bool = False,
    ) -> None:
        """A contribution of this epoch and round, to means that are made here. ``tensors``: flat sums by
        range in wire form, and behind them what travels beside them (``marks``); none where ``what`` is
        empty, and in a round that evaluates. ``added``: the thread that read them has added them up
        (``gather``). With the last one the means are made, and given to those who are to have them.
        """
        if not self.exchange.wants(bucket, source):
            return
        assert added or bool(tensors) != (what.is_empty or self.evaluates), f"bucket {bucket}: no sums came"
        if tensors:
            self.gathered[bucket].add(source, tensors, own=source == self.exchange.device)
        give = self.exchange.hear(bucket, source, what)
        if give is None:
            return
        gathered, self.gathered[bucket] = self.gathered[bucket], Gathered((), self.exact)
        # Who lost means of a shard asks for them anew, also from those who have them all: what is here has
        # the same bits, and was read before this device voted, maybe under this very epoch.
        if not self.evaluates and bucket not in self.reduced:
            self._make(bucket, gathered)
            self._made(give)
        self._settle(bucket)
        self.give(give)

    def _made(self, give: Give) -> None:
        """Means are here that this device has made. Those that it gives are looked at once more before it
        votes.
        """
        means = self.means[give.bucket]
        # Who is given a mean that has changed here repeats it, and with three replicas both would outvote
        # the second maker. (D-corruption-012)
        if self.exchange.twice and give.peers:
            means.seal(give.slices)
        if self.upset is not None:
            upset, self.upset = self.upset, None
            upset(means.shard.cut(means.grads, self.exchange.made_here(give.bucket))[0])

    def give(self, command: Give) -> None:
        """Send means that are here to holders who have not made them."""
        bucket, here = command.bucket, self.exchange
        if not command.peers:
            return
        # Of a donor too: a total would be twice as large, and kept in every replica only to be given.
        # (D-exactness-019)
        tensors = [] if self.evaluates else self.means[bucket].given(command.slices)
        told = [] if self.evaluates else self.means[bucket].told(command.slices)
        key = means_key_of(here.epoch, here.round, bucket, here.device)
        meta = msgspec.msgpack.encode(here.of_means(bucket, command.slices))
        for peer in command.peers:
            self.messenger.send(peer, key, tensors if here.is_alike(peer) else told, meta)
            self.reached()

    def hear_means(self, bucket: int, giver: str, given: Given, tensors: Sequence[Tensor]) -> None:
        """Means of this epoch and round: of each range of the slices that are given, float32, and behind them
        their figures and what is told beside; none in a round that evaluates.
        """
        if not self.exchange.wants_means(bucket, giver):
            return
        if not self.evaluates:
            self._means_of(bucket).take(given.slices, tensors)
        self.exchange.hear_means(bucket, giver, given)
        self._settle(bucket)
        self.reached()

    def _settle(self, bucket: int) -> None:
        """With its last means a bucket is reduced."""
        if bucket in self.exchange.reduced and bucket not in self.reduced:
            evaluated = Reduced(NO_MEANS, ReadFigures(_NOTHING, {}))
            self.reduced[bucket] = evaluated if self.evaluates else Reduced(self.means[bucket])

    def look(self) -> bool:
        """Read the figures of all means that are here and were not read; waits once. Whether all of it
        stands: of a peer whose memory had changed nothing is taken. Raises SumsChanged where it was this
        device's.
        """
        unread = {bucket: part for bucket, part in self.reduced.items() if part.read is None}
        partly = [] if self.evaluates else [bucket for bucket in self.means if bucket not in self.reduced]
        if not unread and not partly:
            return True
        found: dict[int, ReadFigures] = {}
        changed = set()
        # All in one go: each read waits until the GPU has done what it was given. (D-exactness-020)
        lying = [part.means.figures for part in unread.values()]
        lying += [self.means[bucket].marks for bucket in partly]
        broken = [] if self.evaluates else [each for part in unread.values() for each in part.means.broken]
        lying += [torch.stack(broken).to(torch.float64)] if broken else []
        values = iter(torch.cat(lying).tolist())
        for (bucket, part), figures in zip(unread.items(), lying, strict=False):
            found[bucket] = self._told(bucket, part.means, list(islice(values, figures.numel())))
            if found[bucket].figures.changed:
                changed.add(bucket)
        for bucket in partly:
            if list(islice(values, sums.NUM_MARKS))[-1]:
                changed.add(bucket)
        if any(values):  # of means that were given to others
            raise MeansChanged
        mine = [part.marks[-1] for (bucket, _), part in self.parts.items() if bucket in changed]
        if mine and bool(torch.stack(mine).any()):
            raise SumsChanged
        for bucket in changed:
            # Its owner says so itself, or is dead: then all who live make the bucket anew. Who had taken it
            # for reduced would give it to others. (D-corruption-011)
            self.reduced.pop(bucket, None)
            found.pop(bucket, None)
            self.means.pop(bucket)
            self.exchange.forget(bucket)
        for bucket, told in found.items():
            self.reduced[bucket].read = told
        return not changed

    def vote(self, *, compared: bool = False) -> Vote:
        """What this device knows of the round once all is reduced and looked at: squared norms by bucket and
        key, losses by micro-batch, NaN and overflow; no flags. Losses alone, of a round that evaluates.
        ``compared``: with fingerprints of the means that were made here.
        """
        losses: dict[int, float] = {}
        if self.evaluates:
            for what in self.exchange.reduced.values():
                losses |= what.losses
            return Vote({}, losses)
        told = {bucket: part.told for bucket, part in self.reduced.items()}
        for each in told.values():
            losses |= each.losses
        return Vote(
            norms={bucket: each.figures.norms for bucket, each in told.items()},
            losses=losses,
            routers={layer: _figures_of(router) for layer, router in self.routers.items()},
            # With infinite logits the gradients of cross-entropy can be finite, and the update would follow
            # a loss that says nothing. (D-training-002)
            nan=any(each.figures.nan for each in told.values())
            or not all(map(math.isfinite, losses.values())),
            overflow=any(each.figures.overflow for each in told.values()),
            made={bucket: self._fingerprints(bucket) for bucket in told} if compared else {},
        )

    def _fingerprints(self, bucket: int) -> dict[int, int]:
        """Of the slices of ``bucket`` whose means were made here, under the present epoch."""
        # Of sums of squares, which the host has read anyway: of the means themselves it would be one more
        # pass through all of them. (D-corruption-012)
        part, made = self.reduced[bucket], self.exchange.made_by_now(bucket)
        squares, slicing = part.told.squares, part.means.slicing
        return {
            number: of_numbers([squares[chunk] for chunk in slicing.chunks(1 << number)])
            for number in sums.members(made)
        }

    @property
    def routers(self) -> dict[int, RouterTold]:
        """Of the layers held here that have a router, what that told in a step that was looked at."""
        return {layer: told for part in self.reduced.values() for layer, told in part.told.routers.items()}

    @property
    def overflowed(self) -> list[int]:
        """Buckets with an overflow, of a round that was voted on."""
        return [bucket for bucket, part in self.reduced.items() if part.told.figures.overflow]

    @property
    def evaluates(self) -> bool:
        """Whether the round has losses alone, and no sums."""
        return self.exchange.num_evaluated > 0

    def _sum(self, bucket: int) -> sums.Sum:
        shapes = self.store.shard(bucket).shapes
        return sums.empty(shapes, self.exact, self.store.device, guarded=self.guarded)

    def _num_contributions(self, bucket: int, micro_batches: int) -> int:
        return micro_batches * len(self.exchange.uses[bucket])

    def _own(self, bucket: int) -> tuple[Contribution, Sequence[Tensor], Tensor | None]:
        """What is said of this device's sums, those by key, and what travels beside them; None where there
        are no sums to be sent.
        """
        ledger = self.exchange.counted(bucket)
        if self.evaluates:
            return Contribution(ledger, {mb: float(loss) for mb, loss in self.losses.items()}), [], None
        what = Contribution(ledger)
        if what.is_empty:
            return what, [], None
        total = sums.total([self.parts[bucket, use].tensors for use in ledger if ledger[use]])
        told = [self._told_of(*place) for place in marks.places(ledger, self._widths(bucket))]
        return what, total, self._marks(bucket, [use for use in ledger if ledger[use]], told)

    def _widths(self, bucket: int) -> dict[int, int]:
        """Of each use how many numbers each micro-batch has that are told of it."""
        return {use: self.store.spec.num_told(use) for use in self.exchange.uses[bucket]}

    def _told_of(self, use: int, micro_batch: int) -> float | Tensor:
        is_head = use == self.exchange.head
        return self.losses[micro_batch] if is_head else self.routed[use, micro_batch]

    def _marks(self, bucket: int, uses: Sequence[int], told: Sequence[float | Tensor]) -> Tensor:
        parts = [self.parts[bucket, use] for use in uses]
        return marks.made(parts, told, nan=bucket in self.nan, overflow=bucket in self.overflow)

    def _means_of(self, bucket: int) -> Means:
        if bucket not in self.means:
            self.means[bucket] = Means(self.store.shard(bucket), self.store.device, exact=self.exact)
        return self.means[bucket]

    def _make(self, bucket: int, gathered: Gathered) -> None:
        """The means of slices that are made here, of all contributions. Waits for nothing."""
        means, slices = self._means_of(bucket), self.exchange.made_here(bucket)
        by_key, weight = self.store.buckets[bucket].exponents, self.weights_of(self.step).total
        exponents = [by_key[each.key] for each in means.slicing.ranges(slices)]

        def finish(into: Sequence[Tensor]) -> Tensor:
            parts, chunk = gathered.parts(), means.slicing.chunk
            return sums.finish(parts, exponents, weight, into, chunk, exact=self.exact)

        means.make(slices, finish, self._joined(bucket, gathered))

    def _joined(self, bucket: int, gathered: Gathered) -> Tensor:
        """What travelled beside all contributions, as the host will read it."""
        beside, widths, heard = gathered.beside, self._widths(bucket), self.exchange.heard[bucket]
        joined = marks.joined(
            [
                (beside[source], marks.places(heard[source].ledger, widths))
                for source in gathered.sources
                if source in beside
            ],
            widths,
        )
        told = marks.added(joined[sums.NUM_MARKS :], widths, self.exchange.per_step)
        return torch.cat((joined[: sums.NUM_MARKS], told))

    def _told(self, bucket: int, means: Means, values: Sequence[float]) -> ReadFigures:
        head = self.exchange.head
        exponents, terms = (
            self.store.buckets[bucket].exponents,
            self._num_contributions(bucket, self.exchange.per_next),
        )
        of_sums, rest = values[: sums.NUM_MARKS], values[sums.NUM_MARKS :]
        told_of, figures = rest[: means.num_told], rest[means.num_told :]
        found = sums.decode(of_sums, figures, means.slicing, exponents, terms, exact=self.exact)
        # What is not trained counts in no norm, as in torch; its gradient is summed all the same, since what
        # a block computes does not depend on what is done with it. (D-training-006)
        frozen = self.store.shards.whole_shape(bucket).frozen
        norms = tuple(0.0 if key in frozen else norm for key, norm in enumerate(found.norms))
        told = marks.read(told_of, self._widths(bucket), self.exchange.per_step)
        losses = {mb: loss for mb, (loss, *_) in enumerate(told[head].losses)} if head in told else {}
        routers = {use: self._router_told(of) for use, of in told.items() if of.integers}
        num_chunks = len(means.slicing.chunks(means.slicing.all))
        squares = figures[len(figures) - num_chunks :]
        return ReadFigures(found._replace(norms=norms), losses, routers, squares)

    def _router_told(self, told: marks.ToldOfUse) -> RouterTold:
        # Beside the loss of the step and no part of it: that is what runs are compared by. (D-routers-002)
        mean = self.weights_of(self.step).mean
        aux_loss, z_loss = (mean(dict(enumerate(each))) for each in zip(*told.losses, strict=True))
        return RouterTold(aux_loss, z_loss, told.integers)


def _figures_of(told: RouterTold) -> RouterFigures:
    mean = sum(told.tokens) / len(told.tokens)
    return RouterFigures(told.aux_loss, told.z_loss, max(told.tokens) / mean, told.tokens.count(0))


_NOTHING = sums.BucketFigures(nan=False, overflow=False, changed=False, norms=(), exponents=())
