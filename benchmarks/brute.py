"""The planner's questions answered by trying everything: the referee of its tests and benchmark.

Small cases only. Written from the cost model's formulas, with nothing of the planner but its vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from oobleckd.planner.plan import Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import HeldBesides, LayerCost, Profile

Stages = tuple[tuple[int, int, int], ...]  # first layer, layer after the last, devices


@dataclass(frozen=True, slots=True)
class SplitCase:
    """A model to split for ``num_nodes`` nodes and ``share`` micro-batches."""

    setup: Setup
    num_nodes: int
    share: int


@dataclass(frozen=True, slots=True)
class SizesCase:
    """Pipelines to choose for ``num_nodes`` nodes; ``reduce_s`` by number of pipelines, or None."""

    templates: tuple[Template, ...]
    num_nodes: int
    f: int
    num_micro_batches: int
    reduce_s: tuple[float, ...] | None


def stages_time_s(profile: Profile, stages: Stages, share: int) -> float:
    """T(m) of 1F1B, term by term."""
    cuts = [profile.link_latency_s + c.output_bytes / profile.link_bytes_per_s for c in profile.layers[:-1]]
    cut_s = [0.0, *cuts, 0.0]
    times = []
    for i, j, devices in stages:
        alone = sum(layer.forward_s + layer.backward_s for layer in profile.layers[i:j])
        shared = sum(dict(layer.allreduce_s).get(devices, 0.0) for layer in profile.layers[i:j])
        times.append(alone / devices + 2 * shared)
    slowest = max(time + cut_s[i] + cut_s[j] for time, (i, j, _) in zip(times, stages, strict=True))
    return sum(times) + 2 * sum(cut_s[i] for i, _, _ in stages) + (share - 1) * slowest


def stages_need_bytes(setup: Setup, stages: Stages) -> int:
    """The least limit under which every device has memory for its stage in its place."""
    needs = []
    for place, (i, j, devices) in enumerate(stages):
        layers = setup.profile.layers[i:j]
        in_flight = min(len(stages) - place, setup.num_micro_batches)
        state = round((1 + setup.held.state_copies) * sum(layer.state_bytes for layer in layers))
        shared = state + in_flight * setup.profile.activation_bytes(range(i, j))
        needs.append(-(-shared // devices) + setup.profile.reserve_bytes + setup.held.device_bytes)
    return max(needs)


def every_split(
    num_layers: int, num_nodes: int, devices_per_node: int, counts: Sequence[int]
) -> Iterator[Stages]:
    """Every way to cut the layers into stages on all devices, no stage on two nodes; where stages have
    one device and layers are fewer than devices: a stage a layer.
    """
    if list(counts) == [1]:
        devices_of = [[1] * min(num_layers, num_nodes * devices_per_node)]
    else:
        node = list(_compositions(devices_per_node, counts))
        every = itertools.product(node, repeat=num_nodes)
        devices_of = [list(itertools.chain.from_iterable(nodes)) for nodes in every]
    for devices in devices_of:
        for inner in itertools.combinations(range(1, num_layers), len(devices) - 1):
            bounds = (0, *inner, num_layers)
            yield tuple((i, j, g) for (i, j), g in zip(itertools.pairwise(bounds), devices, strict=True))


def best_split_s(case: SplitCase, counts: Sequence[int]) -> float:
    """The least time of all splits that fit; inf if none does. ``counts``: devices a stage may have."""
    setup = case.setup
    splits = every_split(len(setup.profile.layers), case.num_nodes, setup.devices_per_node, counts)
    limit = setup.device_memory_bytes or math.inf
    fitting = (s for s in splits if stages_need_bytes(setup, s) <= limit)
    return min((stages_time_s(setup.profile, s, case.share) for s in fitting), default=math.inf)


def best_step_s(case: SizesCase) -> tuple[float, int]:
    """(least time of a step, fewest idle nodes) over all multisets of sizes and all shares; a pipeline
    without a micro-batch only where even the fewest pipelines are more than the micro-batches.
    """
    by_size = {template.num_nodes: template for template in case.templates}
    used, choices = case.num_nodes, []
    while not choices:
        choices = list(_multisets(used, min(by_size), max(by_size)))
        used -= 1
    r = min(case.f + 1, case.num_nodes // min(by_size))
    choices = [sizes for sizes in choices if len(sizes) >= r]
    busy = [sizes for sizes in choices if len(sizes) <= case.num_micro_batches]
    best_s = min(
        _slowest_s([by_size[size] for size in sizes], case.num_micro_batches)
        + (case.reduce_s[len(sizes)] if case.reduce_s else 0.0)
        for sizes in busy or choices
    )
    return best_s, case.num_nodes - used - 1


def _slowest_s(members: Sequence[Template], num_micro_batches: int) -> float:
    """The least slowest pipeline over all shares, at least one each where there are enough: the smallest
    time within which they take all.
    """
    least = 1 if num_micro_batches >= len(members) else 0
    times = sorted({t.time_s(m) for t in members for m in range(least, num_micro_batches + 1)})
    for time_s in times:
        most = [
            max((m for m in range(num_micro_batches + 1) if t.time_s(m) <= time_s), default=0)
            for t in members
        ]
        if min(most) >= least and sum(most) >= num_micro_batches:
            return time_s
    raise AssertionError("the slowest takes all of them at last")


def _multisets(total: int, smallest: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for size in range(smallest, min(largest, total) + 1):
        for rest in _multisets(total - size, size, largest):
            yield (size, *rest)


def _compositions(total: int, parts: Sequence[int]) -> Iterator[list[int]]:
    if total == 0:
        yield []
    for part in parts:
        if part <= total:
            for rest in _compositions(total - part, parts):
                yield [part, *rest]


def random_split_case(chance: random.Random) -> tuple[SplitCase, tuple[int, ...]]:
    """A small case, and the numbers of devices that its stages may have."""
    devices_per_node = chance.choice([1, 1, 2, 3, 4, 6])
    num_nodes = chance.randint(1, 3 if devices_per_node <= 2 else 2)
    if devices_per_node == 6:
        num_nodes = 1
    counts = [g for g in range(1, devices_per_node + 1) if devices_per_node % g == 0]
    largest = chance.choice(counts)
    counts = [g for g in counts if largest % g == 0]
    num_layers = chance.randint(num_nodes * devices_per_node // largest if largest > 1 else num_nodes, 7)
    whole = chance.random() < 0.5  # whole numbers make ties

    def seconds(most: int) -> float:
        return chance.randint(1, most) / 8 if whole else chance.uniform(0.1, most / 8)

    sharing = chance.choice([4, 30])  # where it is dear, more stages are cheaper, and memory forbids them
    layers = tuple(
        LayerCost(
            f"layer{i}",
            seconds(9),
            seconds(9),
            4,
            18 * chance.randint(1, 50),
            chance.choice([0, chance.randint(0, 400)]),
            chance.randint(0, 5),
            tuple((g, seconds(sharing)) for g in counts if g > 1),
        )
        for i in range(max(1, num_layers))
    )
    profile = Profile("", "", layers, 0.0625, 8.0, reserve_bytes=chance.randint(0, 100))
    held = HeldBesides(chance.choice([0, 0, 1]), chance.choice([0, 50]))
    most = chance.randint(1, 9)
    setup = Setup(profile, most, 0, 0, devices_per_node, 0, max_devices_per_stage=largest, held=held)
    if chance.random() < 0.7:
        setup = msgspec.structs.replace(
            setup, device_memory_bytes=_tight_limit(setup, num_nodes, counts, chance)
        )
    return SplitCase(setup, num_nodes, chance.randint(1, most)), tuple(counts)


def _tight_limit(setup: Setup, num_nodes: int, counts: Sequence[int], chance: random.Random) -> int:
    """A limit at which memory matters: just enough for some split, or a little less."""
    splits = list(every_split(len(setup.profile.layers), num_nodes, setup.devices_per_node, counts))
    limit = stages_need_bytes(setup, chance.choice(splits)) if splits else 500
    return limit - chance.choice([0, 0, 1])


def random_sizes_case(chance: random.Random) -> SizesCase:
    """A small case; the all-reduce, where there is one, may fall and rise."""
    n0 = chance.randint(1, 4)
    whole = chance.random() < 0.5

    def seconds(most: int) -> float:
        return chance.randint(1, most) / 8 if whole else chance.uniform(0.1, most / 8)

    templates = tuple(Template(n0 + k, 1, (), seconds(40), seconds(20)) for k in range(chance.randint(1, 6)))
    num_nodes = n0 + chance.randint(0, 14)
    reduce_s = tuple(chance.uniform(0, 0.5) for _ in range(num_nodes // n0 + 1))
    kind = chance.randint(0, 2)
    return SizesCase(
        templates,
        num_nodes,
        chance.choice([0, 0, 1, 3]),
        chance.choice([1, 2, 3, 5, 8, 13, 30]),
        None if kind == 0 else tuple(sorted(reduce_s)) if kind == 1 else reduce_s,
    )
