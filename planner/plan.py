"""The vocabulary of plans: stages, templates, pipelines, routes, layouts, transfers.

Owns the words that planner, daemon core and worker share. Owns no algorithm.

Layers are numbered 0 .. L-1 where layer 0 is the embedding and layer L-1 the head (final norm and
output projection); the transformer blocks lie between. All ranges are half open: ``[start, stop)``.
A device is named ``"<node>/<index>"``. Micro-batches of a step are numbered 0 .. M-1 over the whole
global batch, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec


class Range(msgspec.Struct, frozen=True, order=True):
    """Layers ``[start, stop)``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def layers(self) -> range:
        """Every layer of the range, in order."""
        return range(self.start, self.stop)


# What a device holds is a set of ranges, what a hop computes is one: a device with two chunks is simply the
# place of two hops, and ranges are not joined, as each hop has its own cap and repair. (D-recovery-012)
class Layers(msgspec.Struct, frozen=True, order=True):
    """What a device holds: ranges, ascending and apart. Neighbours may touch and are two all the same: a hop
    lies within one.
    """

    ranges: tuple[Range, ...] = ()

    @classmethod
    def of(cls, *ranges: Range) -> Layers:
        """``ranges`` in any order."""
        return cls(tuple(sorted(ranges)))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __contains__(self, layer: int) -> bool:
        return any(layer in held for held in self.ranges)

    def layers(self) -> tuple[int, ...]:
        """Every layer, ascending."""
        return tuple(layer for held in self.ranges for layer in held.layers())

    def spans(self, layers: Range) -> bool:
        """Whether one range has all of ``layers``, and there are any."""
        return any(held.start <= layers.start < layers.stop <= held.stop for held in self.ranges)

    def around(self, layers: Range) -> Range:
        """The one range that has all of ``layers``. Raises ValueError where none has."""
        for held in self.ranges:
            if held.start <= layers.start < layers.stop <= held.stop:
                return held
        raise ValueError(f"no range has layers {layers.start} to {layers.stop}")

    def and_those(self, other: Layers) -> Layers:
        """These and those of ``other``, which has none of them."""
        return Layers.of(*self.ranges, *other.ranges) if other.ranges else self


Recompute = Literal["none", "selective", "blocks"]
"""What of a block's activations is not kept for the backward, but computed again there: nothing, what is
cheap to compute, or all but its input. The bits are the same.
"""
RecomputeWanted = Literal["none", "selective", "blocks", "auto"]
"""As ``schedule.recompute`` has it: of all stages, or of each what its memory asks for."""


class Stage(msgspec.Struct, frozen=True):
    """Contiguous layers on ``num_devices`` devices of one node, and what the model says of them.

    ``time_s`` is forward plus backward of one micro-batch in seconds; ``memory_bytes`` the peak on
    each of its devices. ``recompute``: what its blocks compute again in the backward; the stages that a
    device has are alike in it.
    """

    layers: Range
    num_devices: int
    time_s: float
    memory_bytes: int
    recompute: Recompute = "none"


