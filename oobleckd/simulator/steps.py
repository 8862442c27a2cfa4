"""Computes how long a step takes: by the planner's own timelines, of the layout in force and of the routes
that stand beside it.

Owns what is remembered of shapes, what a step takes besides the passes and updates of a timeline (the
exchange of gradients as the planner has it, and what a simulation adds), and the time in which an interrupted
round is mended. A plan's step is as the planner modelled it, in the order in
which it would be run; where devices go around the dead they do whatever is ready
(``oobleckd.planner.schedules.routed``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf

import msgspec

from oobleckd.core.jobs import exchange_of
from oobleckd.planner.costs.exchange import device_bytes, layout_shown_s, sent_parts
from oobleckd.planner.costs.recompute import recomputed
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import (
    BACKWARD,
    FORWARD,
    Detours,
    Layers,
    Layout,
    Plan,
    Recompute,
    Route,
    standing_routes,
)
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.planner.schedules.jobshop import shop_of
from oobleckd.planner.schedules.routed import MAX_HOPS, NOTHING_AGAIN, device_s, ready_first_s
from oobleckd.protocol.job import Job

Shape = tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(slots=True)
class Steps:
    """Times of steps by the timelines, each shape's once. ``longer``: the share by which all are longer."""

    longer: float = 0.0
    _known: dict[tuple[Shape, tuple[Recompute, ...]], float] = field(default_factory=dict)
    _exchanged: tuple[tuple[int, frozenset[str]], float] = ((-1, frozenset()), 0.0)

    def planned_s(self, plan: Plan) -> float:
        """A step of ``plan`` as it was deployed."""
        return plan.step_s * (1 + self.longer)

    def around_s(
        self, setup: Setup, plan: Plan, layout: Layout, detours: Detours, dead: Collection[str]
    ) -> float:
        """A step in which detours stand, from their own round on."""
        routes = standing_routes(layout, detours, detours.round)
        holdings = {d: layers for d, layers in layout.holdings.items() if d not in dead}
        standing = msgspec.structs.replace(layout, holdings=holdings, routes=routes)
        exchange_s = self.exchange_s(setup, layout, frozenset(dead))
        if sum(len(route.segments) for route in routes) > MAX_HOPS:
            passes_s = plan.step_s - _shown_s(setup, layout, frozenset())
            return passes_s * (1 + self.longer) * _slower(layout, routes, setup.profile) + exchange_s
        shape = _shape(routes), _modes(routes, layout.recompute)
        if shape not in self._known:
            self._known[shape] = ready_first_s(shop_of(standing, setup), staggered=setup.staggered)
        return self._known[shape] * (1 + self.longer) + exchange_s

    def exchange_s(self, setup: Setup, layout: Layout, dead: frozenset[str]) -> float:
        """Of a step of ``layout`` without its ``dead``, what the exchange of gradients shows in it."""
        if not setup.exchange.is_known:
            return 0.0
        if self._exchanged[0] != (layout.epoch, dead):
            self._exchanged = (layout.epoch, dead), _shown_s(setup, layout, dead)
        return self._exchanged[1]


@dataclass(slots=True)
class Besides:
    """What a step takes that no plan has: ``commit_s`` whatever the layout, and what was measured of the
    exchange of gradients besides.

    All that a device sends goes out one behind the other at ``bytes_per_s``, and nothing of it hides: its
    sums of what it computed to the owners, and means as an owner (``oobleckd.planner.costs.exchange``).
    """

    setup: Setup
    commit_s: float
    bytes_per_s: float
    _known: tuple[tuple[int, frozenset[str]], float] = ((-1, frozenset()), 0.0)

    @classmethod
    def of(cls, job: Job, profile: Profile, commit_s: float, bytes_per_s: float) -> Besides:
        """As ``job`` has it."""
        setup = Setup(profile, job.num_micro_batches, 0, 0, 1, 0, exchange=exchange_of(job))
        return cls(setup, commit_s, bytes_per_s)

    def seconds(self, layout: Layout, dead: frozenset[str]) -> float:
        """Of a step of ``layout`` without its ``dead``."""
        if isinf(self.bytes_per_s):
            return self.commit_s
        if self._known[0] != (layout.epoch, dead):
            self._known = (layout.epoch, dead), self._exchange_s(layout, dead)
        return self.commit_s + self._known[1]

    def _exchange_s(self, layout: Layout, dead: frozenset[str]) -> float:
        sent = sent_parts(self.setup, *_exchanged(layout, dead))
        most = max((device_bytes(self.setup.exchange, parts) for parts in sent.values()), default=0.0)
        return most / layout.devices_per_stage / self.bytes_per_s


