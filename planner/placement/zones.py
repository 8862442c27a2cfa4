"""Puts neighbours into different zones: a device and the one that holds its layers should not fail together
(Bamboo, NSDI'23, section 4).

Owns the order of nodes that can be exchanged at no cost, since they hold the same. Does not own who is in
which pipeline otherwise (``transfer``), nor which vacant place is filled (``filling``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from oobleckd.planner.plan import Layers, node_of

Nodes = tuple[str, ...]
_Kind = tuple[tuple[str, Layers], ...]
_Place = tuple[list[str], int]  # a ring, and where in it


def same_zone(node: str, ring: Sequence[str], at: int, zones: Mapping[str, str]) -> int:
    """How many of the nodes beside place ``at`` of ``ring`` are in the zone of ``node``. A node without a
    zone is in one of its own.
    """
    if node not in zones:
        return 0
    beside = {(at - 1) % len(ring), (at + 1) % len(ring)} - {at}
    return sum(zones.get(ring[one]) == zones[node] for one in beside)


def exchanged(
    rings: Sequence[Nodes], zones: Mapping[str, str], holdings: Mapping[str, Layers], may: Collection[str]
) -> tuple[Nodes, ...]:
    """``rings`` with pairs of the nodes ``may`` that hold the same exchanged, for as long as that leaves
    fewer neighbours in one zone. All others stay, so pairs of them that are in one remain. For the few that
    take vacant places: it looks at every pair.
    """
    found = [list(ring) for ring in rings]
    kinds = _kinds([tuple(may)], holdings)
    places = [(ring, at) for ring in found for at, node in enumerate(ring) if node in kinds]
    # Of one kind they remain, whoever of them is where.
    pairs = [(one, other) for one, other in combinations(places, 2) if kinds[_at(one)] == kinds[_at(other)]]
    while sum(_exchange(one, other, zones) for one, other in pairs):
        pass  # with fewer of them each time
    return tuple(map(tuple, found))


def _at(place: _Place) -> str:
    ring, at = place
    return ring[at]


def _exchange(one: _Place, other: _Place, zones: Mapping[str, str]) -> bool:
    """Exchange who is there, where fewer neighbours are in one zone then."""
    before = _alike(one, zones) + _alike(other, zones)
    _swap(one, other)
    if _alike(one, zones) + _alike(other, zones) < before:
        return True
    _swap(one, other)
    return False


def _alike(place: _Place, zones: Mapping[str, str]) -> int:
    return same_zone(_at(place), *place, zones)


def _swap(one: _Place, other: _Place) -> None:
    (ring, at), (ring_, at_) = one, other
    ring[at], ring_[at_] = ring_[at_], ring[at]


def apart(
    placed: Sequence[Nodes],
    zones: Mapping[str, str],
    holdings: Mapping[str, Layers],
    spare: Sequence[str] = (),
) -> tuple[Nodes, ...]:
    """``placed`` with nodes that hold the same exchanged, so that nodes beside each other are in different
    ``zones`` as far as that goes. A pipeline is a ring: its last node is beside the first. ``spare``: nodes
    without a place, who may take that of one who holds the same.

    Greedy: into each place a node of the zone that has most left, of those that its neighbours are not in,
    nor the next place has to take. A node without a zone is in one of its own. Where nobody has one nothing
    changes.
    """
    if not any(node in zones for nodes in placed for node in nodes):
        return tuple(placed)
    groups = (*placed, tuple(spare))
    kinds = _kinds(groups, holdings)
    pools: dict[_Kind, dict[str, deque[str]]] = {}
    for nodes in groups:
        for node in nodes:
            pool = pools.setdefault(kinds[node], {})
            pool.setdefault(zones.get(node, f"of {node} alone"), deque()).append(node)
    return tuple(_ring([pools[kinds[node]] for node in nodes], zones) for nodes in placed)


def _ring(pools: Sequence[dict[str, deque[str]]], zones: Mapping[str, str]) -> Nodes:
    ring: list[str] = []
    last = len(pools) - 1
    for place, pool in enumerate(pools):
        beside = [ring[-1]] if ring else []
        beside += ring[:1] if place == last else []
        taken = [zones.get(node) for node in beside]
        for later in _to_come(place, last):
            following = [zone for zone, left in pools[later].items() if left]
            taken += following if len(following) == 1 else []
        open_ = [zone for zone, left in pool.items() if left]
        zone = min(open_, key=lambda zone: (taken.count(zone), -len(pool[zone])))
        ring.append(pool[zone].popleft())
    return tuple(ring)


def _to_come(place: int, last: int) -> list[int]:
    """The places beside ``place`` that are filled after it."""
    beside = {place + 1, last} if place == 0 else {place + 1}
    return sorted(other for other in beside if place < other <= last)


def _kinds(placed: Sequence[Nodes], holdings: Mapping[str, Layers]) -> dict[str, _Kind]:
    """Node -> what its devices hold, by the end of their names."""
    held: dict[str, list[tuple[str, Layers]]] = {node: [] for nodes in placed for node in nodes}
    for device, layers in sorted(holdings.items()):
        if (node := node_of(device)) in held:
            held[node].append((device.removeprefix(node), layers))
    return {node: tuple(each) for node, each in held.items()}
