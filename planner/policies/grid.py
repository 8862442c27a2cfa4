"""The pipelines at work as a grid of places, some of which are vacant: who stands where, and what moves cost.

Owns places, names and the plan that they make. Which place is filled or left is ``slipstream``'s choice. A
vacant place bears the name of a node that is not here; no two places bear the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import msgspec
import numpy as np

from oobleckd.planner.costs.exchange import layout_shown_s
from oobleckd.planner.costs.recompute import in_mode
from oobleckd.planner.placement.transfer import (
    Place,
    computed,
    copy_s,
    places,
    recompute_on,
    redundant_on,
    transfers,
)
from oobleckd.planner.placement.zones import same_zone
from oobleckd.planner.plan import Layers, Layout, Plan, Route, Template, Transfer, device_name, node_of
from oobleckd.planner.policies.cases import Nodes
from oobleckd.planner.policies.oobleck import pipelines_of
from oobleckd.planner.policy import Setup, Situation
from oobleckd.planner.reroute.redundant import graphs_of
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedules.jobshop import Shop, base_bytes, shop_of, step_ops
from oobleckd.planner.schedules.routed import (
    EFFORT_AT_ONCE,
    MAX_HOPS,
    Crossing,
    busiest_s,
    layout_crossing,
    min_s,
)
from oobleckd.planner.schedules.written import NOTHING, WrittenOrders, written_shop
from oobleckd.planner.sizing.exchanged import exchanging
from oobleckd.planner.sizing.instantiate import slowest_s, split_micro_batches
from oobleckd.planner.templates.guarantee import losses_survived


@dataclass(frozen=True)
class Grid:
    """``running`` pipelines (node names, of vacant places too) of the templates ``members``; ``here``: slot
    -> node. ``horizon_steps``: for so many steps it is weighed. ``zones``: node -> what it fails together
    with, where neighbours are to be apart.
    """

    setup: Setup
    members: tuple[Template, ...]
    running: tuple[Nodes, ...]
    here: Mapping[int, str]
    holdings: Mapping[str, Layers] = field(repr=False)
    horizon_steps: float
    zones: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def slots(self) -> tuple[Place, ...]:
        """Slot -> what its devices hold, for others too; pipelines one after the other."""
        return tuple(place for template in self.members for place in places(template))

    @cached_property
    def _computed(self) -> tuple[Place, ...]:
        """Slot -> what its devices compute."""
        return tuple(place for template in self.members for place in computed(template))

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """Slot -> its pipeline."""
        return tuple(index for index, nodes in enumerate(self.running) for _ in nodes)

    @property
    def vacant(self) -> tuple[int, ...]:
        """Slots without a node."""
        return tuple(slot for slot in range(len(self.slots)) if slot not in self.here)

    def with_moved(self, slot: int, node: str) -> Grid:
        """``node`` in the vacant ``slot``; where it stood is vacant."""
        here = {place: name for place, name in self.here.items() if name != node}
        return replace(self, here=here | {slot: node})

    @property
    def copies(self) -> int:
        """How many nodes hold the layer that fewest hold."""
        counts = [0] * len(self.setup.profile.layers)
        for slot in self.here:
            for layer in {layer for held in self.slots[slot] for layer in held.layers()}:
                counts[layer] += 1
        return min(counts)

    @property
    def whole(self) -> bool:
        """Whether every layer has a holder and every pipeline a node."""
        return self.copies > 0 and len({self.homes[slot] for slot in self.here}) == len(self.running)

    @property
    def fits(self) -> bool:
        """Whether every device has room for what it holds and may have in flight."""
        limit = self.setup.device_memory_bytes
        return not limit or all(needed <= limit for needed in self.needed_bytes.values())

    @cached_property
    def needed_bytes(self) -> dict[str, int]:
        """Device -> bytes of what it holds and may have in flight.

        Where all its routes leave as many hops to their ends, that is what its template was made for. Else
        each number of hops left may have as many micro-batches in flight
        (``oobleckd.worker.round_machine.tasks``). What runs ahead for others comes on top.
        """
        setup, recompute = self.setup, self.layout.recompute
        by_mode = {mode: in_mode(setup, mode).profile for mode in ("none", *recompute.values())}
        flying: dict[str, dict[int, list[int]]] = {}
        for route in self.routes:
            for position, segment in enumerate(route.segments):
                profile = by_mode[recompute.get(segment.device, "none")]
                activations = profile.activation_bytes(segment.layers.layers())
                left = len(route.segments) - position
                flying.setdefault(segment.device, {}).setdefault(left, []).append(activations)
        ahead = graphs_of(self.layout, setup)
        found = {}
        for device, held in self.plan.holdings().items():
            most = sum(sum(sorted(each)[-left:]) for left, each in flying.get(device, {}).items())
            base = base_bytes(setup, held, recompute.get(device, "none"))
            found[device] = base + most + ahead.get(device, 0)
        return found

    @property
    def goes_on(self) -> bool:
        """Whether the job can be run so: around what is vacant, if anything is."""
        return self.whole and (not self.vacant or self.fits)

    @property
    def tolerance(self) -> int:
        """How many nodes can be lost."""
        return losses_survived(self.copies)

    # ------------------------------------------------------------------ what it makes

    @cached_property
    def named(self) -> tuple[Nodes, ...]:
        """The pipelines with a name for every place: of those who are not here, each its own where it can."""
        before = [name for nodes in self.running for name in nodes]
        placed = frozenset(self.here.values())
        # Devices are named after nodes, and a node that comes back must not find its name on two places.
        # (D-recovery-009)
        own = {slot: before[slot] for slot in self.vacant if before[slot] not in placed}
        taken = placed | frozenset(own.values())
        left = iter(sorted(name for name in before if name not in taken))
        names = iter([self.here.get(slot) or own.get(slot) or next(left) for slot in range(len(self.slots))])
        return tuple(tuple(next(names) for _ in nodes) for nodes in self.running)

    def name_at(self, slot: int) -> str:
        """Who stands in ``slot``, or did."""
        return [name for nodes in self.named for name in nodes][slot]

    def same_zone(self, slot: int, node: str) -> int:
        """How many neighbours of ``slot`` are in the zone of ``node``."""
        home = self.homes[slot]
        return same_zone(node, self.named[home], slot - self.homes.index(home), self.zones)

    @cached_property
    def plan(self) -> Plan:
        """The pipelines, each with the share that it would have if all places were taken."""
        shares = split_micro_batches(self._exchanging, self.setup.num_micro_batches)
        names = [name for nodes in self.named for name in nodes]
        vacant = tuple(
            device_name(names[slot], index) for slot in self.vacant for index in range(len(self.slots[slot]))
        )
        return Plan(
            pipelines_of(self.members, self.named, shares, dealt=self.setup.dealt),
            vacant=tuple(sorted(vacant)),
            redundant=redundant_on(self.members, self.named),
            recompute=recompute_on(self.members, self.named),
        )

    @cached_property
    def layout(self) -> Layout:
        """Who holds what, and who computes which micro-batch."""
        return layout_of(self.plan, 1, len(self.setup.profile.layers))

    @property
    def routes(self) -> tuple[Route, ...]:
        """Who computes which micro-batch."""
        return self.layout.routes

    @cached_property
    def _crossing(self) -> tuple[Crossing, Shop]:
        effort = (
            EFFORT_AT_ONCE if self.vacant else 0
        )  # where no route crosses devices have orders of their own, or none
        return layout_crossing(self.layout, self.setup, effort)

    @cached_property
    def written(self) -> WrittenOrders:
        """The schedules, where routes cross and an order is enough faster than ready-first; none is sought of
        many hops.
        """
        if self._many_hops or not self.vacant:
            return NOTHING
        found, shop = self._crossing
        return NOTHING if found.orders is None else written_shop(shop, step_ops(shop, found.orders))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The copies that bring every device what it is to hold."""
        return transfers(self.plan.holdings(), self.holdings, self.setup.profile)

    @cached_property
    def step_s(self) -> float:
        """Modelled time of a step in seconds, with what of the exchange shows."""
        return self._passes_s + self.exchange_s

    @cached_property
    def exchange_s(self) -> float:
        """Seconds of it that the exchange of gradients shows, among those who are here."""
        if self.vacant:
            return layout_shown_s(self.setup, self.layout.holdings, self.layout.redundant)
        shares = [len(pipeline.micro_batches) for pipeline in self.plan.pipelines]
        return slowest_s(self._exchanging, shares) - self._whole_s

    @cached_property
    def _exchanging(self) -> Sequence[Template]:
        """``members``, each as much longer as the exchange shows if all places were taken."""
        return exchanging(self.setup, self.members)

    @cached_property
    def _passes_s(self) -> float:
        """The step without the exchange: as the templates have it where no route crosses, else of what
        is run. With too many hops to run it, it is as many times longer than if all places were taken as the
        busiest device has more to do.

        That holds where updates are staggered, too: the schedule that a whole plan then gets is about as long
        from step to step as by itself.
        """
        # As its templates have it, where updates are staggered too: by whatever is ready it looked 4 to 14
        # % slower than the schedule that it gets. (D-policies-017)
        if self.setup.decoupled and not self.vacant:
            return self._whole_s
        if self._many_hops:
            whole = layout_of(msgspec.structs.replace(self.plan, vacant=()), 1, self.layout.num_layers)
            # Estimated from the whole plan's step: the busiest device's work alone is a bound from below
            # (no filling, no draining, no waiting), and whoever compares that stays too often.
            # (D-schedules-017)
            whole_s = busiest_s(whole.routes, self.setup.profile, whole.recompute)
            return self._whole_s * max(1.0, self.busiest_s / whole_s)
        return self._crossing[0].step_s

    @cached_property
    def min_s(self) -> float:
        """A bound of ``step_s`` from below, for which no order is sought."""
        if not self.vacant or self._many_hops:
            return self.step_s
        return min_s(shop_of(self.layout, self.setup), staggered=self.setup.staggered) + self.exchange_s

    @property
    def _whole_s(self) -> float:
        """If all places were taken."""
        return slowest_s(self.members, [len(pipeline.micro_batches) for pipeline in self.plan.pipelines])

    @property
    def _many_hops(self) -> bool:
        return sum(len(route.segments) for route in self.routes) > MAX_HOPS

    @cached_property
    def busiest_s(self) -> float:
        """Seconds that the busiest device works in a step."""
        return busiest_s(self.routes, self.setup.profile, self.layout.recompute)

    @cached_property
    def min_busy_s(self) -> float:
        """A bound of ``busiest_s`` from below, for which no route is chosen. Whatever layers follow each
        other: who holds none of them has no part in their work, so the busiest of the others has at least its
        share. Where all pipelines are split alike it is nearly tight.
        """
        layers = self.setup.profile.layers
        held = [part for slot in self.here for place in self.slots[slot] for part in place.ranges]
        until_s = np.array([0.0, *accumulate(layer.forward_s + layer.backward_s for layer in layers)])
        starts, stops = np.sort([part.start for part in held]), np.sort([part.stop for part in held])
        firsts, ends = np.unique(starts), np.unique(stops)
        begun = np.searchsorted(starts, ends, side="left")
        over = np.searchsorted(stops, firsts, side="right")
        holders = begun[None, :] - over[:, None]
        work_s = self.setup.num_micro_batches * (until_s[ends][None, :] - until_s[firsts][:, None])
        return float(np.max(work_s / np.maximum(holders, 1)))

    @cached_property
    def cost_s(self) -> float:
        """Copies, and the steps until the next change."""
        return copy_s(self.transfers, self.setup.profile) + self.horizon_steps * self.step_s

    def takers(self, slot: int) -> list[tuple[str, int]]:
        """Who computes the layers of a vacant slot for its pipeline: nodes, with their pipelines."""
        mine = set(self.plan.pipelines[self.homes[slot]].micro_batches)
        home = {name: index for index, nodes in enumerate(self.named) for name in nodes}
        wanted = {layer for held in self._computed[slot] for layer in held.layers()}
        found = {
            node_of(segment.device)
            for route in self.routes
            if route.micro_batch in mine
            for segment in route.segments
            if wanted.intersection(segment.layers.layers())
        }
        return [(name, home[name]) for name in sorted(found)]