class Template(msgspec.Struct, frozen=True):
    """A pipeline for ``num_nodes`` nodes, planned ahead (Oobleck, section 4.1).

    The modelled time of ``m`` micro-batches is ``fill_s + (m - 1) * period_s``: ``fill_s`` is one micro-batch
    through all stages and cuts and the slowest update, or what makes the sum that of a run (``refine``,
    ``fold``); ``period_s`` the slowest stage with its transfers. No split takes less than (1 - ``gap``) of
    its time, so modelled, for the micro-batches that it was made for (with a decoupled backward: less than of
    the split that it began with). ``chunks``: stages a device; with two, ``stages`` has those of a device as
    far from the beginning as from the end (``pipe``), and the memory of each is the device's. ``redundant``:
    each device holds its successor's stage besides its own, and the memory is of both.
    """

    num_nodes: int
    devices_per_node: int
    stages: tuple[Stage, ...]
    fill_s: float
    period_s: float
    gap: float = 0.0
    chunks: int = 1
    redundant: bool = msgspec.field(default=False, name="shadowed")  # its name on disk and wire

    @property
    def held(self) -> tuple[Layers, ...]:
        """The layers that each of its devices computes, or those that share a stage."""
        count = len(self.stages) // self.chunks
        return tuple(
            Layers.of(*(stage.layers for stage in (self.stages[at], self.stages[-1 - at])[: self.chunks]))
            for at in range(count)
        )

    @property
    def redundant_layers(self) -> tuple[Layers, ...]:
        """What each of them holds besides: its successor's, the last one the first's (Bamboo, section 4);
        alone nothing.
        """
        held = self.held
        if not self.redundant or len(held) < 2:
            return (Layers(),) * len(held)
        return (*held[1:], held[0])

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What the blocks of each of its devices, or of those that share a stage, compute again."""
        return tuple(stage.recompute for stage in self.stages[: len(self.stages) // self.chunks])

    def time_s(self, num_micro_batches: int) -> float:
        """Modelled makespan in seconds of ``num_micro_batches`` micro-batches (0 for none)."""
        if num_micro_batches == 0:
            return 0.0
        return self.fill_s + (num_micro_batches - 1) * self.period_s


class Segment(msgspec.Struct, frozen=True):
    """One hop of a route: ``device`` computes ``layers``. A route may come back to a device."""

    device: str
    layers: Range


NOTHING, FORWARD, BACKWARD, WEIGHTS = range(4)
"""How far a hop got with a micro-batch: BACKWARD: the gradient of its input was sent back; WEIGHTS: all is in
the sums.
"""


class Route(msgspec.Struct, frozen=True):
    """Who computes micro-batch ``micro_batch``, layer by layer, in ``attempt``.

    ``attempt`` is the epoch that made the route, so it never repeats. ``mask`` names the layers whose weight
    gradients this attempt adds; ``None`` means all of them. Layers outside the mask only pass activations and
    their gradients through. With ``reached`` (for every hop) it goes on with what was done in attempt
    ``resumes``; what a hop there got to is not done again. ``redone``: per hop how much of its work was done
    once (NOTHING, FORWARD, or BACKWARD for gradients too); without it, all.
    """

    micro_batch: int
    attempt: int
    segments: tuple[Segment, ...]
    mask: tuple[int, ...] | None = None
    resumes: int = -1
    reached: tuple[int, ...] = ()
    redone: tuple[int, ...] = ()

    def again(self, position: int) -> int:
        """How much of the hop's work was done once, as far as is known."""
        if self.mask is None:
            return NOTHING
        return self.redone[position] if self.redone else BACKWARD

    def reached_at(self, position: int) -> int:
        """How far hop ``position`` was when this attempt was made."""
        return self.reached[position] if self.reached else NOTHING

    def touches(self, devices: Iterable[str]) -> bool:
        """Whether any hop lies on one of ``devices``."""
        named = frozenset(devices)
        return any(segment.device in named for segment in self.segments)

    def wants(self, layer: int) -> bool:
        """Whether this attempt adds the weight gradients of ``layer``."""
        return self.mask is None or layer in self.mask


class HopState(msgspec.Struct, frozen=True):
    """How far hop ``position`` of a micro-batch's route (of ``attempt``) is on its device, and what it still
    has of what it sent.

    ``reached``: NOTHING, FORWARD, BACKWARD (the gradient was sent back) or WEIGHTS. ``has_input``: what it
    waits for has arrived. ``has_output``: the activations that it sent on; ``has_gradient``: the gradient
    that it sent back.
    """

    micro_batch: int
    attempt: int
    position: int
    reached: int
    has_input: bool = False
    has_output: bool = False
    has_gradient: bool = False


