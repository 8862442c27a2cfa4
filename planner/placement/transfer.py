"""Chooses which node takes which place, and who copies which layer to whom.

Owns placement and copies: the nodes stay where they lack the fewest bytes, holders share the sending.
Does not choose sizes (``instantiate``) nor when copies happen (the daemon).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.placement.spread import Copy, spread
from oobleckd.planner.plan import Layers, Recompute, Segment, Template, Transfer, device_name, node_of
from oobleckd.planner.profile import Profile
from oobleckd.planner.templates.template import node_stages

Holdings = Mapping[str, Layers]
Place = tuple[Layers, ...]  # what the devices of one node hold, by index

NOTHING = Layers()

T = TypeVar("T")


def places(template: Template) -> tuple[Place, ...]:
    """For every node of ``template`` in order what its devices hold, redundant layers too."""
    return _by_node(
        template,
        [held.and_those(more) for held, more in zip(template.held, template.redundant_layers, strict=True)],
    )


def computed(template: Template) -> tuple[Place, ...]:
    """For every node of ``template`` in order what its devices compute."""
    return _by_node(template, template.held)


def _by_node(template: Template, of_devices: Iterable[T]) -> tuple[tuple[T, ...], ...]:
    by_device = iter(of_devices)
    return tuple(tuple(next(by_device) for _ in range(count)) for count in node_stages(template))


def segments_on(template: Template, nodes: Sequence[str]) -> tuple[Segment, ...]:
    """The hops of ``template`` placed on ``nodes`` in order."""
    return tuple(
        sorted(
            (
                Segment(device_name(node, index), layers)
                for node, place in zip(nodes, computed(template), strict=True)
                for index, held in enumerate(place)
                for layers in held.ranges
            ),
            key=lambda segment: segment.layers,
        )
    )


def redundant_on(members: Sequence[Template], placed: Sequence[Sequence[str]]) -> dict[str, Layers]:
    """Device -> what it holds for others, of pipelines of the templates ``members`` on the nodes
    ``placed``.
    """
    return {
        device_name(node, index): layers
        for template, nodes in zip(members, placed, strict=True)
        for node, place in zip(nodes, _by_node(template, template.redundant_layers), strict=True)
        for index, layers in enumerate(place)
        if layers.ranges
    }


def recompute_on(members: Sequence[Template], placed: Sequence[Sequence[str]]) -> dict[str, Recompute]:
    """Device -> what its blocks compute again, where that is anything, of pipelines of the templates
    ``members`` on the nodes ``placed``.
    """
    return {
        device_name(node, index): mode
        for template, nodes in zip(members, placed, strict=True)
        for node, modes in zip(nodes, _by_node(template, template.recompute), strict=True)
        for index, mode in enumerate(modes)
        if mode != "none"
    }


def holds(template: Template, nodes: Sequence[str], holdings: Holdings) -> bool:
    """Whether ``nodes`` hold, in order, exactly what ``template`` puts there: nothing to copy."""
    return len(nodes) == template.num_nodes and all(
        holdings.get(device_name(node, index)) == layers
        for node, place in zip(nodes, places(template), strict=True)
        for index, layers in enumerate(place)
    )


def place(
    members: Sequence[Template], nodes: Collection[str], holdings: Holdings, profile: Profile
) -> tuple[tuple[str, ...], ...]:
    """Nodes for each pipeline of ``members``, in order, so that the fewest bytes are copied.

    ``nodes``: at least as many as places; on the way of a recovery the touched ones only. A node that
    holds exactly what a place needs stays in one like it, the others are a minimum-cost assignment on
    the bytes each lacks. Among nodes that hold the same, earlier places get earlier names.
    """
    slots = [slot for template in members for slot in places(template)]
    width = max(len(slot) for slot in slots)
    names = sorted(nodes)
    held = {n: tuple(holdings.get(device_name(n, i), NOTHING) for i in range(width)) for n in names}
    # By the triangle inequality nothing is lost, and what is left for the assignment is small: 1,024 nodes
    # are placed in milliseconds. (D-planner-001)
    chosen = _staying(slots, held, width)
    taken = frozenset(chosen.values())
    free = [name for name in names if name not in taken]
    open_slots = [slot for slot in range(len(slots)) if slot not in chosen]
    if open_slots:
        lacking = _lacking_bytes([held[name] for name in free], [slots[slot] for slot in open_slots], profile)
        rows, columns = linear_sum_assignment(lacking)
        chosen |= {open_slots[column]: free[row] for row, column in zip(rows, columns, strict=True)}
    order = iter(_in_name_order(slots, [chosen[slot] for slot in range(len(slots))], held))
    return tuple(tuple(next(order) for _ in range(template.num_nodes)) for template in members)


def _staying(slots: Sequence[Place], held: Mapping[str, Place], width: int) -> dict[int, str]:
    """Slot -> a node that holds exactly what goes there, as far as there are such nodes.

    Some best assignment has them there: swapping one back costs nothing in its place, and elsewhere at
    most what it saves, since bytes lacked obey the triangle inequality.
    """
    waiting: dict[Place, list[str]] = {}
    for node in sorted(held, reverse=True):
        waiting.setdefault(held[node], []).append(node)
    chosen = {}
    for number, slot in enumerate(slots):
        queue = waiting.get(slot + (NOTHING,) * (width - len(slot)))
        if queue:
            chosen[number] = queue.pop()
    return chosen


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
        for layers in wanted.ranges:
            total += before[layers.stop] - before[layers.start]
            for had in held.ranges:
                start, stop = max(had.start, layers.start), min(had.stop, layers.stop)
                total -= before[stop] - before[start] if start < stop else 0
    return total


def transfers(wanted: Mapping[str, Layers], holdings: Holdings, profile: Profile) -> tuple[Transfer, ...]:
    """Copies that give every device of ``wanted`` its layers, from ``holdings``: each layer once, from one
    holder, so no fewer bytes do. Senders share the work (``spread``).

    Layers that nobody holds get no transfer. Sorted by target and layer.
    """
    lacking = [
        (device, layer)
        for device, layers in sorted(wanted.items())
        if (had := holdings.get(device, NOTHING)) != layers
        for layer in layers.layers()
        if layer not in had
    ]
    holders = _holders({layer for _, layer in lacking}, holdings)
    weight = {layer: copy_bytes(profile.layers[layer]) for layer in holders}
    there = [(device, layer) for device, layer in lacking if holders[layer]]
    senders = spread([Copy(device, weight[layer], holders[layer]) for device, layer in there])
    return tuple(
        Transfer(layer, sender, device, weight[layer])
        for (device, layer), sender in zip(there, senders, strict=True)
    )


def _holders(layers: Collection[int], holdings: Holdings) -> dict[int, dict[str, tuple[str, ...]]]:
    """Layer -> node -> its devices that hold it, by name; the same object for layers held alike."""
    alike: dict[Layers, list[str]] = {}
    for device, held in holdings.items():
        alike.setdefault(held, []).append(device)
    found: dict[tuple[Layers, ...], dict[str, tuple[str, ...]]] = {}
    holders = {}
    for layer in sorted(layers):
        having = tuple(sorted(held for held in alike if layer in held))
        if having not in found:
            nodes: dict[str, tuple[str, ...]] = {}
            for device in sorted(device for held in having for device in alike[held]):
                nodes[node_of(device)] = (*nodes.get(node_of(device), ()), device)
            found[having] = nodes
        holders[layer] = found[having]
    return holders


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
