"""Estimates how far the devices are in a step at a moment of it, and so what they answer to a report.

Owns the estimate: in 1F1B with equal stages every pass of every micro-batch ends at a known share of the step
(``_Pace``), and so it is taken to be for stages that are not quite equal. A forward is a third of a
micro-batch, and less where blocks are computed again. Only micro-batches that the dead had a part in are told
of, since a decision asks for no others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from oobleckd.planner.costs.recompute import recomputed
from oobleckd.planner.plan import FORWARD, NOTHING, WEIGHTS, HopState, Layout, Range, Route, Segment
from oobleckd.planner.profile import Profile
from oobleckd.protocol.messages import Progress

_FORWARD = 1 / 3  # of a forward and a backward, where nothing is computed again

ForwardShare = Callable[[Sequence[Segment]], float]
"""Of hops of a micro-batch: the share of its time that is forward."""


def a_third(_segments: Sequence[Segment]) -> float:
    """The share where nothing is computed again."""
    return _FORWARD


def forward_share(layout: Layout, profile: Profile) -> ForwardShare:
    """As the devices of ``layout`` compute: where one of a route computes again, the share that ``profile``
    has.
    """
    # Elsewhere a third, as runs that are published had it, although a profile's is not quite that.
    if not layout.recompute:
        return a_third

    def share(segments: Sequence[Segment]) -> float:
        forward_s = backward_s = 0.0
        for segment in segments:
            costs = recomputed(profile, layout.recompute.get(segment.device, "none")).profile
            for layer in segment.layers.layers():
                forward_s += costs.layers[layer].forward_s
                backward_s += costs.layers[layer].backward_s
        again = any(segment.device in layout.recompute for segment in segments)
        return forward_s / (forward_s + backward_s) if again and forward_s else _FORWARD

    return share


class Moment(msgspec.Struct, frozen=True):
    """``told``: what all of them answer. ``share`` of the normal time of the round's passes is over.
    ``kept``: what was sent is kept until the commit; without it no route is mended. ``nothing``: all that was
    done is lost.
    """

    told: Progress
    share: float
    kept: bool = True
    nothing: bool = False


class _Pace(msgspec.Struct, frozen=True):
    """Micro-batch number ``index`` of the ``count`` of a pipeline of ``stages``; ``forward_share`` of each is
    its forward.
    """

    index: int
    count: int
    stages: int
    forward_share: float = _FORWARD

    @property
    def _makespan(self) -> float:
        return float(self.count + self.stages - 1)

    def backward(self, position: int) -> float:
        """The share of the step after which hop ``position`` has its weight gradients."""
        ahead = self.stages - position
        forward = self.forward_share
        return (self.stages * forward + ahead * (1 - forward) + self.index) / self._makespan

    def forward(self, position: int) -> float:
        """The share after which it has sent its activations on."""
        ahead = self.stages - position
        if self.index < ahead:
            return (position + self.index + 1) * self.forward_share / self._makespan
        before = msgspec.structs.replace(self, index=self.index - ahead)
        return before.backward(position) + self.forward_share / self._makespan


class SimulatedEnd(msgspec.Struct, frozen=True):
    """A hop of ``micro_batch`` has its weight gradients at ``at_s`` of a step."""

    at_s: float
    micro_batch: int
    layers: Range


def ends(
    layout_routes: Sequence[Route],
    standing: Sequence[Route],
    step_s: float,
    forward_of: ForwardShare = a_third,
) -> Mapping[str, Sequence[SimulatedEnd]]:
    """Device -> its hops in ``standing``, routes of a step of ``step_s``, as they end."""
    paces = _paces(layout_routes, {route.micro_batch for route in standing}, forward_of)
    found: defaultdict[str, list[SimulatedEnd]] = defaultdict(list)
    for route in standing:
        pace = msgspec.structs.replace(paces[route.micro_batch], stages=len(route.segments))
        for position, segment in enumerate(route.segments):
            ended = SimulatedEnd(pace.backward(position) * step_s, route.micro_batch, segment.layers)
            found[segment.device].append(ended)
    for hops in found.values():
        hops.sort(key=lambda hop: (hop.at_s, hop.micro_batch))
    return found


def answers(
    moment: Moment,
    layout_routes: Sequence[Route],
    standing: Sequence[Route],
    dead: Collection[str],
    survivors: Sequence[str],
    inherited: Mapping[str, Mapping[int, Sequence[int]]],
    forward_of: ForwardShare = a_third,
) -> dict[str, Progress]:
    """What every one of ``survivors`` answers. ``standing``: who computes which micro-batch in this round.
    ``inherited``: survivor -> layer -> micro-batches of the dead that are in its sums.
    """
    done: dict[str, dict[int, list[int]]] = {}
    hops: dict[str, list[HopState]] = {}
    if not (moment.told.holding or moment.nothing):
        lost = frozenset(dead)
        hit = [route for route in standing if route.touches(lost)]
        paces = _paces(layout_routes, {route.micro_batch for route in hit}, forward_of)
        for route in hit:
            _tell(moment, route, paces[route.micro_batch], lost, done, hops)
        for device, layers in inherited.items():
            for layer, micro_batches in layers.items():
                done.setdefault(device, {}).setdefault(layer, []).extend(micro_batches)
    return {
        device: msgspec.structs.replace(
            moment.told,
            device=device,
            done={layer: tuple(which) for layer, which in sorted(done.get(device, {}).items())},
            hops=tuple(hops.get(device, ())),
        )
        for device in survivors
    }


def _paces(routes: Sequence[Route], wanted: Collection[int], forward_of: ForwardShare) -> dict[int, _Pace]:
    """Micro-batch -> its place among those of its pipeline, of all pipelines that have one of ``wanted``."""
    hit = {route.segments for route in routes if route.micro_batch in wanted}
    ends = {(segments[0], segments[-1]) for segments in hit}  # few of thousands need be compared whole
    pipelines: dict[tuple[Segment, ...], list[int]] = {}
    for route in routes:
        if (route.segments[0], route.segments[-1]) in ends and route.segments in hit:
            pipelines.setdefault(route.segments, []).append(route.micro_batch)
    return {
        micro_batch: _Pace(index, len(share), len(segments), forward)
        for segments, share in pipelines.items()
        for forward in (forward_of(segments),)
        for index, micro_batch in enumerate(sorted(share))
    }


def _tell(
    moment: Moment,
    route: Route,
    pace: _Pace,
    dead: frozenset[str],
    done: dict[str, dict[int, list[int]]],
    hops: dict[str, list[HopState]],
) -> None:
    """Add what the survivors on ``route`` have of it."""
    pace = msgspec.structs.replace(pace, stages=len(route.segments))
    reached = [_reached(moment.share, pace, position) for position in range(len(route.segments))]
    last = len(reached) - 1
    for position, segment in enumerate(route.segments):
        if segment.device in dead:
            continue
        here = reached[position]
        if here == NOTHING:
            has_input = position == 0 or reached[position - 1] >= FORWARD
        else:
            has_input = position == last or reached[position + 1] == WEIGHTS
        state = HopState(
            route.micro_batch,
            route.attempt,
            position,
            here,
            has_input,
            has_output=moment.kept and here >= FORWARD,
            has_gradient=moment.kept and here == WEIGHTS,
        )
        hops.setdefault(segment.device, []).append(state)
        if here == WEIGHTS:
            for layer in segment.layers.layers():
                done.setdefault(segment.device, {}).setdefault(layer, []).append(route.micro_batch)


def _reached(share: float, pace: _Pace, position: int) -> int:
    if share >= pace.backward(position):
        return WEIGHTS
    return FORWARD if share >= pace.forward(position) else NOTHING