def _shown_s(setup: Setup, layout: Layout, dead: Collection[str]) -> float:
    return layout_shown_s(setup, *_exchanged(layout, dead))


def _exchanged(layout: Layout, dead: Collection[str]) -> tuple[dict[str, Layers], dict[str, Layers]]:
    """Who exchanges what, and what of it is held for others: places of stages, as the planner counts them."""
    lanes = Lanes.laid_out(layout)
    holdings = {device: held for device, held in layout.holdings.items() if device not in dead}
    return lanes.at_places(holdings), lanes.at_places(layout.redundant)


def _slower(before: Layout, after: Sequence[Route], profile: Profile) -> float:
    """How many times as much the busiest device has to do."""
    was = device_s(before.routes, profile, before.recompute)
    is_now = device_s(after, profile, before.recompute)
    return max(1.0, max(is_now.values()) / max(was.values()))


def _shape(routes: Sequence[Route]) -> Shape:
    """Routes with devices numbered as they first appear: layouts that differ in names alone take as long."""
    number: dict[str, int] = {}
    return tuple(
        tuple(
            (number.setdefault(hop.device, len(number)), hop.layers.start, hop.layers.stop)
            for hop in route.segments
        )
        for route in routes
    )


def _modes(routes: Sequence[Route], recompute: Mapping[str, Recompute]) -> tuple[Recompute, ...]:
    """What devices compute again, in the order of ``_shape``; nothing where all compute nothing again."""
    if not recompute:
        return ()
    devices = dict.fromkeys(hop.device for route in routes for hop in route.segments)
    return tuple(recompute.get(device, "none") for device in devices)


def mended_at(
    decided_at: float,
    begun_at: float,
    step_s: float,
    share: float,
    standing: Sequence[Route],
    attempts: Sequence[Route],
    dead: Collection[str],
    profile: Profile,
    besides_s: float = 0.0,
    recompute: Mapping[str, Recompute] = NOTHING_AGAIN,
) -> float:
    """When the interrupted round is committed, in the seconds of ``decided_at``.

    Pipelines that were not hit have gone on, and end when they would have. Every device has besides what is
    left of its own work, of which it has done a ``share``, what the new attempts give it; and no attempt is
    done before the decision and one way through its hops. ``besides_s``: of ``step_s`` what follows the last
    pass, and follows that of an attempt as well. ``recompute``: as in ``Layout``.
    """
    left: defaultdict[str, float] = defaultdict(float)
    own = device_s([route for route in standing if not route.touches(dead)], profile, recompute)
    for device, busy_s in own.items():
        left[device] += (1.0 - share) * busy_s
    way_s = 0.0
    for route in attempts:
        hops = _hops_s(route, profile, recompute)
        way_s = max(way_s, sum(hops))
        for segment, seconds in zip(route.segments, hops, strict=True):
            left[segment.device] += seconds
    again_s = max(way_s, *left.values()) if left else way_s
    return max(begun_at + step_s, decided_at + again_s + besides_s)


def _hops_s(route: Route, profile: Profile, recompute: Mapping[str, Recompute]) -> tuple[float, ...]:
    """Seconds that each hop of an attempt has still to do."""
    found = []
    for position, segment in enumerate(route.segments):
        reached, seconds = route.reached_at(position), 0.0
        costs = recomputed(profile, recompute.get(segment.device, "none")).profile.layers
        for layer in segment.layers.layers():
            cost = costs[layer]
            seconds += cost.forward_s if reached < FORWARD else 0.0
            if reached < BACKWARD:
                of_weights = _weights_s(profile.layers[layer].backward_s)
                seconds += cost.backward_s if route.wants(layer) else cost.backward_s - of_weights
        found.append(seconds)
    return tuple(found)


def _weights_s(backward_s: float) -> float:
    """Of a backward pass what finds weight gradients: about half of its products."""
    return backward_s / 2


def bytes_held(layout: Layout, sizes: Mapping[int, int]) -> dict[str, int]:
    """Device -> bytes of the layers that it holds; ``sizes``: layer -> bytes."""
    return {device: sum(sizes[n] for n in held.layers()) for device, held in layout.holdings.items()}
