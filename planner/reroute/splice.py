"""Makes routes that go on where a dead stage left off: its hops alone are replaced, and the others keep what
they did.

The inputs of a stage are in the boundary caches of those who sent them (activations and gradients), so the
survivors of a micro-batch's route need not compute anything again: who sent an activation or a gradient to
the dead stage sends it once more to whoever takes its place. That is the redundant holder where one lives,
which goes on from the forward pass if it ran that ahead. Where a peer has a copy of the dead stage's sums
(``oobleckd.worker.round.sum_copies``) its hop may have nothing left to do. Owns whether that is possible and
who takes the place. Does not own what is missing (the recovery decision knows), nor routes from the embedding
(``reroute``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from oobleckd.planner.plan import BACKWARD, FORWARD, NOTHING, WEIGHTS, HopState, Range, Route, Segment
from oobleckd.planner.reroute.reroute import Rerouting

_NEW = HopState(-1, -1, -1, NOTHING)
_SPARED = HopState(-1, -1, -1, WEIGHTS)


class _Hop(msgspec.Struct, frozen=True):
    """``given``: it was a dead device's, and is in new hands."""

    segment: Segment
    state: HopState
    given: bool = False


class _Old(NamedTuple):
    """A hop as it was: what is known of it (None: its device is dead), and who is its heir ("": nobody in
    particular).
    """

    position: int
    segment: Segment
    hop: _Hop | None
    heir: str


def spliced(
    rerouting: Rerouting,
    standing: Route,
    dead: Collection[str],
    states: Mapping[tuple[str, int], HopState],
    missing: Sequence[int],
    attempt: int,
) -> Route | None:
    """``standing`` with its dead hops replaced, or None where too little was kept for that.

    ``states``: (device, position) -> its hop of the micro-batch, be it one that it ran ahead redundantly, for
    another device. ``missing``: layers whose weight gradients no survivor has. The work of the new hops is
    added to ``rerouting``'s load.
    """
    old = [
        _Hop(s, states[s.device, at]) if (s.device, at) in states and s.device not in dead else None
        for at, s in enumerate(standing.segments)
    ]
    if not _all_known(standing, dead, old):
        return None
    mask = tuple(sorted(missing))
    hops = _replaced(rerouting, standing, old, states, mask)
    if hops is None:
        return None
    hops = _without_idle(hops, mask)
    if not _all_given(hops, mask[0]):
        return None
    for hop in hops:
        if hop.given and hop.state is not _SPARED:
            rerouting.charge(hop.segment, mask)
    segments, reached = tuple(hop.segment for hop in hops), tuple(hop.state.reached for hop in hops)
    return Route(standing.micro_batch, attempt, segments, mask, standing.attempt, reached, _redone(hops))


def _replaced(
    rerouting: Rerouting,
    standing: Route,
    old: Sequence[_Hop | None],
    states: Mapping[tuple[str, int], HopState],
    mask: tuple[int, ...],
) -> list[_Hop] | None:
    """The hops with somebody alive in every place; None where nobody can be."""
    known = [
        _Old(at, s, hop, "" if hop is not None else rerouting.heir(standing, s.layers) or "")
        for at, (s, hop) in enumerate(zip(standing.segments, old, strict=True))
    ]
    rest = [segment.device for segment, hop in zip(standing.segments, old, strict=True) if hop is not None]
    hops: list[_Hop] = []
    for (is_dead, has_heir), group in groupby(known, lambda each: (each.hop is None, bool(each.heir))):
        run = list(group)
        if not is_dead:
            hops += [each.hop for each in run if each.hop is not None]
        elif has_heir:
            hops += [_inherited(each, standing.attempt, states) for each in run]
        else:
            layers = Range(run[0].segment.layers.start, run[-1].segment.layers.stop)
            found = rerouting.path(layers, mask, without=rest)
            if found is None:
                return None
            hops += [_Hop(segment, _NEW, given=True) for segment in found]
    return hops


def _inherited(old: _Old, attempt: int, states: Mapping[tuple[str, int], HopState]) -> _Hop:
    """``old`` in its heir's hands, with the forward pass if the heir has run that."""
    ran = states.get((old.heir, old.position), _NEW)
    return _Hop(Segment(old.heir, old.segment.layers), ran if ran.attempt == attempt else _NEW, given=True)


def _without_idle(hops: Sequence[_Hop], mask: tuple[int, ...]) -> list[_Hop]:
    """Hops in new hands have nothing to do where somebody has the dead's sums, and both neighbours what they
    were given.
    """
    found: list[_Hop] = []
    for given, group in groupby(hops, lambda hop: hop.given):
        run = list(group)
        before = found[-1] if found else None
        after = next((hop for hop in hops[len(found) + len(run) :]), None)
        wanted = any(layer in mask for hop in run for layer in hop.segment.layers.layers())
        lacks = after is not None and not _was_given(after.state)
        waits = before is not None and _waits(before, mask[0])
        if given and not (wanted or lacks or waits):
            run = [_Hop(hop.segment, _SPARED, given=True) for hop in run]
        found += run
    return found


def _waits(hop: _Hop, lowest: int) -> bool:
    """Whether it has yet to be sent a gradient."""
    return not _was_given_back(hop.state) and lowest < hop.segment.layers.stop


def _redone(hops: Sequence[_Hop]) -> tuple[int, ...]:
    """Of each hop what the dead had done of it, by what their neighbours have.

    Forward, if the hop behind got the activations; gradients, if the one in front got them, or where there is
    none, if the one behind had sent its own. What nobody can have seen was done, too.
    """
    redone = []
    for position, hop in enumerate(hops):
        if not hop.given or hop.state is _SPARED:
            redone.append(NOTHING)
            continue
        before = next((h.state for h in reversed(hops[:position]) if not h.given), None)
        after = next((h.state for h in hops[position + 1 :] if not h.given), None)
        forward = _was_given(after) if after is not None else before is None or before.reached >= FORWARD
        back = after is None or after.reached >= BACKWARD
        gradients = _was_given_back(before) if before is not None else forward and back
        redone.append(BACKWARD if gradients else FORWARD if forward else NOTHING)
    return tuple(redone)


def _was_given(state: HopState) -> bool:
    return state.reached >= FORWARD or state.has_input


def _was_given_back(state: HopState) -> bool:
    return state.reached >= BACKWARD or (state.reached == FORWARD and state.has_input)


def _all_known(standing: Route, dead: Collection[str], old: Sequence[_Hop | None]) -> bool:
    """Whether every survivor of the route told of it, and of this attempt."""
    for position, (segment, hop) in enumerate(zip(standing.segments, old, strict=True)):
        if (hop is None) != (segment.device in dead):
            return False
        if hop is not None and (hop.state.attempt, hop.state.position) != (standing.attempt, position):
            return False
    return True


def _all_given(hops: Sequence[_Hop], lowest: int) -> bool:
    """Whether every hop will get what it still waits for: from work to come, or because it was kept."""
    for before, after in pairwise(hops):
        if before.state.reached >= FORWARD and after.state.reached == NOTHING and not before.state.has_output:
            return False
        if _waits(before, lowest) and after.state.reached >= BACKWARD and not after.state.has_gradient:
            return False
    return True