def grid_of(setup: Setup, templates: Sequence[Template], situation: Situation) -> Grid | None:
    """The grid in which the pipelines at work stand; None where there is none, or templates are others by
    now.
    """
    running, usable = situation.running, frozenset(situation.nodes)
    by_size = {template.num_nodes: template for template in templates}
    if not running or any(len(nodes) not in by_size for nodes in running):
        return None
    names = [name for nodes in running for name in nodes]
    here = {slot: name for slot, name in enumerate(names) if name in usable}
    members = tuple(by_size[len(nodes)] for nodes in running)
    # Who holds no other's layers has no reason to be apart from its neighbours: a zone that is lost would
    # take places of more pipelines.
    zones = situation.zones if any(template.redundant for template in members) else {}
    return Grid(setup, members, running, here, situation.holdings, situation.horizon_steps, zones)


def at_work(grid: Grid, situation: Situation) -> Grid:
    """``grid`` as the job runs until there is another plan: who has its state stands in its place, also who
    is to leave; who came back, and holds nothing yet, does not.
    """
    # Who holds state now, and not who may be used: drains were weighed as if the leaving node did nothing
    # any more, and so were copied in the stop. (D-precopy-009)
    present = {node_of(device) for device in situation.holdings}
    names = [name for nodes in grid.running for name in nodes]
    here = {slot: name for slot, name in enumerate(names) if name in present}
    return grid if here == grid.here else replace(grid, here=here)


def needed_bytes(grid: Grid | None) -> Mapping[str, int]:
    """``Grid.needed_bytes``; of nobody where there is no such grid, or where a layer of it has no holder."""
    return grid.needed_bytes if grid is not None and grid.whole else {}
