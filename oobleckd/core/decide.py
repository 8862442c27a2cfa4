"""Decides what the survivors of a loss do with the round they are in: commit it, or repair it.

Owns the rule of docs/recovery.md ("A failure", 3) as one pure function of the answers, the layout and the
dead, so that it can be asked again at any time, also by a restarted daemon; and from when on detours stand
where the job goes on without its dead ("Re-routed"). Does not own who is dead (``membership``), who is told
(``recovery``) or which way a route takes (``oobleckd.planner.reroute.reroute``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from oobleckd.planner.plan import NOTHING, Detours, HopState, Layout, Route
from oobleckd.planner.reroute.reroute import Rerouting, detour
from oobleckd.planner.reroute.splice import spliced
from oobleckd.protocol import corruption
from oobleckd.protocol.corruption import Odd, shard_number
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.messages import Decide, Progress
from oobleckd.protocol.parts import Counters, Vote, outcome_of


class LostLayers(msgspec.Struct, frozen=True):
    """No live device holds ``layers``: the job rolls back to its last checkpoint."""

    layers: tuple[int, ...]


class Decision(msgspec.Struct, frozen=True):
    """The content of a ``Decide``; its fields are explained there. ``detours``: new ones, if
    there are any.
    """

    round: int
    commit: Vote | None = None
    routes: tuple[Route, ...] = ()
    donors: dict[int, dict[str, int]] = {}
    hold: bool = False
    hold_now: bool = False
    detours: Detours | None = None

    def told(self, device: str, epoch: int, detours: Detours | None) -> Decide:
        """It for ``device``, with all ``detours`` in force, as the device may have missed those before."""
        return Decide(
            device=device,
            epoch=epoch,
            round=self.round,
            commit=self.commit,
            routes=self.routes,
            donors=self.donors,
            hold=self.hold,
            hold_now=self.hold_now,
            detours=detours,
        )


class Disagreement(msgspec.Struct, frozen=True):
    """Survivors have different bits where they must not: the round of ``counters`` cannot be trusted."""

    counters: Counters
    odds: tuple[Odd, ...]


Verdict = LostLayers | Disagreement | Decision


class Standing(msgspec.Struct, frozen=True):
    """What stands in a job that has lost devices before. ``detours`` are in force, and ``settled`` the dead
    that they, or nothing more, take care of. ``go_on``: the job goes on without those who are dead now, too.
    """

    detours: Detours | None = None
    settled: tuple[str, ...] = ()
    go_on: bool = False


AS_DEPLOYED = Standing()


def decide(
    epoch: int,
    progress: Mapping[str, Progress],
    layout: Layout,
    dead: Collection[str],
    buckets: Sequence[tuple[int, ...]],
    evaluation: EvalRounds,
    standing: Standing = AS_DEPLOYED,
) -> Verdict:
    """The verdict over the round that ``progress`` (device -> its answer, of every survivor) shows.

    ``dead`` is cumulative over ``layout``; empty for a resync. ``buckets[b]``: the layers that use bucket
    ``b``; ``evaluation``: which rounds evaluate. The new attempts are numbered ``epoch``.
    """
    if lost := layout.lost(dead):
        return LostLayers(lost)
    assert set(progress) == set(layout.holdings) - set(dead), "an answer of every survivor is needed"
    assert len(layout.routes) == evaluation.per_step, "every micro-batch has a standing route"
    lowest = min(answer.counters.round for answer in progress.values())
    ahead = {d: progress[d] for d in sorted(progress) if progress[d].counters.round > lowest}
    assert all(answer.counters.round == lowest + 1 for answer in ahead.values()), "more than a round apart"
    here = {device: progress[device] for device in sorted(progress)}
    case = _Case(epoch, layout, frozenset(dead), buckets, evaluation, standing)
    # Somebody is past the round, so it had the votes of all, and the round commits for everybody: the same
    # step, as gradients of intact pipelines are valid. (D-recovery-001)
    if ahead:
        commit = Vote.union(_known(answer.last) for answer in ahead.values())
        stop = any(answer.holding for answer in ahead.values())
        return case.decision(next(iter(ahead.values())).counters, commit, ahead, stop=stop)
    now = next(iter(here.values())).counters
    if all(answer.vote is not None for answer in here.values()):
        votes = _own_votes(here, layout, buckets)
        if not corruption.agree(votes):
            return Disagreement(now, corruption.odds(votes))
        commit = Vote.union(_known(answer.vote) for answer in here.values())
        following = now.after(outcome_of(commit, evaluates=evaluation.evaluates(now)))
        return case.decision(following, commit, {}, stop=not standing.go_on or commit.flags.hold)
    return case.decision(now, None, here, stop=_stays_held(here, case.fresh))


def _own_votes(
    here: Mapping[str, Progress], layout: Layout, buckets: Sequence[tuple[int, ...]]
) -> dict[str, Vote]:
    """What each device says of the buckets that it holds itself, or of its shards of them. Its answer has
    more, which it has heard of others.
    """
    own = {}
    for device, answer in here.items():
        held = frozenset(layout.holdings[device].layers())
        mine = {bucket for bucket, uses in enumerate(buckets) if not held.isdisjoint(uses)}
        assert answer.vote is not None, "asked where all have voted"
        norms = {bucket: values for bucket, values in answer.vote.norms.items() if bucket in mine}
        shards = {shard_number(bucket, layout.rank(device), len(buckets)) for bucket in mine}
        digests = {shard: digest for shard, digest in answer.vote.digests.items() if shard in shards}
        own[device] = msgspec.structs.replace(answer.vote, norms=norms, digests=digests)
    return own


def _stays_held(here: Mapping[str, Progress], fresh: Collection[str]) -> bool:
    """Whether nobody is to begin the round.

    Some hold and some do not when a ``Resume`` reached only a part of them. After a loss (``fresh``: of
    these) those who hold join the repair, so that nothing that the others computed is thrown away.
    """
    holding = [answer.holding for answer in here.values()]
    return all(holding) if fresh else any(holding)


class _Case(msgspec.Struct, frozen=True):
    """What the verdict is made from besides the answers."""

    epoch: int
    layout: Layout
    dead: frozenset[str]
    buckets: Sequence[tuple[int, ...]]
    evaluation: EvalRounds
    standing: Standing

    @property
    def unable(self) -> frozenset[str]:
        """Devices that no route may touch: the dead, and who shares a stage with one of them."""
        return self.layout.unable(self.dead)

    @property
    def fresh(self) -> frozenset[str]:
        """The dead whom nothing takes care of yet."""
        return self.dead - frozenset(self.standing.settled)

    def decision(
        self, counters: Counters, commit: Vote | None, inside: Mapping[str, Progress], *, stop: bool
    ) -> Decision:
        """The round of ``counters`` goes on; ``inside`` it are these survivors (the others have nothing of
        it). ``stop``: nobody begins it now.
        """
        round_ = counters.round
        if not self.fresh:
            return Decision(round_, commit, *self.repair(counters, inside), hold=stop, hold_now=stop)
        if self.standing.go_on:
            repair, detours = self.repair(counters, inside), self.detours(round_)
            return Decision(round_, commit, *repair, hold=stop, hold_now=stop, detours=detours)
        if stop:
            return Decision(round_, commit, hold=True, hold_now=True)  # a new layout follows
        return Decision(round_, commit, *self.repair(counters, inside), hold=True)

    def detours(self, round_: int) -> Detours:
        """Around the dead from the round after ``round_`` on, in which attempts repair what they had."""
        # A device that missed a decision and one that did not may be in the same round: both must freeze
        # the same micro-batches there. (D-recovery-006)
        before = self.standing.detours.standing(round_) if self.standing.detours is not None else ()
        # From the next round on, in every case: a device may have done a part of this one, and only
        # attempts with masks count nothing twice. It costs a round in which some layers are computed
        # without the cap. (D-recovery-005)
        return Detours(round_ + 1, detour(self.layout, self.unable, self.epoch), before)

    def repair(
        self, counters: Counters, inside: Mapping[str, Progress]
    ) -> tuple[tuple[Route, ...], dict[int, dict[str, int]]]:
        """New attempts in the round of ``counters``, and donors. Of one that evaluates the head's losses are
        all that can be missing, of the micro-batches that it has.
        """
        evaluates = self.evaluation.evaluates(counters)
        buckets = ((self.layout.num_layers - 1,),) if evaluates else self.buckets
        donors = _donors(inside)
        needed = [
            layer
            for layer in range(self.layout.num_layers)
            if any(layer in uses and bucket not in donors for bucket, uses in enumerate(buckets))
        ]
        done = {
            layer: frozenset(mb for answer in inside.values() for mb in answer.done.get(layer, ()))
            for layer in needed
        }
        routes = self.evaluation.routes(self.layout, self.standing.detours, counters)
        unable = self.unable
        frozen = [route.micro_batch for route in routes if route.touches(unable)]
        missing = {mb: tuple(layer for layer in needed if mb not in done[layer]) for mb in frozen}
        rerouting = Rerouting(msgspec.structs.replace(self.layout, routes=routes), unable)
        states = _hops(inside)
        attempts = []
        for route in routes:
            if layers := missing.get(route.micro_batch):
                # Dead hops are replaced in the route where neighbours kept what they had sent; else all
                # behind the dead stage would be done again. (D-recovery-011)
                known = _untouched(route, inside) | states.get(route.micro_batch, {})
                found = spliced(rerouting, route, unable, known, layers, self.epoch)
                attempts.append(found or rerouting.whole(route.micro_batch, layers, self.epoch))
        return tuple(attempts), donors


def _donors(inside: Mapping[str, Progress]) -> dict[int, dict[str, int]]:
    """From whom everybody takes which means, of the buckets of which survivors together have all."""
    holders: dict[int, list[str]] = {}
    for device in sorted(inside):
        for bucket in inside[device].reduced:
            holders.setdefault(bucket, []).append(device)
    found = ((bucket, _shares(bucket, inside, holders[bucket])) for bucket in sorted(holders))
    # Where a slice is missing the layer is computed again, and with it what the others are made of: they are
    # made anew, to the same bits. (D-exactness-023)
    return {bucket: shares for bucket, shares in found if shares}


def _shares(bucket: int, inside: Mapping[str, Progress], holders: Sequence[str]) -> dict[str, int]:
    """Device -> slices of ``bucket`` that it gives; nothing where ``holders`` together do not have all."""
    shares: dict[str, int] = {}
    whole = inside[holders[0]].reduced[bucket][1]
    left = whole
    # Who has most first: the fewest give, most often one.
    for device in sorted(holders, key=lambda device: -inside[device].reduced[bucket][0].bit_count()):
        if give := inside[device].reduced[bucket][0] & left:
            shares[device] = give
            left &= ~give
    return {} if left else dict(sorted(shares.items()))


def _hops(inside: Mapping[str, Progress]) -> dict[int, dict[tuple[str, int], HopState]]:
    """Micro-batch -> (device, position) -> how far it is there."""
    states: dict[int, dict[tuple[str, int], HopState]] = {}
    for device, answer in inside.items():
        for hop in answer.hops:
            states.setdefault(hop.micro_batch, {})[device, hop.position] = hop
    return states


def _untouched(route: Route, inside: Collection[str]) -> dict[tuple[str, int], HopState]:
    """Hops on devices that have yet to begin the round."""
    return {
        (segment.device, position): HopState(route.micro_batch, route.attempt, position, NOTHING)
        for position, segment in enumerate(route.segments)
        if segment.device not in inside
    }


def _known(vote: Vote | None) -> Vote:
    assert vote is not None, "a device past a round knows the votes that it committed with"
    return vote
