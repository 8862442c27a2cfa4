"""What is asked of the simulator, and what it answers: plain values, which travel between processes and into
JSON.

Owns the shapes, what is gathered for them in a run, and what follows from them by division.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from oobleckd.planner.policy import Action, Way
from oobleckd.planner.profile import Profile
from oobleckd.protocol.job import Job
from oobleckd.simulator.account import Cause
from oobleckd.simulator.costs import Costs
from oobleckd.simulator.traces import Trace


class Question(msgspec.Struct, frozen=True):
    """``job`` under ``policy`` on nodes of ``devices_per_node`` devices, which ``trace`` happens to.
    ``limit_bytes`` of a device's memory, 0: none known.
    """

    job: Job
    policy: str
    profile: Profile
    limit_bytes: int
    devices_per_node: int
    trace: Trace
    costs: Costs
    costs_name: str = "ours"
    seed: int = 0


class Point(msgspec.Struct, frozen=True, gc=False):
    """So many samples were committed by ``at_s``, with ``nodes`` alive."""

    at_s: float
    samples: int
    nodes: int


class Decided(msgspec.Struct, frozen=True):
    """What the policy answered at ``at_s``, in its words, and the modelled step that follows. ``way`` and
    ``actions``: the reason for programs.
    """

    at_s: float
    reason: str
    step_s: float
    way: Way = ""
    actions: tuple[Action, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """One run. Times in seconds; ``*_device_s``: of all live devices together.

    ``ideal_samples``: if every live device did its share of what a cluster without failures does;
    ``oracle_samples``: with the best plan for whoever is alive, at once and at no cost. ``useful_device_s``
    and all of ``lost_device_s`` sum up to ``live_device_s``, to the nanosecond. ``losses``: incidents;
    ``plans``: layouts deployed; ``events``: that the core was brought.
    """

    policy: str
    costs: str
    trace: str
    seed: int
    duration_s: float
    samples: int
    steps: int
    ideal_samples: float
    oracle_samples: float
    live_device_s: float
    useful_device_s: float
    lost_device_s: dict[Cause, float]
    node_hours: float
    losses: int
    plans: int
    rollbacks: int
    steps_lost: int
    checkpoints: int
    events: int
    points: tuple[Point, ...] = ()
    struck_at_s: tuple[float, ...] = ()
    decisions: tuple[Decided, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Committed, over the whole run."""
        return self.samples / self.duration_s

    @property
    def of_ideal(self) -> float:
        """Share of the live devices' ideal."""
        return self.samples / self.ideal_samples if self.ideal_samples else 0.0

    @property
    def of_oracle(self) -> float:
        """Share of the bound."""
        return self.samples / self.oracle_samples if self.oracle_samples else 0.0


@dataclass(slots=True)
class WrittenCheckpoint:
    """What is written down while it runs. ``alive``: (time, nodes). ``waits``: why it has not begun, when
    most nodes were there.
    """

    points: list[Point] = field(default_factory=list)
    alive: list[tuple[float, int]] = field(default_factory=list)
    struck_at: list[float] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    waits: tuple[int, str] = (0, "there was never a node")
    losses: int = 0
    plans: int = 0
    rollbacks: int = 0
    checkpoints: int = 0
    events: int = 0


# Which policies need more nodes is part of what is asked, so it is an answer beside the others; but not a
# line among them, or scripts would have to look. (D-simulator-007)
class Unable(msgspec.Struct, frozen=True):
    """A run that cannot begin: what is wrong, and a hint."""

    policy: str
    costs: str
    seed: int
    problem: str
    hint: str = ""


class SimulationError(ValueError):
    """A run that cannot begin: what is wrong, and a hint."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
