"""A step over routes as a job shop: its ops, whom each waits for, what it takes, what it holds, who reduces
with whom.

Owns the shop, of a plan whose routes may cross: a device is the second hop of one route and the third of
another, or two hops of one. Does not order the ops (``dispatch``, ``tabu``) or time them (``evaluate``). The
costs are those of ``timeline``: a send keeps its device busy and so belongs to the op before it; between two
hops of one device nothing is sent.

Ops are numbered hop by hop, routes in order of their micro-batches: F and B of a hop follow each other, or F,
I and W. Whom an op waits for is then one op at most: F for that of the hop before, B (or I) for that of the
hop behind, at the end of the route for its own F; W for its own I.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from oobleckd.planner.costs.apart import kept_bytes, weight_s
from oobleckd.planner.costs.model import stage_costs
from oobleckd.planner.costs.recompute import in_mode, recomputed
from oobleckd.planner.plan import Layers, Layout, Range, Recompute, Route, Segment
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.planner.reroute.redundant import graphs_of
from oobleckd.planner.schedule import Kind, Op, backward_ops, forward_ops

Order = Sequence[int]
Orders = tuple[tuple[int, ...], ...]
"""Device by device the numbers of its ops, in the order in which it runs them."""

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Hops:
    """What hops cost in seconds on a device: forward and backward, with the sends that follow them, and
    weight gradients alone.
    """

    forward_s: Sequence[float]  # entry i: of layers [0, i)
    backward_s: Mapping[Recompute, Sequence[float]]
    weights_s: Sequence[float]
    cut_s: Sequence[float]  # entry i: one way of the tensor between layers i - 1 and i
    recompute: Mapping[str, Recompute]

    @classmethod
    def of(cls, profile: Profile, recompute: Mapping[str, Recompute]) -> Hops:
        """Those of ``profile``, on devices that compute so much again."""
        by_mode = {mode: recomputed(profile, mode).profile.layers for mode in ("none", *recompute.values())}
        return cls(
            list(accumulate((layer.forward_s for layer in profile.layers), initial=0.0)),
            {
                mode: list(accumulate((layer.backward_s for layer in layers), initial=0.0))
                for mode, layers in by_mode.items()
            },
            list(accumulate(map(weight_s, profile.layers), initial=0.0)),
            [float(cut) for cut in stage_costs(profile).cut_s],
            recompute,
        )

    def forward(self, route: Route, position: int) -> float:
        """Forward of that hop, and the activations handed on."""
        layers = route.segments[position].layers
        return self.forward_s[layers.stop] - self.forward_s[layers.start] + self._sent(route, position)

    def backward(self, route: Route, position: int) -> float:
        """Backward of that hop, and the gradient handed back."""
        device, layers = route.segments[position].device, route.segments[position].layers
        until_s = self.backward_s[self.recompute.get(device, "none")]
        return until_s[layers.stop] - until_s[layers.start] + self._sent(route, position - 1)

    def weights(self, layers: Range) -> float:
        """Seconds of weight gradients (W) in a backward through ``layers``."""
        return self.weights_s[layers.stop] - self.weights_s[layers.start]

    def _sent(self, route: Route, position: int) -> float:
        """Between that hop and the next."""
        if not 0 <= position < len(route.segments) - 1:
            return 0.0
        here, there = route.segments[position], route.segments[position + 1]
        return self.cut_s[here.layers.stop] if here.device != there.device else 0.0


@dataclass(frozen=True, slots=True)
class Shop:
    """Op by op: ``device`` (its number), ``seconds``, ``source`` (whom it waits for), ``feeds`` (the F, B or
    I that waits for it), ``left`` (hops to the end of its route, its own among them), ``change`` of the bytes
    held.

    ``room``: bytes of a device for activations; None: nothing bounds it. ``sums[i]``: hops by number whose
    gradients are reduced together, as (classes, devices that take part); ``part_of``: hop -> its class, the
    hops of a device through the same layers. ``update_s``: of a device, from reduced sums to new weights.
    """

    routes: tuple[Route, ...]
    names: tuple[str, ...]
    apart: bool
    hops: tuple[tuple[int, int], ...]
    device: tuple[int, ...]
    seconds: tuple[float, ...]
    source: tuple[int, ...]
    feeds: tuple[int, ...]
    left: tuple[int, ...]
    change: tuple[int, ...]
    room: tuple[int | None, ...]
    part_of: tuple[int, ...]
    sums: tuple[tuple[frozenset[int], frozenset[int]], ...]
    update_s: tuple[float, ...]

    @property
    def stride(self) -> int:
        """Ops of a hop."""
        return 3 if self.apart else 2

    @property
    def kinds(self) -> str:
        """Their kinds, in the order of their numbers."""
        return "FIW" if self.apart else "FB"

    def kind(self, op: int) -> Kind:
        """The kind of op number ``op``: F, B, I or W."""
        found: Kind = ("F", "I", "W")[op % 3] if self.apart else ("F", "B")[op % 2]
        return found

    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each device works in a step."""
        busy = [0.0] * len(self.names)
        for device, seconds in zip(self.device, self.seconds, strict=True):
            busy[device] += seconds
        return tuple(busy)

    def peak_bytes(self, order: Order) -> int:
        """The most that is held at once in ``order``, besides what is always there."""
        change = self.change
        return max(accumulate(change[op] for op in order), default=0)

    def fits(self, device: int, order: Order) -> bool:
        """Whether ``device`` has room for ``order``."""
        room = self.room[device]
        return room is None or self.peak_bytes(order) <= room

    def step_ops(self, order: Order) -> tuple[Op, ...]:
        """``order`` as ops, with receives before and sends behind; ends with the reduce and the update."""
        ops: list[Op] = []
        for number in order:
            index, position = self.hops[number // self.stride]
            route, kind = self.routes[index], self.kind(number)
            if kind == "F":
                ops += forward_ops(len(route.segments), position, route.micro_batch)
            elif kind == "W":
                ops.append(Op("W", position, route.micro_batch))
            else:
                ops += backward_ops(len(route.segments), position, route.micro_batch, kind)
        return (*ops, Op("R"), Op("U"))


def step_ops(shop: Shop, orders: Orders) -> dict[str, tuple[Op, ...]]:
    """Device -> its schedule."""
    return {name: shop.step_ops(order) for name, order in zip(shop.names, orders, strict=True)}


def orders_of(shop: Shop, ops: Mapping[str, Sequence[Op]]) -> Orders:
    """The orders that ``ops`` (device -> schedule) say."""
    first = _first_ops(shop)
    return tuple(
        tuple(
            first[op.micro_batch, op.stage] + shop.kinds.index(op.kind)
            for op in ops[name]
            if op.kind in shop.kinds
        )
        for name in shop.names
    )


def shop_of(layout: Layout, setup: Setup) -> Shop:
    """The step of ``layout`` as ``setup`` has it computed, on devices as it says.

    Where nothing limits memory: room for as many micro-batches a device as 1F1B has on the first of as many
    devices, as in ``decoupled.pipe_of``; where routes cross for twice as many, since some devices then have
    two pipelines to keep busy.
    """
    profile, costs = setup.profile, Hops.of(setup.profile, layout.recompute)
    names = tuple(sorted(layout.holdings))
    number_of = {name: number for number, name in enumerate(names)}
    routes = tuple(sorted(layout.routes, key=lambda route: route.micro_batch))
    held_of = _Held.of(layout, setup)
    kept = list(accumulate((kept_bytes(layer) for layer in profile.layers), initial=0))
    hops: list[tuple[int, int]] = []
    device: list[int] = []
    seconds: list[float] = []
    source: list[int] = []
    feeds: list[int] = []
    left: list[int] = []
    change: list[int] = []
    part_of: list[int] = []
    parts: dict[tuple[int, Range], int] = {}
    stride = 3 if setup.decoupled else 2
    for index, route in enumerate(routes):
        for position, segment in enumerate(route.segments):
            first, remaining = stride * len(hops), len(route.segments) - position
            layers = segment.layers
            held = held_of.bytes(segment)
            backward_s = costs.backward(route, position)
            hops.append((index, position))
            device += [number_of[segment.device]] * stride
            left += [remaining] * stride
            part_of.append(parts.setdefault((number_of[segment.device], layers), len(parts)))
            source += [
                first - stride if position else NOBODY,
                first + stride + 1 if remaining > 1 else first,
            ]
            feeds += [
                first + stride if remaining > 1 else first + 1,
                first - stride + 1 if position else NOBODY,
            ]
            if setup.decoupled:
                of_weights, between = costs.weights(layers), kept[layers.stop] - kept[layers.start]
                seconds += [costs.forward(route, position), backward_s - of_weights, of_weights]
                change += [held, between - held, -between]
                source.append(first + 1)
                feeds.append(NOBODY)
            else:
                seconds += [costs.forward(route, position), backward_s]
                change += [held, -held]
    return Shop(
        routes,
        names,
        setup.decoupled,
        tuple(hops),
        tuple(device),
        tuple(seconds),
        tuple(source),
        tuple(feeds),
        tuple(left),
        tuple(change),
        _room(layout, setup, names, routes, held_of),
        tuple(part_of),
        _sums(layout, profile, names, parts),
        tuple(_update_s(profile, layout.holdings[name]) for name in names),
    )


def cost_of(shop: Shop) -> Callable[[str, Op], float]:
    """What ops take, for ``timeline.dry_run``: a send is part of the op before it."""
    first = _first_ops(shop)

    def cost(_device: str, op: Op) -> float:
        if op.kind == "U":
            return max(shop.update_s, default=0.0)
        return (
            shop.seconds[first[op.micro_batch, op.stage] + shop.kinds.index(op.kind)]
            if op.kind in shop.kinds
            else 0.0
        )

    return cost


def _first_ops(shop: Shop) -> dict[tuple[int, int], int]:
    """(micro-batch, hop of its route) -> its forward."""
    return {
        (shop.routes[index].micro_batch, position): shop.stride * hop
        for hop, (index, position) in enumerate(shop.hops)
    }


@dataclass(frozen=True, slots=True)
class _Held:
    """What a micro-batch holds on devices that compute so much again. ``until``: entry i: in layers
    [0, i).
    """

    by_mode: Mapping[Recompute, Profile]
    until: Mapping[Recompute, Sequence[int]]
    recompute: Mapping[str, Recompute]

    @classmethod
    def of(cls, layout: Layout, setup: Setup) -> _Held:
        """On the devices of ``layout``."""
        by_mode = {mode: in_mode(setup, mode).profile for mode in ("none", *layout.recompute.values())}
        until = {
            mode: list(accumulate((layer.activation_bytes for layer in profile.layers), initial=0))
            for mode, profile in by_mode.items()
        }
        return cls(by_mode, until, layout.recompute)

    def on(self, device: str) -> Profile:
        """The costs there."""
        return self.by_mode[self.recompute.get(device, "none")]

    def bytes(self, segment: Segment) -> int:
        """Of one hop."""
        mode, layers = self.recompute.get(segment.device, "none"), segment.layers
        until = self.until[mode]
        return until[layers.stop] - until[layers.start] + self.by_mode[mode].shared_bytes


def _room(
    layout: Layout, setup: Setup, names: Sequence[str], routes: Iterable[Route], held_of: _Held
) -> tuple[int | None, ...]:
    if setup.device_memory_bytes:
        ahead = graphs_of(layout, setup)
        return tuple(
            max(
                0,
                setup.device_memory_bytes
                - base_bytes(setup, layout.holdings[name], layout.recompute.get(name, "none"))
                - ahead.get(name, 0),
            )
            for name in names
        )
    ways = {tuple(dict.fromkeys(segment.device for segment in route.segments)) for route in routes}
    cross = sum(map(len, ways)) > len({name for way in ways for name in way})
    # Who computes for another pipeline has two to keep busy; in the memory of one the busiest device waited
    # for room. (D-schedules-014)
    max_flying = (2 if cross else 1) * max(map(len, ways), default=1)
    computed: dict[str, set[Range]] = {name: set() for name in names}
    levels: dict[str, dict[int, int]] = {name: {} for name in names}
    for route in routes:
        for position, segment in enumerate(route.segments):
            layers, most = segment.layers, levels[segment.device]
            computed[segment.device].add(layers)
            held = held_of.bytes(segment)
            left = len(route.segments) - position
            most[left] = max(most.get(left, 0), held)
    return tuple(
        max(max_flying * _covered(computed[name], held_of.on(name)), sum(levels[name].values()))
        for name in names
    )


def _covered(ranges: Collection[Range], profile: Profile) -> int:
    """Activations of all layers of ``ranges`` for a micro-batch, each a hop of it."""
    layers = {layer for each in ranges for layer in each.layers()}
    return profile.activation_bytes(layers) + (len(ranges) - 1) * profile.shared_bytes


def base_bytes(setup: Setup, held: Layers, recompute: Recompute = "none") -> int:
    """What a device that holds ``held`` has in its memory at any time, and while it computes a block again if
    it does so.
    """
    profile = setup.profile
    of_layers = sum(profile.layers[layer].state_bytes for layer in held.layers()) / profile.devices_per_stage
    besides = len(held.ranges) * setup.held.device_bytes + round((1 + setup.held.state_copies) * of_layers)
    return profile.reserve_bytes + besides + in_mode(setup, recompute).once_bytes(held.layers())


def _sums(
    layout: Layout, profile: Profile, names: Sequence[str], parts: dict[tuple[int, Range], int]
) -> tuple[tuple[frozenset[int], frozenset[int]], ...]:
    """Buckets of parameters, those once that the same devices compute and hold."""
    computing: list[set[int]] = [set() for _ in profile.layers]
    for (_, layers), part in parts.items():
        for layer in layers.layers():
            computing[layer].add(part)
    holding: list[set[int]] = [set() for _ in profile.layers]
    for number, name in enumerate(names):
        for layer in layout.holdings[name].layers():
            holding[layer].add(number)
    buckets = profile.buckets or tuple((layer,) for layer in range(len(profile.layers)))
    found = {
        (
            frozenset(part for layer in uses for part in computing[layer]),
            frozenset(device for layer in uses for device in holding[layer]),
        )
        for uses in buckets
    }
    return tuple(sorted(found, key=lambda each: (sorted(each[0]), sorted(each[1]))))


def _update_s(profile: Profile, held: Layers) -> float:
    return sum(profile.layers[layer].update_s for layer in held.layers())
