"""Chooses the nodes that a plan may use: asked several times a step, and after each word of thousands of
nodes that come at once.

Owns the rule, and remembering its answer: only nodes of which something has changed since are looked at
again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from oobleckd.core.membership import Membership, Node
from oobleckd.planner.placement.zones import same_zone
from oobleckd.planner.plan import node_of


class Terms(NamedTuple):
    """What a plan asks of nodes: at least so many devices (``min_devices``), at most so many of them
    (``max_nodes``, 0 for any). ``holders``: devices whose nodes stay through a short disconnection, and that
    ``max_nodes`` prefers. ``out``: nodes that are not wanted. ``empty``: others must hold nothing. ``rings``:
    the pipelines at work, with names for vacant places too, where neighbours are to be in different zones.
    ``compile``: devices have to compile.
    """

    min_devices: int
    max_nodes: int
    holders: tuple[str, ...]
    out: tuple[str, ...]
    empty: bool
    rings: tuple[tuple[str, ...], ...] = ()
    compile: bool = False


@dataclass(slots=True)
class Usable:
    """The answer to the last question. ``fit``: in name order, all that fit."""

    members: Membership
    terms: Terms | None = None
    fit: list[str] = field(default_factory=list)
    _inside: frozenset[str] = frozenset()
    _out: frozenset[str] = frozenset()
    _found: tuple[str, ...] = ()

    def under(self, terms: Terms) -> tuple[str, ...]:
        """The nodes that a plan should use now, in name order. None that has notice of its end."""
        touched = self.members.touched
        if terms != self.terms:
            self.terms, self._out = terms, frozenset(terms.out)
            self._inside = frozenset(node_of(device) for device in terms.holders)
            self.fit = sorted(node.name for node in self.members.nodes.values() if self._fits(node))
        elif touched:
            for name in touched:
                self._look_again(name)
        else:
            return self._found
        touched.clear()
        self._found = tuple(self._preferred())
        return self._found

    def _look_again(self, name: str) -> None:
        at = bisect_left(self.fit, name)
        was, fits = self.fit[at : at + 1] == [name], self._fits(self.members.nodes[name])
        if fits and not was:
            self.fit.insert(at, name)
        elif was and not fits:
            del self.fit[at]

    def _preferred(self) -> list[str]:
        assert self.terms is not None
        if not self.terms.max_nodes or len(self.fit) <= self.terms.max_nodes:
            return self.fit
        staying = [name for name in self.fit if name in self._inside][: self.terms.max_nodes]
        others = [name for name in self.fit if name not in self._inside]
        return sorted([*staying, *self._first(others, self.terms.max_nodes - len(staying), staying)])

    def _first(self, others: list[str], count: int, staying: Iterable[str]) -> list[str]:
        """``count`` of the ``others``: for each vacant place one with the fewest neighbours in its own zone,
        the rest in name order.
        """
        chosen: list[str] = []
        # Which standby nodes a job with max_nodes gets is where zones count most, and a policy is told of
        # no more nodes than it may use. (D-policies-024)
        zones = {name: node.zone for name, node in self.members.nodes.items() if node.zone}
        for ring, at in self._vacant(frozenset(staying))[: count if zones else 0]:
            alike = [same_zone(name, ring, at, zones) for name in others]
            chosen.append(others.pop(alike.index(min(alike))))
        return [*chosen, *others][:count]

    def _vacant(self, staying: Collection[str]) -> list[tuple[tuple[str, ...], int]]:
        """The places whose nodes do not stay: their rings, and where in them."""
        assert self.terms is not None
        return [
            (ring, at) for ring in self.terms.rings for at, name in enumerate(ring) if name not in staying
        ]

    def _fits(self, node: Node) -> bool:
        assert self.terms is not None
        if len(node.devices) < self.terms.min_devices or node.name in self._out:
            return False
        if not node.alive or node.notice:
            return False
        if self.terms.compile and node.no_compiler:
            return False
        return node.name in self._inside or (node.present and not (self.terms.empty and node.releasing))
