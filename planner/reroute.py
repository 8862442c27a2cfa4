"""Routes for micro-batches that lost a device: stitched from whoever is alive (SlipStream, section 4).

Owns the choice of hops: of attempts that repair a round (``reroute``), and of routes that stand from then on
(``detour``). Does not own which layers are missing (the recovery decision knows) nor when a device computes
what (the worker walks its tasks ready-first).

A route covers every layer, because the forward pass must reach the loss; only the layers in its mask
add weight gradients. Work is counted in layer passes: 1 for a forward, 1 for the gradient that flows
through (from the lowest missing layer upwards), 1 for the weight gradients (missing layers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.plan import Layers, Layout, Plan, Range, Route, Segment
from planner.policy import PlanError
from planner.shadow import heir

FULL_PASS = 3  # forward, input gradient, weight gradient of one layer
HOP_COST = FULL_PASS  # a hop more is worth it when it takes a whole layer off the busiest device


NEVER = 2**40  # more layer passes than any device can have to do

Passes = NDArray[np.int64]
Holder = tuple[str, Range]
"""A device, and the range of what it holds that is meant."""


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
    """Routes made one after the other for one loss: each counts the work of those before it."""

    def __init__(self, layout: Layout, dead: Collection[str]) -> None:
        lost = frozenset(dead)
        _check_holders(layout, lost)
        self._layout, self._lost = layout, lost
        self._own = {route.micro_batch: route for route in layout.routes} if layout.shadows else {}
        self._depth = max((len(route.segments) for route in layout.routes), default=1)
        self._load = _standing_load(layout, lost)

    def heir(self, route: Route, layers: Range) -> str | None:
        """Who takes over a dead device's hop of ``route`` without having been asked: a live shadow of it, if there is one."""
        return heir(route, layers, self._layout.shadows, self._lost)

    def whole(self, micro_batch: int, missing: Sequence[int], attempt: int) -> Route:
        """From the embedding to the loss; ``missing``: the layers whose weight gradients it adds. Where shadows of all dead hops
        of its standing route live it is that route with them in their places.
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
        """The best hops through ``layers`` on live devices other than ``without``; None if those do not hold them all."""
        free = _free(self._layout, self._load, layers, without)
        if {layer for part in free for layer in part.layers()} != set(range(len(layers))):
            return None
        work = _work_before(self._layout.num_layers, mask)[layers.start : layers.stop + 1]
        hops = _best_path(free, [done - work[0] for done in work], self._depth)
        shift = layers.start
        return tuple(Segment(h.device, Range(h.layers.start + shift, h.layers.stop + shift)) for h in hops)

    def charge(self, segment: Segment, mask: tuple[int, ...]) -> None:
        """``segment`` will be computed by its device."""
        work = _work_before(self._layout.num_layers, mask)
        self._load[segment.device] += work[segment.layers.stop] - work[segment.layers.start]


def detour(layout: Layout, dead: Collection[str], attempt: int) -> tuple[Route, ...]:
    """Whole routes over live holders for every micro-batch whose route in ``layout`` touches ``dead``.

    Where shadows of all its dead hops live they take their places, and a route is what it was. The rest go
    layer by layer, so that pipelines of any depth help each other; routes without the dead stay. First each
    is put where the busiest device of its way is least busy, as repairs are; then each is taken off and put again
    for as long as that helps. Deterministic. Raises PlanError if a layer has no live holder.
    """
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
    every = tuple(range(layout.num_layers))
    left = [route.micro_batch for route in hit if route.micro_batch not in kept]
    first = reroute(layout, lost, dict.fromkeys(left, every), attempt)
    routes = {route.micro_batch: Route(route.micro_batch, attempt, route.segments) for route in first}
    load = _standing_load(layout, lost)
    for route in routes.values():
        _carry(load, route.segments, 1)
    while _improve(layout, routes, load):
        pass
    found = kept | routes
    return tuple(found[route.micro_batch] for route in hit)


def inherited(layout: Layout, route: Route, lost: Collection[str]) -> tuple[Segment, ...] | None:
    """The hops of ``route`` with live shadows in the places of the ``lost``; None where one has none, or nobody is lost."""
    if not layout.shadows or not route.touches(lost):
        return None
    segments = []
    for segment in route.segments:
        found = (
            heir(route, segment.layers, layout.shadows, lost) if segment.device in lost else segment.device
        )
        if found is None:
            return None
        segments.append(Segment(found, segment.layers))
    return tuple(segments)


def _improve(layout: Layout, routes: dict[int, Route], load: dict[str, int]) -> bool:
    """Move one micro-batch at a time off the busiest device; whether the loads, the busiest first, went down."""
    began = sorted(load.values(), reverse=True)
    depth = max(len(route.segments) for route in layout.routes)
    work = _work_before(layout.num_layers, tuple(range(layout.num_layers)))
    busiest = max(load, key=lambda device: (load[device], device))
    for micro_batch, route in sorted(routes.items()):
        if not route.touches([busiest]):
            continue
        _carry(load, route.segments, -1)
        segments = _best_path(_free(layout, load, Range(0, layout.num_layers)), work, depth)
        _carry(load, segments, 1)
        if sorted(load.values(), reverse=True) < began:
            routes[micro_batch] = Route(micro_batch, route.attempt, segments)
            return True
        _carry(load, segments, -1)
        _carry(load, route.segments, 1)
    return False


def _carry(load: dict[str, int], segments: Sequence[Segment], sign: int) -> None:
    """Add (or take off) one micro-batch with all its passes."""
    for segment in segments:
        load[segment.device] += sign * FULL_PASS * len(segment.layers)


def _free(
    layout: Layout, load: Mapping[str, int], within: Range, without: Collection[str] = ()
) -> dict[Range, tuple[int, str]]:
    """What is held of the layers ``within``, counted from their first: (load, device).

    Devices with the same range differ in their load alone: the least loaded stands for all.
    """
    free: dict[Range, tuple[int, str]] = {}
    for device, passes in load.items():
        if device in without:
            continue
        for held in layout.holdings[device].ranges:
            start, stop = max(held.start, within.start), min(held.stop, within.stop)
            if start < stop:
                part = Range(start - within.start, stop - within.start)
                free[part] = min(free.get(part, (passes, device)), (passes, device))
    return free


def layout_of(plan: Plan, epoch: int, num_layers: int) -> Layout:
    """The layout that deploying ``plan`` at ``epoch`` leads to: vacant places hold nothing and no route
    touches them. Raises PlanError if a layer has no other holder.
    """
    routes = [
        Route(mb, epoch, pipeline.segments) for pipeline in plan.pipelines for mb in pipeline.micro_batches
    ]
    routes.sort(key=lambda route: route.micro_batch)
    layout = Layout(epoch, num_layers, plan.holdings(), tuple(routes), plan.living_shadows())
    around = {route.micro_batch: route for route in detour(layout, plan.vacant, epoch)}
    return msgspec.structs.replace(
        layout, routes=tuple(around.get(route.micro_batch, route) for route in routes)
    )


def _check_holders(layout: Layout, lost: frozenset[str]) -> None:
    for layer, copies in enumerate(layout.copies(lost)):
        if copies == 0:
            raise PlanError(
                f"layer {layer} has no live copy: its holders {', '.join(layout.holders(layer))} are lost",
                "the job goes back to its last checkpoint",
            )


def _standing_load(layout: Layout, lost: frozenset[str]) -> dict[str, int]:
    """Live device -> layer passes of a step on its standing routes that did not touch the dead."""
    load = {device: 0 for device in sorted(layout.holdings) if device not in lost}
    for route in layout.routes:
        if not route.touches(lost):
            for segment in route.segments:
                load[segment.device] += FULL_PASS * len(segment.layers)
    return load


def _work_before(num_layers: int, mask: tuple[int, ...]) -> list[int]:
    """Entry ``i``: layer passes of layers ``[0, i)`` when the gradients of ``mask`` are missing."""
    wanted = frozenset(mask)
    passes = (1 + (layer >= mask[0]) + (layer in wanted) for layer in range(num_layers))
    return list(accumulate(passes, initial=0))


def _best_path(free: Mapping[Range, tuple[int, str]], work: Sequence[int], depth: int) -> tuple[Segment, ...]:
    """The hops with the least busy busiest device, where a hop costs ``HOP_COST`` passes.

    Dynamic programme over (number of hops, cut); cuts are where some live range begins or ends. More
    than ``depth`` hops (the deepest pipeline) only where fewer do not reach the last layer. The optimum,
    except where it comes back to a device, whose hops are weighed each for itself: within one range that device
    then computes what lies between as well.
    """
    cuts = sorted({0, len(work) - 1}.union(*({layers.start, layers.stop} for layers in free)))
    busy, who = _hops(free, cuts, work)
    least = int(np.diagonal(busy, 1).max())  # every path computes every layer somewhere
    reached = np.full(len(cuts), NEVER)
    reached[0] = 0
    before: list[Passes] = []
    best, num_hops = NEVER, 0
    while best == NEVER or (len(before) < depth and least + HOP_COST * (len(before) + 1) < best):
        peaks = np.maximum(reached[:, None], busy)
        before.append(peaks.argmin(axis=0))
        reached = peaks.min(axis=0)
        cost = int(reached[-1]) + HOP_COST * len(before)
        if reached[-1] < NEVER and cost < best:
            best, num_hops = cost, len(before)
    stops = [len(cuts) - 1]
    for origin in reversed(before[:num_hops]):
        stops.append(int(origin[stops[-1]]))
    stops.reverse()
    hops = [(who[i, j], Range(cuts[i], cuts[j])) for i, j in pairwise(stops)]
    return _without_returns(hops)


def _hops(
    free: Mapping[Range, tuple[int, str]], cuts: Sequence[int], work: Sequence[int]
) -> tuple[Passes, dict[tuple[int, int], Holder]]:
    """For every pair of cuts the passes of the least busy device that holds all between, with the hop,
    and who that is.
    """
    at = {cut: index for index, cut in enumerate(cuts)}
    chosen = np.full((len(cuts), len(cuts)), -1)
    options = sorted(free.items(), key=lambda option: option[1])
    for number, (layers, _) in enumerate(options):
        first, last = at[layers.start], at[layers.stop]
        block = chosen[first:last, first + 1 : last + 1]
        block[block < 0] = number
    chosen[np.tril_indices(len(cuts))] = -1
    load = np.array([*(load for _, (load, _) in options), NEVER])
    until = np.array([work[cut] for cut in cuts])
    busy: Passes = np.where(chosen < 0, NEVER, load[chosen] + until[None, :] - until[:, None])
    pairs = zip(*np.nonzero(chosen >= 0), strict=True)
    return busy, {(int(i), int(j)): _holder(options[chosen[i, j]]) for i, j in pairs}


def _holder(option: tuple[Range, tuple[int, str]]) -> Holder:
    held, (_, device) = option
    return device, held


def _without_returns(hops: Sequence[tuple[Holder, Range]]) -> tuple[Segment, ...]:
    """``hops`` where no range of a device comes twice: it has what lies between, so that is computed there as well."""
    path: list[tuple[Holder, Range]] = []
    for holder, layers in hops:
        earlier = next((k for k, (other, _) in enumerate(path) if other == holder), None)
        if earlier is None:
            path.append((holder, layers))
        else:
            path[earlier:] = [(holder, Range(path[earlier][1].start, layers.stop))]
    return tuple(Segment(device, layers) for (device, _), layers in path)


def covers(route: Route, layout: Layout) -> bool:
    """Whether ``route`` runs through every layer in order, each on a device that holds it."""
    starts = [segment.layers.start for segment in route.segments]
    stops = [segment.layers.stop for segment in route.segments]
    held = all(layout.holdings.get(s.device, Layers()).spans(s.layers) for s in route.segments)
    joined = stops[:-1] == starts[1:]
    return bool(route.segments) and held and joined and starts[0] == 0 and stops[-1] == layout.num_layers
