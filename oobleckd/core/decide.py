"""What the survivors of a loss do with the round they are in: commit it, or repair it.

Owns the rule of docs/recovery.md ("A failure", 3) as one pure function of the answers, the layout and the
dead, so that it can be asked again at any time, also by a restarted daemon. Does not own who is dead
(``membership``), who is told (``recovery``) or which way a route takes (``planner.reroute``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from oobleckd.protocol.messages import Progress
from oobleckd.protocol.parts import Flags, Vote
from planner.plan import NOTHING, HopState, Layout, Route
from planner.reroute import Rerouting
from planner.splice import spliced


class LostLayers(msgspec.Struct, frozen=True):
    """No live device holds ``layers``: the job goes back to its last checkpoint."""

    layers: tuple[int, ...]


class Decision(msgspec.Struct, frozen=True):
    """The content of a ``Decide``; its fields are explained there."""

    round: int
    commit: Vote | None = None
    routes: tuple[Route, ...] = ()
    donors: dict[int, str] = {}
    hold: bool = False
    hold_now: bool = False


Verdict = LostLayers | Decision


def decide(
    epoch: int,
    progress: Mapping[str, Progress],
    layout: Layout,
    dead: Collection[str],
    buckets: Sequence[tuple[int, ...]],
    num_micro_batches: int,
) -> Verdict:
    """The verdict over the round that ``progress`` (device -> its answer, of every survivor) shows.

    ``dead`` is cumulative over ``layout``; empty for a resync. ``buckets[b]``: the layers that use bucket
    ``b``. The new attempts are numbered ``epoch``.
    """
    lost = tuple(layer for layer, copies in enumerate(layout.copies(dead)) if copies == 0)
    if lost:
        return LostLayers(lost)
    assert set(progress) == set(layout.holdings) - set(dead), "an answer of every survivor is needed"
    assert len(layout.routes) == num_micro_batches, "every micro-batch has a standing route"
    lowest = min(answer.counters.round for answer in progress.values())
    ahead = {d: progress[d] for d in sorted(progress) if progress[d].counters.round > lowest}
    assert all(answer.counters.round == lowest + 1 for answer in ahead.values()), "more than a round apart"
    if ahead:
        commit = _union(answer.last for answer in ahead.values())
        if any(answer.holding for answer in ahead.values()):
            return Decision(lowest + 1, commit, hold=True, hold_now=True)
        routes, donors = _repair(epoch, ahead, layout, dead, buckets)
        return Decision(lowest + 1, commit, routes, donors, hold=bool(dead))
    here = {device: progress[device] for device in sorted(progress)}
    if all(answer.vote is not None for answer in here.values()):
        commit = _union(answer.vote for answer in here.values())
        return Decision(lowest + 1, commit, hold=True, hold_now=True)
    if _stays_held(here, dead):
        return Decision(lowest, hold=True, hold_now=True)
    routes, donors = _repair(epoch, here, layout, dead, buckets)
    return Decision(lowest, None, routes, donors, hold=bool(dead))


def _stays_held(here: Mapping[str, Progress], dead: Collection[str]) -> bool:
    """Whether nobody is to begin the round.

    Some hold and some do not when a ``Resume`` reached only a part of them. After a loss those who
    hold join the repair, so that nothing that the others computed is thrown away.
    """
    holding = [answer.holding for answer in here.values()]
    return all(holding) if dead else any(holding)


def _repair(
    epoch: int,
    inside: Mapping[str, Progress],
    layout: Layout,
    dead: Collection[str],
    buckets: Sequence[tuple[int, ...]],
) -> tuple[tuple[Route, ...], dict[int, str]]:
    """New attempts and donors; ``inside`` are the survivors in the round (the others have nothing of it)."""
    donors: dict[int, str] = {}
    for device in sorted(inside):
        for bucket in inside[device].reduced:
            donors.setdefault(bucket, device)
    needed = [
        layer
        for layer in range(layout.num_layers)
        if any(layer in uses and bucket not in donors for bucket, uses in enumerate(buckets))
    ]
    done = {
        layer: frozenset(mb for answer in inside.values() for mb in answer.done.get(layer, ()))
        for layer in needed
    }
    frozen = [route.micro_batch for route in layout.routes if route.touches(dead)]
    missing = {mb: tuple(layer for layer in needed if mb not in done[layer]) for mb in frozen}
    rerouting, states = Rerouting(layout, dead), _hops(inside)
    routes = []
    for route in layout.routes:
        if layers := missing.get(route.micro_batch):
            known = _untouched(route, inside) | states.get(route.micro_batch, {})
            found = spliced(rerouting, route, dead, known, layers, epoch)
            routes.append(found or rerouting.whole(route.micro_batch, layers, epoch))
    return tuple(routes), dict(sorted(donors.items()))


def _hops(inside: Mapping[str, Progress]) -> dict[int, dict[str, HopState]]:
    """Micro-batch -> device -> how far it is there."""
    states: dict[int, dict[str, HopState]] = {}
    for device, answer in inside.items():
        for hop in answer.hops:
            states.setdefault(hop.micro_batch, {})[device] = hop
    return states


def _untouched(route: Route, inside: Collection[str]) -> dict[str, HopState]:
    """Hops on devices that have yet to begin the round."""
    return {
        segment.device: HopState(route.micro_batch, route.attempt, position, NOTHING)
        for position, segment in enumerate(route.segments)
        if segment.device not in inside
    }


def _union(votes: Iterable[Vote | None]) -> Vote:
    """All that votes of one round say together; replicas agree, so the first word stands."""
    norms: dict[int, tuple[float, ...]] = {}
    losses: dict[int, float] = {}
    nan = overflow = hold = checkpoint = False
    for vote in votes:
        assert vote is not None, "a device past a round knows the votes that it committed with"
        for bucket, values in vote.norms.items():
            norms.setdefault(bucket, values)
        for micro_batch, loss in vote.losses.items():
            losses.setdefault(micro_batch, loss)
        nan |= vote.nan
        overflow |= vote.overflow
        hold |= vote.flags.hold
        checkpoint |= vote.flags.checkpoint
    return Vote(
        dict(sorted(norms.items())), dict(sorted(losses.items())), nan, overflow, Flags(hold, checkpoint)
    )
