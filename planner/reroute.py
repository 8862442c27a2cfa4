"""Routes for micro-batches that lost a device: stitched from whoever is alive (SlipStream, section 4).

Owns the choice of hops. Does not own which layers are missing (the recovery decision knows) nor
when a device computes what (the worker walks its tasks ready-first).

A route covers every layer, because the forward pass must reach the loss; only the layers in its mask
add weight gradients. Work is counted in layer passes: 1 for a forward, 1 for the gradient that flows
through (from the lowest missing layer upwards), 1 for the weight gradients (missing layers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from planner.plan import Layout, Range, Route, Segment
from planner.policy import PlanError

FULL_PASS = 3  # forward, input gradient, weight gradient of one layer
HOP_COST = FULL_PASS  # a hop more is worth it when it takes a whole layer off the busiest device


@dataclass(frozen=True, slots=True)
class _Path:
    """Hops that cover the layers up to a cut: the busiest device's work, all work, the hops."""

    peak: int
    total: int
    segments: tuple[Segment, ...]

    def key(self) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        return self.peak, self.total, tuple((s.device, s.layers.stop) for s in self.segments)


def reroute(
    layout: Layout, dead: Collection[str], missing: Mapping[int, tuple[int, ...]], attempt: int
) -> tuple[Route, ...]:
    """A new route over live holders for every micro-batch of ``missing`` with a missing layer.

    ``dead``: devices. ``missing``: micro-batch -> layers whose weight gradients no survivor has; a
    micro-batch without any gets no route. Each route is cheap in hops and in the work of its busiest
    device, which counts the live standing routes and the routes made before it; so the micro-batches
    spread over the live pipelines. Deterministic. Raises PlanError if a layer has no live holder.
    """
    lost = frozenset(dead)
    _check_holders(layout, lost)
    depth = max((len(route.segments) for route in layout.routes), default=1)
    load = _standing_load(layout, lost)
    routes = []
    for micro_batch, layers in sorted(missing.items()):
        if not layers:
            continue
        mask = tuple(sorted(layers))
        work = _work_before(layout.num_layers, mask)
        segments = _best_path(_least_loaded(layout, load), work, depth).segments
        for segment in segments:
            load[segment.device] += work[segment.layers.stop] - work[segment.layers.start]
        routes.append(Route(micro_batch, attempt, segments, mask))
    return tuple(routes)


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


def _least_loaded(layout: Layout, load: Mapping[str, int]) -> dict[Range, tuple[int, str]]:
    """Range held by live devices -> (work, name) of the least loaded of them.

    Devices with the same range differ in nothing else, so one candidate for each range is enough.
    """
    best: dict[Range, tuple[int, str]] = {}
    for device, work in sorted(load.items()):
        layers = layout.holdings[device]
        best[layers] = min(best.get(layers, (work, device)), (work, device))
    return best


def _best_path(candidates: Mapping[Range, tuple[int, str]], work: list[int], depth: int) -> _Path:
    """The path with the least busy busiest device, where a hop costs ``HOP_COST`` passes.

    Dynamic programme over (number of hops, cut); cuts are where some live range begins or ends. More
    than ``depth`` hops (the deepest pipeline) only where fewer do not reach the last layer.
    """
    num_layers = len(work) - 1
    cuts = sorted({0, num_layers}.union(*({r.start, r.stop} for r in candidates)))
    reached: dict[int, _Path] = {0: _Path(0, 0, ())}
    complete: list[_Path] = []
    for hops in range(1, len(cuts)):
        reached = _one_hop_more(reached, candidates, work, cuts)
        if num_layers in reached:
            complete.append(reached.pop(num_layers))
        if complete and hops >= depth:
            break
    return min(complete, key=lambda path: (path.peak + HOP_COST * len(path.segments), path.key()))


def _one_hop_more(
    reached: Mapping[int, _Path],
    candidates: Mapping[Range, tuple[int, str]],
    work: list[int],
    cuts: list[int],
) -> dict[int, _Path]:
    """Cut -> the best path that ends there with one hop more than the paths of ``reached``."""
    further: dict[int, _Path] = {}
    for start, path in reached.items():
        visited = frozenset(segment.device for segment in path.segments)
        for layers, (busy, device) in candidates.items():
            if start not in layers or device in visited:
                continue
            for stop in cuts:
                if not start < stop <= layers.stop:
                    continue
                load = busy + work[stop] - work[start]
                hop = Segment(device, Range(start, stop))
                longer = _Path(max(path.peak, load), path.total + load, (*path.segments, hop))
                if stop not in further or longer.key() < further[stop].key():
                    further[stop] = longer
    return further


def covers(route: Route, layout: Layout) -> bool:
    """Whether ``route`` runs through every layer in order, each on a device that holds it."""
    starts = [segment.layers.start for segment in route.segments]
    stops = [segment.layers.stop for segment in route.segments]
    held = all(
        segment.device in layout.holdings
        and layout.holdings[segment.device].start <= segment.layers.start < segment.layers.stop
        and segment.layers.stop <= layout.holdings[segment.device].stop
        for segment in route.segments
    )
    joined = all(stop == start for stop, start in zip(stops, starts[1:], strict=False))
    return bool(route.segments) and held and joined and starts[0] == 0 and stops[-1] == layout.num_layers
