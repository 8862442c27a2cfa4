"""What the model check walks through: who holds what, what a device and the daemon know, what is on the
wires.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.protocol.evalrounds import EvalRounds

DEVICES = ("A", "B", "C")


@dataclass(frozen=True)
class Topology:
    """Who holds which layer; ``routes``: the devices of each micro-batch, by layer; ``numbers``: of each
    slice of a bucket, how many it has.
    """

    held: dict[str, int]
    routes: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = (1,)

    @cached_property
    def uses(self) -> list[tuple[int, ...]]:
        """One bucket a layer."""
        return [(layer,) for layer in range(len(self.routes[0]))]

    @cached_property
    def layout(self) -> Layout:
        """As the daemon deployed it at epoch 1."""
        routes = tuple(
            Route(mb, 1, tuple(Segment(d, Range(i, i + 1)) for i, d in enumerate(devices)))
            for mb, devices in enumerate(self.routes)
        )
        holdings = {device: Layers.of(Range(layer, layer + 1)) for device, layer in self.held.items()}
        return Layout(1, len(self.uses), holdings, routes)


REPLICATED_AND_NOT = Topology({"A": 0, "B": 0, "C": 1}, (("A", "C"), ("B", "C")))
THREE_REPLICAS = Topology({"A": 0, "B": 0, "C": 0}, (("A",), ("B",), ("C",)))
TWO_SLICES = (1 << 17, 1 << 17)
THREE_OF_TWO_SLICES = replace(THREE_REPLICAS, numbers=TWO_SLICES)
REPLICATED_IN_SLICES = replace(REPLICATED_AND_NOT, numbers=TWO_SLICES)
WITH_A_REDUNDANT_LAYER = Topology({"A": 0, "B": 0, "C": 1}, (("A", "C"), ("A", "C")))
"""``B`` holds layer 0 and has no route: it contributes nothing, reduces, votes and updates."""

THE_HEAD_TWICE = Topology({"A": 0, "B": 1, "C": 1}, (("A", "B"), ("A", "C")))
A_REDUNDANT_HEAD = Topology({"A": 0, "B": 1, "C": 1}, (("A", "B"), ("A", "B")))


@dataclass(frozen=True)
class Staggered:
    """Whether devices may update before all votes are in, and whether every round then goes through as they
    thought.
    """

    on: bool = False
    through: bool = True


FLUSHED = Staggered()


@dataclass(frozen=True)
class Evaluations:
    """How many micro-batches an evaluation has (0: there is none), and at which steps."""

    total: int = 0
    every: int = 0
    at_start: bool = False
    at_end: bool = False


NONE = Evaluations()


@dataclass(frozen=True)
class Setting:
    """What is the same in all states of a walk. ``go_on``: the job goes on without its dead; ``copying``:
    sums are copied to the next holder; ``twice``: a second holder makes each mean.
    """

    topology: Topology = REPLICATED_AND_NOT
    rounds: int = 1
    staggered: Staggered = FLUSHED
    go_on: bool = False
    copying: bool = False
    evaluations: Evaluations = NONE
    twice: bool = False

    @property
    def evaluation(self) -> EvalRounds:
        """Which of the rounds evaluate; the others are steps."""
        when = self.evaluations
        return EvalRounds(
            self.rounds, len(self.topology.routes), when.total, when.every, when.at_start, when.at_end
        )


def key_of(value: object) -> Hashable:
    """What is equal for equal states, however they came about."""
    kind = type(value)
    if kind in _PLAIN:
        return value  # type: ignore[return-value]
    return _key_of(kind)(value)


_PLAIN = frozenset({int, str, bool, float, bytes, type(None)})


@functools.cache
def _key_of(kind: type) -> Callable[[Any], Hashable]:
    """How the key of a value of such a ``kind`` is made: asked once for each, as states have few kinds."""
    if issubclass(kind, set | frozenset):
        return lambda value: frozenset(map(key_of, value))
    if issubclass(kind, dict):
        # In what order buckets were reduced and votes came is the same state.
        return lambda value: frozenset((key, key_of(of)) for key, of in value.items())
    if issubclass(kind, list | tuple | deque):
        return lambda value: tuple(map(key_of, value))
    if issubclass(kind, msgspec.Struct):
        return functools.partial(_hashed, names=kind.__struct_fields__)
    if is_dataclass(kind):
        return functools.partial(_hashed, names=tuple(field.name for field in fields(kind)))
    assert issubclass(kind, Hashable)
    return lambda value: value


def _hashed(value: object, names: tuple[str, ...]) -> Hashable:
    """The value itself where it can be looked up, which is cheaper."""
    try:
        hash(value)
    except TypeError:
        return tuple(key_of(getattr(value, name)) for name in names)
    return value
