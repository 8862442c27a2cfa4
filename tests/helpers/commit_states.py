"""States of the commit model: who holds what, what a device keeps of a round, what is on the wires. Tuples
all, so that states can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from oobleckd.core.decide import Verdict
from oobleckd.planner.plan import Detours, Layers, Layout, Range, Route, Segment, standing_routes

DEVICES = ("A", "B", "C")


@dataclass(frozen=True)
class Topology:
    """Who holds which layer; ``routes``: the devices of each micro-batch, by layer."""

    held: dict[str, int]
    routes: tuple[tuple[str, ...], ...]

    @cached_property
    def uses(self) -> list[tuple[int, ...]]:
        """One bucket a layer."""
        return [(layer,) for layer in range(len(self.routes[0]))]

    @cached_property
    def micro_batches(self) -> frozenset[int]:
        """All of a step."""
        return frozenset(range(len(self.routes)))

    @cached_property
    def layout(self) -> Layout:
        """As the daemon deployed it at epoch 1."""
        routes = tuple(
            Route(mb, 1, tuple(Segment(d, Range(i, i + 1)) for i, d in enumerate(devices)))
            for mb, devices in enumerate(self.routes)
        )
        holdings = {device: Layers.of(Range(layer, layer + 1)) for device, layer in self.held.items()}
        return Layout(1, len(self.uses), holdings, routes)

    def owed(
        self, device: str, dead: frozenset[str] = frozenset(), detours: bytes = b"", round_: int = 0
    ) -> frozenset[int]:
        """What a device computes in a round on standing routes that touch no dead device."""
        return frozenset(
            route.micro_batch
            for route in self.standing(detours, round_)
            if route.touches([device]) and not route.touches(dead)
        )

    def standing(self, detours: bytes, round_: int) -> tuple[Route, ...]:
        """The standing routes of a round."""
        found = msgspec.msgpack.decode(detours, type=Detours) if detours else None
        return standing_routes(self.layout, found, round_)


REPLICATED_AND_NOT = Topology({"A": 0, "B": 0, "C": 1}, (("A", "C"), ("B", "C")))
THREE_REPLICAS = Topology({"A": 0, "B": 0, "C": 0}, (("A",), ("B",), ("C",)))
WITH_A_REDUNDANT_LAYER = Topology({"A": 0, "B": 0, "C": 1}, (("A", "C"), ("A", "C")))
"""``B`` holds layer 0 and has no route: it contributes nothing, reduces, votes and updates."""


class Dev(msgspec.Struct, frozen=True, cache_hash=True):
    """One device: what the engine keeps of a round, and its frozen ``Commit``."""

    epoch: int = 1
    answered: int = 1
    round: int = 0
    live: frozenset[str] = frozenset(DEVICES)
    voted: bool = False
    last: bool = False
    votes: frozenset[str] = frozenset()
    early: frozenset[tuple[int, int, str]] = frozenset()
    owed: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    sent: bool = False
    got: frozenset[tuple[str, frozenset[int]]] = frozenset()
    ahead: frozenset[tuple[int, int, str, frozenset[int]]] = frozenset()
    donor: str = ""
    reduced: bool = False
    holding: bool = False
    hold_next: bool = False
    dead: frozenset[str] = frozenset()
    detours: bytes = b""
    weights: tuple[int, str] = (0, "")
    saved: tuple[int, str] | None = None
    copies: frozenset[tuple[int, str, frozenset[int]]] = frozenset()


@dataclass(frozen=True)
class Staggered:
    """Whether devices may update before all votes are in, and whether every round then goes through as they
    thought.
    """

    on: bool = False
    through: bool = True


FLUSHED = Staggered()


@dataclass(frozen=True, eq=False)
class Setting:
    """What is the same in all states of a walk. ``go_on``: the job goes on without its dead; ``copying``:
    sums are copied to the next holder.
    """

    topology: Topology = REPLICATED_AND_NOT
    staggered: Staggered = FLUSHED
    go_on: bool = False
    copying: bool = False
    verdicts: dict[object, Verdict] = field(default_factory=dict)
    """The daemon's, which are pure functions of what it knows: many ways lead to the same one."""


class State(msgspec.Struct, frozen=True, cache_hash=True):
    """The whole world. ``wires``: (source, target) -> messages on their way, in order.

    ``detours``: around those ``settled``, without whom the job goes on.
    """

    setting: Setting
    devices: tuple[tuple[str, Dev], ...]
    wires: tuple[tuple[tuple[str, str], tuple[object, ...]], ...] = ()
    dead: frozenset[str] = frozenset()
    epoch: int = 1
    progress: tuple[tuple[str, bytes], ...] = ()
    over: bool = False
    detours: bytes = b""
    settled: frozenset[str] = frozenset()
