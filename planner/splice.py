"""Routes that go on where a dead stage left off: its hops alone are replaced, and the others keep what they did.

What a stage was given is kept by those who gave it (boundary activations and gradients), so the survivors of a
micro-batch's route need not compute anything again: who sent an activation or a gradient to the dead stage
sends it once more to whoever takes its place. Owns whether that is possible and who takes the place. Does not own what is
missing (the recovery decision knows), nor routes from the embedding (``reroute``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec

from planner.plan import BACKWARD, FORWARD, NOTHING, HopState, Range, Route, Segment
from planner.reroute import Rerouting

_NEW = HopState(-1, -1, -1, NOTHING)


class _Hop(msgspec.Struct, frozen=True):
    segment: Segment
    state: HopState


def spliced(
    rerouting: Rerouting,
    standing: Route,
    dead: Collection[str],
    states: Mapping[tuple[str, int], HopState],
    missing: Sequence[int],
    attempt: int,
) -> Route | None:
    """``standing`` with its dead hops replaced, or None where too little was kept for that.

    ``states``: (device, position) -> its hop of the micro-batch. ``missing``: layers whose weight gradients no survivor has. The work of the new
    hops is added to ``rerouting``'s load.
    """
    old = [
        _Hop(s, states[s.device, at]) if (s.device, at) in states and s.device not in dead else None
        for at, s in enumerate(standing.segments)
    ]
    if not _all_known(standing, dead, old):
        return None
    mask = tuple(sorted(missing))
    hops: list[_Hop] = []
    rest = [segment.device for segment in standing.segments if segment.device not in dead]
    for is_dead, group in groupby(zip(standing.segments, old, strict=True), lambda pair: pair[1] is None):
        run = list(group)
        if not is_dead:
            hops += [hop for _, hop in run if hop is not None]
            continue
        layers = Range(run[0][0].layers.start, run[-1][0].layers.stop)
        found = rerouting.path(layers, mask, without=rest)
        if found is None:
            return None
        hops += [_Hop(segment, _NEW) for segment in found]
    if not _all_given(hops, mask[0]):
        return None
    for hop in hops:
        if hop.state is _NEW:
            rerouting.charge(hop.segment, mask)
    segments, reached = tuple(hop.segment for hop in hops), tuple(hop.state.reached for hop in hops)
    return Route(standing.micro_batch, attempt, segments, mask, standing.attempt, reached, _redone(hops))


def _redone(hops: Sequence[_Hop]) -> tuple[int, ...]:
    """Of each hop what the dead had done of it, by what their neighbours have.

    Forward, if the hop behind got the activations; gradients, if the one in front got them, or where there is none, if
    the one behind had sent its own. What nobody can have seen was done, too.
    """
    redone = []
    for position, hop in enumerate(hops):
        if hop.state is not _NEW:
            redone.append(NOTHING)
            continue
        before = next((h.state for h in reversed(hops[:position]) if h.state is not _NEW), None)
        after = next((h.state for h in hops[position + 1 :] if h.state is not _NEW), None)
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
        waits = before.state.reached < BACKWARD and lowest < before.segment.layers.stop
        if waits and after.state.reached >= BACKWARD and not after.state.has_gradient:
            return False
    return True
