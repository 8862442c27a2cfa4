"""Makes routes for micro-batches that lost a device, over whoever is alive (SlipStream, section 4).

Owns the choice of hops: of attempts that repair a round (``reroute``), and of routes that stand from then on
(``detour``). Does not own which layers are missing (the recovery decision knows) nor when a device computes
what (the worker walks its tasks ready-first).

A route covers every layer, because the forward pass must reach the loss; only the layers in its mask
add weight gradients. Work is counted in layer passes: 1 for a forward, 1 for the gradient that flows
through (from the lowest missing layer upwards), 1 for the weight gradients (missing layers); where a device
computes its blocks again before their gradients, 1 more for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby

import msgspec

from oobleckd.planner.plan import Layers, Layout, Plan, Range, Route, Segment
from oobleckd.planner.policy import PlanError
from oobleckd.planner.reroute.redundant import heir
from oobleckd.planner.reroute.ways import FULL_PASS, Ways, without_returns

Chosen = Iterator[tuple[int, tuple[Segment, ...]]]
"""Micro-batches with their hops; one after the other, so that each counts those before it."""


def reroute(
    layout: Layout, dead: Collection[str], missing: Mapping[int, tuple[int, ...]], attempt: int
) -> tuple[Route, ...]:
    """A new route over live holders for every micro-batch of ``missing`` with a missing layer.

    ``dead``: devices. ``missing``: micro-batch -> layers whose weight gradients no survivor has; a
    micro-batch without any gets no route. Each route is cheap in hops and in the work of its busiest
    device, which counts the live standing routes and the routes made before it; so the micro-batches
    spread over the live pipelines. Deterministic. Raises PlanError if a layer has no live holder.
    """
    rerouting = Rerouting(layout, dead)
    return tuple(
        rerouting.whole(micro_batch, layers, attempt)
        for micro_batch, layers in sorted(missing.items())
        if layers
    )


class Rerouting:
    """Routes made one after the other for one loss: each counts the work of those before it. ``load``: live
    device -> layer passes of a step.
    """

    def __init__(self, layout: Layout, dead: Collection[str]) -> None:
        lost = frozenset(dead)
        _check_holders(layout, lost)
        self._layout, self._lost = layout, lost
        self._own = {route.micro_batch: route for route in layout.routes} if layout.redundant else {}
        self._depth = max((len(route.segments) for route in layout.routes), default=1)
        self._again = frozenset(d for d, mode in layout.recompute.items() if mode == "blocks")
        self.load = {device: 0 for device in sorted(layout.holdings) if device not in lost}
        for route in layout.routes:
            if not route.touches(lost):
                self.carry(route.segments, 1)
        self._ways: dict[tuple[Range, frozenset[str]], Ways] = {}

    def heir(self, route: Route, layers: Range) -> str | None:
        """Who takes over a dead device's hop of ``route`` without having been asked: a live redundant holder
        of it, if there is one.
        """
        return heir(route, layers, self._layout.redundant, self._lost)

    def whole(self, micro_batch: int, missing: Sequence[int], attempt: int) -> Route:
        """From the embedding to the loss; ``missing``: the layers whose weight gradients it adds. Where
        redundant holders of all dead hops of its standing route live it is that route with them in their
        places.
        """
        mask = tuple(sorted(missing))
        own = self._own.get(micro_batch)
        segments = inherited(self._layout, own, self._lost) if own else None
        segments = segments or self.path(Range(0, self._layout.num_layers), mask)
        assert segments is not None, "every layer has a holder"
        for segment in segments:
            self.charge(segment, mask)
        return Route(micro_batch, attempt, segments, mask)

    def path(
        self, layers: Range, mask: tuple[int, ...], without: Collection[str] = ()
    ) -> tuple[Segment, ...] | None:
        """The best hops through ``layers`` on live devices other than ``without``; None if those do not hold
        them all.
        """
        ways = self._ways_of(layers, frozenset(without))
        if not ways.whole:
            return None
        work = _work_before(self._layout.num_layers, mask)[layers.start : layers.stop + 1]
        if self._again:
            more = _again_before(self._layout.num_layers, mask[0])[layers.start : layers.stop + 1]
            hops = ways.best(self.load, work, self._depth, self._again, more)
        else:
            hops = ways.best(self.load, work, self._depth)
        shift = layers.start
        return tuple(Segment(h.device, Range(h.layers.start + shift, h.layers.stop + shift)) for h in hops)

    def around(self, segments: Sequence[Segment], left_out: Callable[[Segment], bool]) -> tuple[Segment, ...]:
        """``segments`` with the best live hops in the places of those ``left_out``, which are to do all
        passes.
        """
        every, holdings = tuple(range(self._layout.num_layers)), self._layout.holdings
        hops: list[Segment] = []
        for out, group in groupby(segments, left_out):
            run = tuple(group)
            if out:
                found = self.path(Range(run[0].layers.start, run[-1].layers.stop), every)
                assert found is not None, "every layer has a holder"
                run = found
            hops += run
        return without_returns(((s.device, holdings[s.device].around(s.layers)), s.layers) for s in hops)

    def _ways_of(self, layers: Range, without: frozenset[str]) -> Ways:
        """What there is to choose from; the same for every micro-batch that asks for the same."""
        found = self._ways.get((layers, without))
        if found is None:
            free = [device for device in self.load if device not in without]
            found = self._ways[layers, without] = Ways(self._layout.holdings, free, layers)
        return found

    def charge(self, segment: Segment, mask: tuple[int, ...]) -> None:
        """``segment`` will be computed by its device."""
        work = _work_before(self._layout.num_layers, mask)
        passes = work[segment.layers.stop] - work[segment.layers.start]
        self.load[segment.device] += passes + self._repeated(segment, mask[0])

    def carry(self, segments: Sequence[Segment], sign: int) -> None:
        """Add (or take off) one micro-batch with all its passes."""
        for segment in segments:
            self.load[segment.device] += sign * (FULL_PASS * len(segment.layers) + self._repeated(segment, 0))

    def _repeated(self, segment: Segment, lowest: int) -> int:
        """Passes that its device does again for gradients of layers from ``lowest`` on."""
        if segment.device not in self._again:
            return 0
        more = _again_before(self._layout.num_layers, lowest)
        return more[segment.layers.stop] - more[segment.layers.start]


def detour(layout: Layout, dead: Collection[str], attempt: int) -> tuple[Route, ...]:
    """Whole routes over live holders for every micro-batch whose route in ``layout`` touches ``dead``.

    Where redundant holders of all its dead hops live they take their places, and a route is what it was;
    routes without the dead stay as well. The rest go layer by layer, so that pipelines of any depth help each
    other. Where all have as many hops, whole new routes are made as for repairs. Where they have not these
    would go where hops are few (with pipelines of 13 and 18 nodes, one of the 18 dead, past the 17 others, in
    steps 2.5 times as long), so the live hops stay and somebody takes the dead ones (1.5 times). Then
    micro-batches are moved off the busiest device for as long as that helps. Deterministic. Raises PlanError
    if a layer has no live holder.
    """
    # Made anew at each loss from the layout and the dead: no history to replay, and the load is spread over
    # all that are left. (D-recovery-004)
    lost = frozenset(dead)
    hit = [route for route in layout.routes if route.touches(lost)]
    if not hit:
        return ()
    kept = {
        route.micro_batch: Route(route.micro_batch, attempt, segments)
        for route in hit
        if (segments := inherited(layout, route, lost)) is not None
    }
    layout = msgspec.structs.replace(
        layout, routes=tuple(kept.get(route.micro_batch, route) for route in layout.routes)
    )
    rerouting = Rerouting(layout, lost)
    rest = [route for route in hit if route.micro_batch not in kept]
    equal = len({len(route.segments) for route in layout.routes}) == 1
    # New routes weigh hops, so micro-batches of a deeper pipeline left its live devices for one with fewer:
    # at 13 and 18 nodes a step was 2.5 times a whole plan's, now 1.5. (D-recovery-019)
    around = _anew(rerouting, rest, layout.num_layers) if equal else _patched(rerouting, rest)
    routes = {micro_batch: Route(micro_batch, attempt, segments) for micro_batch, segments in around}
    while _improve(rerouting, routes):
        pass
    found = kept | routes
    return tuple(found[route.micro_batch] for route in hit)


def _anew(rerouting: Rerouting, routes: Sequence[Route], num_layers: int) -> Chosen:
    """Whole new routes."""
    every = tuple(range(num_layers))
    for route in routes:
        yield route.micro_batch, rerouting.whole(route.micro_batch, every, 0).segments


def _patched(rerouting: Rerouting, routes: Sequence[Route]) -> Chosen:
    """The same routes with others in the places of the dead."""
    load = rerouting.load
    alive = [[segment for segment in route.segments if segment.device in load] for route in routes]
    for segments in alive:
        rerouting.carry(segments, 1)
    for route, segments in zip(routes, alive, strict=True):
        found = rerouting.around(route.segments, lambda segment: segment.device not in load)
        rerouting.carry(segments, -1)
        rerouting.carry(found, 1)
        yield route.micro_batch, found


def inherited(layout: Layout, route: Route, lost: Collection[str]) -> tuple[Segment, ...] | None:
    """The hops of ``route`` with live redundant holders in the places of the ``lost``; None where one has
    none, or nobody is lost.
    """
    if not layout.redundant or not route.touches(lost):
        return None
    segments = []
    for segment in route.segments:
        found = (
            heir(route, segment.layers, layout.redundant, lost) if segment.device in lost else segment.device
        )
        if found is None:
            return None
        segments.append(Segment(found, segment.layers))
    return tuple(segments)


def _improve(rerouting: Rerouting, routes: dict[int, Route]) -> bool:
    """Move one micro-batch at a time off the busiest device, with its other hops as they are or anew; whether
    the loads, the busiest first, went down.

    Of micro-batches that go the same way one is tried: the others would find the same.
    """
    load = rerouting.load
    began = sorted(load.values(), reverse=True)
    busiest = max(load, key=lambda device: (load[device], device))
    tried: set[tuple[Segment, ...]] = set()
    for micro_batch, route in sorted(routes.items()):
        if route.segments in tried or not route.touches([busiest]):
            continue
        tried.add(route.segments)
        rerouting.carry(route.segments, -1)
        for segments in (
            rerouting.around(route.segments, lambda segment: segment.device == busiest),
            rerouting.around(route.segments, lambda _segment: True),
        ):
            rerouting.carry(segments, 1)
            if sorted(load.values(), reverse=True) < began:
                routes[micro_batch] = Route(micro_batch, route.attempt, segments)
                return True
            rerouting.carry(segments, -1)
        rerouting.carry(route.segments, 1)
    return False


def layout_of(plan: Plan, epoch: int, num_layers: int) -> Layout:
    """The layout that deploying ``plan`` at ``epoch`` leads to: vacant places hold nothing and no route
    touches them. Raises PlanError if a layer has no other holder.
    """
    routes = [
        Route(mb, epoch, pipeline.segments) for pipeline in plan.pipelines for mb in pipeline.micro_batches
    ]
    routes.sort(key=lambda route: route.micro_batch)
    layout = Layout(
        epoch, num_layers, plan.holdings(), tuple(routes), plan.living_redundant(), plan.living_recompute()
    )
    around = {route.micro_batch: route for route in detour(layout, plan.vacant, epoch)}
    return msgspec.structs.replace(
        layout, routes=tuple(around.get(route.micro_batch, route) for route in routes)
    )


def _check_holders(layout: Layout, lost: frozenset[str]) -> None:
    for layer, copies in enumerate(layout.copies(lost)):
        if copies == 0:
            raise PlanError(
                f"layer {layer} has no live copy: its holders {', '.join(layout.holders(layer))} are lost",
                "the job rolls back to its last checkpoint",
            )


@lru_cache(maxsize=1024)
def _work_before(num_layers: int, mask: tuple[int, ...]) -> tuple[int, ...]:
    """Entry ``i``: layer passes of layers ``[0, i)`` when the gradients of ``mask`` are missing."""
    wanted = frozenset(mask)
    passes = (1 + (layer >= mask[0]) + (layer in wanted) for layer in range(num_layers))
    return tuple(accumulate(passes, initial=0))


@lru_cache(maxsize=1024)
def _again_before(num_layers: int, lowest: int) -> tuple[int, ...]:
    """Entry ``i``: of layers ``[0, i)`` the passes through blocks that are computed again, where gradients of
    layers from ``lowest`` on are missing.
    """
    passes = (lowest <= layer and 0 < layer < num_layers - 1 for layer in range(num_layers))
    return tuple(accumulate(passes, initial=0))


def covers(route: Route, layout: Layout) -> bool:
    """Whether ``route`` runs through every layer in order, each on a device that holds it."""
    starts = [segment.layers.start for segment in route.segments]
    stops = [segment.layers.stop for segment in route.segments]
    held = all(layout.holdings.get(s.device, Layers()).spans(s.layers) for s in route.segments)
    joined = stops[:-1] == starts[1:]
    return bool(route.segments) and held and joined and starts[0] == 0 and stops[-1] == layout.num_layers
