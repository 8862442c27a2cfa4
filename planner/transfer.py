"""Which node takes which place, and who copies which layer to whom.

Owns placement and copies: the nodes stay where they lack the fewest bytes, sources share the sending.
Does not choose sizes (``instantiate``) nor when copies happen (the daemon).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from planner.costs import copy_bytes
from planner.plan import Range, Segment, Template, Transfer, device_name, node_of
from planner.profile import Profile
from planner.template import node_stages

Holdings = Mapping[str, Range]
Place = tuple[Range, ...]  # what the devices of one node hold, by index


def places(template: Template) -> tuple[Place, ...]:
    """For every node of ``template`` in order the layers of its devices."""
    stages = iter(template.stages)
    return tuple(tuple(next(stages).layers for _ in range(count)) for count in node_stages(template))


def segments_on(template: Template, nodes: Sequence[str]) -> tuple[Segment, ...]:
    """The hops of ``template`` placed on ``nodes`` in order."""
    return tuple(
        Segment(device_name(node, index), layers)
        for node, place in zip(nodes, places(template), strict=True)
        for index, layers in enumerate(place)
    )


def holds(template: Template, nodes: Sequence[str], holdings: Holdings) -> bool:
    """Whether ``nodes`` hold, in order, exactly what ``template`` puts there: nothing to copy."""
    return len(nodes) == template.num_nodes and all(
        holdings.get(segment.device) == segment.layers for segment in segments_on(template, nodes)
    )


def place(
    members: Sequence[Template], nodes: Collection[str], holdings: Holdings, profile: Profile
) -> tuple[tuple[str, ...], ...]:
    """Nodes for each pipeline of ``members``, in order, so that the fewest bytes are copied.

    A minimum-cost assignment of nodes (at least as many as places) to places on the bytes each
    lacks. Among nodes that hold the same, earlier places get earlier names.
    """
    slots = [slot for template in members for slot in places(template)]
    width = max(len(slot) for slot in slots)
    names = sorted(nodes)
    held = {n: tuple(holdings.get(device_name(n, i), Range(0, 0)) for i in range(width)) for n in names}
    rows, columns = linear_sum_assignment(_lacking_bytes(list(held.values()), slots, profile))
    chosen = {int(column): names[row] for row, column in zip(rows, columns, strict=True)}
    order = iter(_in_name_order(slots, [chosen[slot] for slot in range(len(slots))], held))
    return tuple(tuple(next(order) for _ in range(template.num_nodes)) for template in members)


def _in_name_order(slots: Sequence[Place], chosen: Sequence[str], held: Mapping[str, Place]) -> list[str]:
    """``chosen`` (a node for each slot) with equal nodes and equal slots swapped into name order.

    Costs nothing, and makes the answer independent of how the assignment breaks ties.
    """
    kinds: dict[Place, list[Place]] = {}
    names: dict[Place, list[str]] = {}
    for slot, node in zip(slots, chosen, strict=True):
        kinds.setdefault(slot, []).append(held[node])
    for node in sorted(held):
        names.setdefault(held[node], []).append(node)
    waiting = {slot: iter(sorted(kind)) for slot, kind in kinds.items()}
    queues = {kind: iter(queue) for kind, queue in names.items()}
    return [next(queues[next(waiting[slot])]) for slot in slots]


def _lacking_bytes(held: Sequence[Place], slots: Sequence[Place], profile: Profile) -> NDArray[np.int64]:
    """Entry [node, slot]: bytes to copy to put the node there. Computed once for equal pairs."""
    kinds_of_node, kinds_of_slot = sorted(set(held)), sorted(set(slots))
    before = list(accumulate((copy_bytes(layer) for layer in profile.layers), initial=0))
    table = np.array([[_lack(have, want, before) for want in kinds_of_slot] for have in kinds_of_node])
    row = {kind: i for i, kind in enumerate(kinds_of_node)}
    column = {kind: i for i, kind in enumerate(kinds_of_slot)}
    lacking: NDArray[np.int64] = table[[row[h] for h in held]][:, [column[s] for s in slots]]
    return lacking


def _lack(have: Place, want: Place, before: Sequence[int]) -> int:
    """Bytes of the layers in ``want`` that the same device does not have."""
    total = 0
    for held, wanted in zip(have, want, strict=False):
        start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        shared = before[stop] - before[start] if start < stop else 0
        total += before[wanted.stop] - before[wanted.start] - shared
    return total


def transfers(wanted: Mapping[str, Range], holdings: Holdings, profile: Profile) -> tuple[Transfer, ...]:
    """Copies that give every device of ``wanted`` its layers, from ``holdings``.

    Layers with few holders first, then large ones, each from the holder that has sent least so far,
    then by name: sources are spread evenly. Layers that nobody holds get no transfer. Sorted by target and layer.
    """
    lacking = [
        (layer, device)
        for device, layers in sorted(wanted.items())
        for layer in layers.layers()
        if layer not in holdings.get(device, Range(0, 0))
    ]
    holders: dict[int, list[str]] = {layer: [] for layer, _ in lacking}
    for device, layers in sorted(holdings.items()):
        for layer in layers.layers():
            if layer in holders:
                holders[layer].append(device)
    weight = {layer: copy_bytes(profile.layers[layer]) for layer in holders}
    sent: dict[str, int] = dict.fromkeys(holdings, 0)
    copies = []
    for layer, target in sorted(lacking, key=lambda copy: (len(holders[copy[0]]), -weight[copy[0]], *copy)):
        if holders[layer]:
            source = min(holders[layer], key=lambda device: (sent[device], device))
            sent[source] += weight[layer]
            copies.append(Transfer(layer, source, target, weight[layer]))
    return tuple(sorted(copies, key=lambda copy: (copy.target, copy.layer)))


def copy_s(copies: Sequence[Transfer], profile: Profile) -> float:
    """Modelled time of ``copies`` in seconds: all at once, the busiest node's link decides."""
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for copy in copies:
        source, target = node_of(copy.source), node_of(copy.target)
        if source != target:
            sent[source] = sent.get(source, 0) + copy.num_bytes
            received[target] = received.get(target, 0) + copy.num_bytes
    busiest = max((*sent.values(), *received.values()), default=0)
    return profile.link_latency_s + busiest / profile.link_bytes_per_s if busiest else 0.0
