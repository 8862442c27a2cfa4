"""Neighbours in different zones: what fails together should not be a device and its shadow (Bamboo, NSDI'23, section 4).

Owns the order of nodes that can be exchanged at no cost, since they hold the same. Does not own who is in which pipeline
otherwise (``transfer``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from planner.plan import Layers, node_of

Nodes = tuple[str, ...]
_Kind = tuple[tuple[str, Layers], ...]


def apart(
    placed: Sequence[Nodes], zones: Mapping[str, str], holdings: Mapping[str, Layers]
) -> tuple[Nodes, ...]:
    """``placed`` with nodes that hold the same exchanged, so that nodes beside each other are in different ``zones`` as far as
    that goes. A pipeline is a ring: its last node is beside the first.

    Greedy: into each place a node of the zone that has most left, of those that its neighbours are not in, nor the next place has to take. A node without a zone is
    in one of its own. Where nobody has one nothing changes.
    """
    if not any(node in zones for nodes in placed for node in nodes):
        return tuple(placed)
    kinds = _kinds(placed, holdings)
    pools: dict[_Kind, dict[str, deque[str]]] = {}
    for nodes in placed:
        for node in nodes:
            pool = pools.setdefault(kinds[node], {})
            pool.setdefault(zones.get(node, f"of {node} alone"), deque()).append(node)
    return tuple(_ring([pools[kinds[node]] for node in nodes], zones) for nodes in placed)


def _ring(pools: Sequence[dict[str, deque[str]]], zones: Mapping[str, str]) -> Nodes:
    ring: list[str] = []
    for place, pool in enumerate(pools):
        beside = [ring[-1]] if ring else []
        beside += ring[:1] if place == len(pools) - 1 else []
        taken = [zones.get(node) for node in beside]
        if place + 1 < len(pools):
            following = [zone for zone, left in pools[place + 1].items() if left]
            taken += following if len(following) == 1 else []
        open_ = [zone for zone, left in pool.items() if left]
        zone = min(open_, key=lambda zone: (taken.count(zone), -len(pool[zone])))
        ring.append(pool[zone].popleft())
    return tuple(ring)


def _kinds(placed: Sequence[Nodes], holdings: Mapping[str, Layers]) -> dict[str, _Kind]:
    """Node -> what its devices hold, by the end of their names."""
    held: dict[str, list[tuple[str, Layers]]] = {node: [] for nodes in placed for node in nodes}
    for device, layers in sorted(holdings.items()):
        if (node := node_of(device)) in held:
            held[node].append((device.removeprefix(node), layers))
    return {node: tuple(each) for node, each in held.items()}