class Pipeline(msgspec.Struct, frozen=True):
    """A template placed on named nodes, with its share of the micro-batches."""

    nodes: tuple[str, ...]
    segments: tuple[Segment, ...]
    micro_batches: tuple[int, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Its devices, in the order in which a micro-batch first comes to them."""
        return tuple(dict.fromkeys(segment.device for segment in self.segments))

    @property
    def chunks(self) -> int:
        """How many of the segments each device has."""
        return len(self.segments) // len(self.devices)


class Plan(msgspec.Struct, frozen=True):
    """All pipelines of a job. ``idle`` nodes are members without a place, which ``reason`` explains.

    ``step_s`` is the modelled time of one step in seconds. ``vacant``: devices that segments name and that
    nobody has now; holders of the same layers in other pipelines compute what these would.
    ``redundant``: device -> the layers that it holds besides those of its segments. ``recompute``: device ->
    what its blocks compute again in the backward, where that is not "none".
    """

    pipelines: tuple[Pipeline, ...]
    idle: tuple[str, ...] = ()
    step_s: float = 0.0
    reason: str = ""
    vacant: tuple[str, ...] = ()
    redundant: dict[str, Layers] = msgspec.field(
        default_factory=dict, name="shadows"
    )  # its name on disk and wire
    recompute: dict[str, Recompute] = msgspec.field(default_factory=dict)

    def modes_of(self, pipeline: Pipeline) -> tuple[Recompute, ...]:
        """What the device of each of its segments computes again."""
        return tuple(self.recompute.get(segment.device, "none") for segment in pipeline.segments)

    def living_recompute(self) -> dict[str, Recompute]:
        """``recompute`` without those of vacant places."""
        gone = frozenset(self.vacant)
        return {device: mode for device, mode in self.recompute.items() if device not in gone}

    def living_redundant(self) -> dict[str, Layers]:
        """``redundant`` without those of vacant places."""
        gone = frozenset(self.vacant)
        return {device: layers for device, layers in self.redundant.items() if device not in gone}

    def holdings(self) -> dict[str, Layers]:
        """Device -> the layers it holds. Vacant places hold nothing."""
        gone = frozenset(self.vacant)
        held = holdings_of(s for p in self.pipelines for s in p.segments if s.device not in gone)
        for device, layers in self.living_redundant().items():
            held[device] = held[device].and_those(layers)
        return held

    def copies(self) -> int:
        """How many nodes hold the layer that fewest hold."""
        if not (self.redundant or self.vacant):
            return len(self.pipelines)
        held: dict[int, set[str]] = {
            layer: set() for p in self.pipelines for s in p.segments for layer in s.layers.layers()
        }
        for device, layers in self.holdings().items():
            for layer in layers.layers():
                held[layer].add(node_of(device))
        return min(map(len, held.values()), default=0)

    def nodes(self) -> tuple[str, ...]:
        """Every node that has a place, in pipeline order."""
        if not self.vacant:
            return tuple(node for p in self.pipelines for node in p.nodes)
        there = {node_of(device) for device in self.holdings()}
        return tuple(node for p in self.pipelines for node in p.nodes if node in there)


class Transfer(msgspec.Struct, frozen=True):
    """Copy the whole training state of ``layer`` from ``source`` to ``target`` (devices)."""

    layer: int
    source: str
    target: str
    num_bytes: int


class Layout(msgspec.Struct, frozen=True):
    """What is deployed: who holds which layers, and the standing route of every micro-batch.

    ``epoch`` names the layout; the attempts of its routes equal it. ``redundant``: what of ``holdings`` a
    device holds for the case that another one dies: no route asks it to compute these, it takes part in their
    reduce and update alone. ``recompute``: device -> what its blocks compute again in the backward, where
    that is not "none".

    ``devices_per_stage``: with more than one, so many neighbouring devices of a node hold the state of the
    same layers between them, each the shard of its *rank*: a *shard group* (``worker.sharding``). Each of
    them computes micro-batches of its own, for which it gathers weights from the others and sends them their
    parts of the gradients. A group that has lost a device computes nothing until the next layout, and those
    who are left keep their shards up to date.
    """

    epoch: int
    num_layers: int
    holdings: dict[str, Layers]
    routes: tuple[Route, ...]
    redundant: dict[str, Layers] = msgspec.field(
        default_factory=dict, name="shadows"
    )  # its name on disk and wire
    recompute: dict[str, Recompute] = msgspec.field(default_factory=dict)
    devices_per_stage: int = 1

    def holders(self, layer: int) -> tuple[str, ...]:
        """The devices that hold ``layer``, or a shard of it, in name order."""
        return tuple(sorted(d for d, layers in self.holdings.items() if layer in layers))

    def copies(self, gone: Iterable[str] = ()) -> tuple[int, ...]:
        """Live copies of each layer, or of the shard of it that has fewest, when the devices ``gone`` are not
        counted.
        """
        lost = frozenset(gone)
        counts = [[0] * self.num_layers for _ in range(self.devices_per_stage)]
        for device, layers in self.holdings.items():
            if device not in lost:
                count = counts[self.rank(device)]
                for layer in layers.layers():
                    count[layer] += 1
        return tuple(map(min, zip(*counts, strict=True)))

    def rank(self, device: str) -> int:
        """Which shard of its layers ``device`` holds: 0 where stages have one device."""
        return shard_rank(device, self.devices_per_stage)

    def group(self, device: str) -> tuple[str, ...]:
        """The devices that hold the layers of ``device`` between them, by rank, itself among them."""
        return shard_group(device, self.devices_per_stage)

    def unable(self, dead: Iterable[str]) -> frozenset[str]:
        """The ``dead``, and all whose group has lost one of them: no route may touch these."""
        if self.devices_per_stage == 1:
            return frozenset(dead)
        return frozenset(fellow for device in dead for fellow in self.group(device))

    def lost(self, dead: Iterable[str]) -> tuple[int, ...]:
        """The layers that nobody can compute without the ``dead``: every group that holds them has lost a
        device.
        """
        # Shards of several broken groups may be all of a layer between them, and yet no round can end. So
        # many devices at once are more losses than copies are kept for. (D-recovery-030)
        return tuple(layer for layer, copies in enumerate(self.copies(self.unable(dead))) if not copies)


class Detours(msgspec.Struct, frozen=True):
    """From ``round`` on ``routes`` replace the layout's routes of their micro-batches; until then ``before``
    does.

    ``before`` are the routes of the detours that were in force when these were decided: who is still in the
    round of that decision goes by them. Attempts are the epochs that made the routes.
    """

    round: int
    routes: tuple[Route, ...]
    before: tuple[Route, ...] = ()

    def standing(self, round_: int) -> tuple[Route, ...]:
        """The routes that replace the layout's in ``round_``."""
        return self.routes if round_ >= self.round else self.before


def holdings_of(segments: Iterable[Segment]) -> dict[str, Layers]:
    """Device -> the layers of all its hops in ``segments``, which has each of them once."""
    held: dict[str, tuple[Range, ...]] = {}
    for segment in segments:
        held[segment.device] = (*held.get(segment.device, ()), segment.layers)
    return {device: Layers.of(*ranges) for device, ranges in held.items()}


def node_of(device: str) -> str:
    """The node of device ``"<node>/<index>"``."""
    return device.rpartition("/")[0]


def device_name(node: str, index: int) -> str:
    """The name of device ``index`` of ``node``."""
    return f"{node}/{index}"


def shard_rank(device: str, devices_per_stage: int) -> int:
    """The place of ``device`` among those of its shard group: neighbours on a node, by index."""
    return int(device.rpartition("/")[2]) % devices_per_stage if devices_per_stage > 1 else 0


def shard_group(device: str, devices_per_stage: int) -> tuple[str, ...]:
    """All devices of the shard group of ``device``, by rank."""
    if devices_per_stage == 1:
        return (device,)
    node, _, index = device.rpartition("/")
    first = int(index) // devices_per_stage * devices_per_stage
    return tuple(device_name(node, number) for number in range(first, first + devices_per_stage))


def standing_routes(layout: Layout, detours: Detours | None, round_: int) -> tuple[Route, ...]:
    """Who computes which micro-batch in ``round_`` if nothing more fails, by micro-batch.

    The same on every device and in the daemon, which freeze and repair by it.
    """
    if detours is None:
        return layout.routes
    instead = {route.micro_batch: route for route in detours.standing(round_)}
    return tuple(instead.get(route.micro_batch, route) for route in layout.routes)


def tolerance(copies: Mapping[int, int] | Iterable[int]) -> int:
    """How many simultaneous device losses leave a copy of every layer: fewest copies minus one."""
    counts = copies.values() if isinstance(copies, Mapping) else copies
    return min(counts, default=0) - 1
