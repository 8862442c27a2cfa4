"""Bad weather, drawn from a seed: a world, a job, and what goes wrong when; and what must be so in spite of
it.

The whole of a run follows from its seed. Every fault has a dice of its own, so that a run can be repeated
without some of them (``smallest``): what is left of a failing one is what it takes. What is checked after
every event is in ``core.invariants`` and ``simchecks``; here is what is checked at the end: once the weather
is clear the job ends within a minute, and as one without failures does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from oobleckd.protocol.batchramp import BatchRamp
from oobleckd.protocol.jobeval import Eval
from tests.helpers.hazards import KINDS, Hazards
from tests.helpers.manners import KEPT, MANNERS, Manner
from tests.helpers.simjobs import evaluation
from tests.helpers.world import World

_WEIGHTS = {
    "kill": 5, "vanish": 2, "leave": 1, "notice": 2, "device": 2, "spare": 5, "killed again": 10, "join": 6,
    "agent link": 4, "device link": 4, "cut from daemon": 4, "cut between nodes": 3, "partition": 2, "lag": 3,
    "slow": 2, "agent stopped": 2, "node stopped": 2,
    "daemon killed": 4, "daemon killed ahead": 3, "clock jumped": 1, "daemon stopped": 3, "drain": 3,
    "asked": 3,
}  # fmt: skip
_LATER = ("devices stopped", "disk full")
"""Faults that came to be after the others: with a dice of their own, so that what a seed had before it still
has. The next kind goes here.
"""
_MORE = 0.3
_EVALUATING = 0.3
_RAMPING = 0.25
_GAPS_S = (0.02, 0.2, 1.0)
_BOUND_S = 40.0
STEPS = 16
VIOLATIONS = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Fault:
    """Something goes wrong ``at_s`` after the job was submitted."""

    at_s: float
    kind: str


DEVICES_PER_STAGE = (1, 1, 1, 1, 2, 4)
"""Of which each run has one, most of them alone."""


@dataclass(frozen=True)
class Weather:
    """A run. ``copies``: so many nodes at least are left alive by kills."""

    seed: int
    manner: Manner
    num_nodes: int
    num_devices: int
    f: int
    every: int
    copies: int
    faults: tuple[Fault, ...]
    evaluation: Eval
    batch_ramp: BatchRamp | UnsetType
    devices_per_stage: int = 1

    def __str__(self) -> str:
        faults = ", ".join(f"{fault.kind} at {fault.at_s:.2f}" for fault in self.faults)
        each = f" ({self.devices_per_stage} a stage)" if self.devices_per_stage > 1 else ""
        return f"{self.manner.name}, {self.num_nodes} x {self.num_devices}{each}, f = {self.f}: {faults}"


@dataclass
class Seen:
    """What happened in runs: faults by kind, and how often the job recovered, went back, and went
    on in vain.
    """

    faults: Counter[str]
    incidents: int = 0
    rollbacks: int = 0
    given_up: int = 0
    early: int = 0
    virtual_s: float = 0.0
    events: int = 0

    def add(self, other: Seen) -> None:
        self.faults += other.faults
        for name in ("incidents", "rollbacks", "given_up", "early", "virtual_s", "events"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        faults = ", ".join(f"{self.faults[kind]} {kind}" for kind in KINDS)
        return (
            f"{self.faults.total()} faults ({faults}); {self.incidents} incidents, {self.given_up} live "
            "devices taken for "
            f"dead, {self.rollbacks} rollbacks, {self.early} early updates; {self.virtual_s:.0f} virtual s, "
            f"{self.events} events"
        )


def forecast(seed: int) -> Weather:
    """The weather of ``seed``; the manners of jobs come in turn."""
    dice = random.Random(f"weather {seed}")
    num_devices = dice.choice([1, 1, 2])
    f = dice.choice([1, 1, 2])
    manner = MANNERS[seed % len(MANNERS)]
    min_nodes = manner.min_nodes(num_devices, f)
    num_nodes = dice.randrange(max(3, min_nodes), min_nodes + 4)
    when, faults = dice.uniform(0.0, 0.8), []  # training begins after about half a second
    for _ in range(dice.randrange(1, 15)):
        when += dice.uniform(0.0, dice.choice(_GAPS_S))
        faults.append(Fault(when, dice.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]))
    more = random.Random(f"later {seed}")
    if more.random() < _MORE:
        last_s = faults[-1].at_s
        faults += [
            Fault(more.uniform(0.3, 0.3 + last_s), more.choice(_LATER)) for _ in range(more.choice([1, 2]))
        ]
    each = random.Random(f"stages {seed}").choice(DEVICES_PER_STAGE)
    return Weather(
        seed, manner, num_nodes, num_devices * each, f, dice.choice([0, 4]), dice.choice([0, 1, 3]),
        tuple(faults), _evaluation(seed), _ramp(seed), each,
    )  # fmt: skip


def _evaluation(seed: int) -> Eval:
    """When and on how much the job of ``seed`` evaluates; most do not."""
    dice = random.Random(f"evaluation {seed}")
    if dice.random() > _EVALUATING:
        return Eval()
    return evaluation(
        every=dice.choice([0, 1, 3, 5]),
        sequences=dice.randrange(1, 10),
        sources=dice.choice([1, 2]),
        at_start=dice.random() < 0.5,
        at_end=True,
    )


def _ramp(seed: int) -> BatchRamp | UnsetType:
    """How the batch of the job of ``seed`` grows; most do not."""
    dice = random.Random(f"ramped {seed}")
    if dice.random() > _RAMPING:
        return UNSET
    start = dice.choice([1, 2, 4, 6])
    increment = dice.choice([by for by in (1, 2, 4) if (8 - start) % by == 0])
    return BatchRamp(start=start, increment=increment, samples=dice.choice([1, 20, 60, 200]))


def world_of(weather: Weather) -> World:
    """The world before anything goes wrong."""
    dice = random.Random(f"world {weather.seed}")
    world = World(
        weather.seed,
        weather.num_nodes,
        num_devices=weather.num_devices,
        overflows=(5, 9) if dice.random() < 0.2 else (),
        nans=(7,) if dice.random() < 0.2 else (),
        clips=(6, 11) if dice.random() < 0.2 else (),
        codec=dice.random() < 0.1,
        lease_s=dice.choice([1.5, 5.0]),
        grace_s=dice.choice([1.0, 3.0]),
    )
    world.layer_s = dice.choice([0.002, 0.006])
    world.daemon.disk.sync_s = dice.choice([(0.001, 0.004), (0.005, 0.02)])
    return world


def run(weather: Weather, without: Collection[int] = ()) -> Seen:
    """Live through it, but for the faults with these numbers. Raises one of ``VIOLATIONS`` where something is
    not as it must be.
    """
    world = world_of(weather)
    hazards = Hazards(world, weather.copies)
    world.run_for(1.0)
    kept = random.Random(f"kept {weather.seed}").choice(KEPT)
    more = weather.manner.simulated(kept)
    world.submit(
        steps=STEPS, f=weather.f, every=weather.every, evaluation=weather.evaluation,
        batch_ramp=weather.batch_ramp, devices_per_stage=weather.devices_per_stage, **more,
    )  # fmt: skip
    for number, fault in enumerate(weather.faults):
        if number not in without:
            dice = random.Random(f"fault {weather.seed} {number}")
            world.after(fault.at_s, hazards.strike, fault.kind, dice)
    hazards.clear_at = world.now + max(fault.at_s for fault in weather.faults) + 0.5
    hazards.operate()
    world.run(lambda: hazards.clear, limit_s=120.0)
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=_BOUND_S)
    world.check_done()
    return Seen(
        hazards.struck,
        len(world.incidents()),
        world.checks.rollbacks,
        world.checks.given_up,
        world.early,
        world.now,
        next(world.order),
    )


def smallest(weather: Weather) -> tuple[Fault, ...]:
    """The faults of a failing run without those that it fails without as well."""
    without: set[int] = set()
    for number in reversed(range(len(weather.faults))):
        try:
            run(weather, without | {number})
        except VIOLATIONS:
            without.add(number)
    return tuple(fault for number, fault in enumerate(weather.faults) if number not in without)


def command(seed: int) -> str:
    """What repeats a seed."""
    return f".venv/bin/python benchmarks/soak.py --seed {seed}"
