"""Dry run of schedules: when every op runs, how long a step takes, who waits, what is held.

Owns the event simulation of ops with given costs. Does not make schedules. Model: a device runs its
ops in order; a send keeps it busy for the time on the link and has arrived when it ends; a receive
waits for that; R begins when every device has come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from oobleckd.planner.costs.work import DeviceWork, StageWork, plan_works
from oobleckd.planner.plan import Plan
from oobleckd.planner.profile import Profile
from oobleckd.planner.schedule import Op, ScheduleError, in_flight, schedules

Cost = Callable[[str, Op], float]


class Deadlock(ScheduleError):
    """Devices that wait for each other; the message names the op of each and what it waits for."""


class Span(msgspec.Struct, frozen=True):
    """``op`` runs from ``start_s`` to ``stop_s``."""

    op: Op
    start_s: float
    stop_s: float


class Timeline(msgspec.Struct, frozen=True):
    """A step as simulated. ``makespan_s``: until the last update has ended. ``bubble``: device ->
    share of the makespan in which it waits. ``in_flight``: device -> most micro-batches held at once.
    ``peak_bytes``: device -> the most that it holds, where the run knew what ops hold.
    """

    makespan_s: float
    bubble: dict[str, float]
    in_flight: dict[str, int]
    spans: dict[str, tuple[Span, ...]]
    peak_bytes: dict[str, int]


@dataclass(slots=True)
class _Run:
    """A simulation under way: what has run, and when each send arrived."""

    ops: Mapping[str, Sequence[Op]]
    cost: Cost
    spans: dict[str, list[Span]] = field(init=False)
    arrived: dict[Op, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = {device: [] for device in self.ops}

    def waiting(self, device: str) -> Op | None:
        """The op that ``device`` is at; None when it has run all."""
        position = len(self.spans[device])
        return self.ops[device][position] if position < len(self.ops[device]) else None

    def now(self, device: str) -> float:
        """When ``device`` has ended what it has run."""
        return self.spans[device][-1].stop_s if self.spans[device] else 0.0

    def run(self, device: str, op: Op, ready_s: float) -> None:
        """``device`` runs ``op`` as soon as it is free and the data are there."""
        start_s = max(self.now(device), ready_s)
        span = Span(op, start_s, start_s + self.cost(device, op))
        self.spans[device].append(span)
        if op.kind in {"SA", "SG"}:
            self.arrived[op] = span.stop_s

    def run_until_blocked(self, device: str) -> bool:
        """Run ops of ``device`` until one waits; whether any ran."""
        began = len(self.spans[device])
        while (op := self.waiting(device)) is not None and op.kind != "R":
            source = op.source()
            if source is not None and source not in self.arrived:
                break
            self.run(device, op, 0.0 if source is None else self.arrived[source])
        return len(self.spans[device]) > began

    def reduce(self) -> bool:
        """Run R everywhere if all devices have come to it."""
        if any(op is None or op.kind != "R" for op in map(self.waiting, self.ops)):
            return False
        together_s = max(map(self.now, self.ops))
        for device in self.ops:
            self.run(device, Op("R"), together_s)
        return True


def dry_run(ops: Mapping[str, Sequence[Op]], cost: Cost) -> Timeline:
    """Simulate ``ops`` (device -> schedule) of any number of pipelines with disjoint micro-batches.

    ``cost(device, op)`` in seconds. Raises Deadlock.
    """
    run = _Run(ops, cost)
    moved = bool(ops)
    while moved:
        moved = sum(run.run_until_blocked(device) for device in ops) > 0 or run.reduce()
    stuck = {device: op for device in ops if (op := run.waiting(device)) is not None}
    if stuck:
        raise Deadlock(_explain(stuck, ops))
    makespan_s = max((run.now(device) for device in ops), default=0.0)
    busy_s = {d: sum(span.stop_s - span.start_s for span in spans) for d, spans in run.spans.items()}
    return Timeline(
        makespan_s=makespan_s,
        bubble={d: 1 - busy / makespan_s if makespan_s else 0.0 for d, busy in busy_s.items()},
        in_flight={device: in_flight(schedule) for device, schedule in ops.items()},
        spans={device: tuple(spans) for device, spans in run.spans.items()},
        peak_bytes={},
    )


def dry_run_works(
    ops: Mapping[str, Sequence[Op]], works: Mapping[str, StageWork] | Mapping[str, DeviceWork]
) -> Timeline:
    """Simulate ``ops`` with the seconds and bytes of ``works``, both by device; a StageWork is of the
    device's only stage. Raises Deadlock.
    """
    timed = dry_run(ops, lambda device, op: works[device].seconds(op))
    peak = {}
    for device, each in ops.items():
        work = works[device]
        if isinstance(work, StageWork):
            peak[device] = work.peak_bytes(op.kind for op in each)
        else:
            peak[device] = work.peak_bytes(each)
    return msgspec.structs.replace(timed, peak_bytes=peak)


def dry_run_plan(plan: Plan, profile: Profile, ops: Mapping[str, Sequence[Op]] | None = None) -> Timeline:
    """Simulate a step of ``plan`` with the costs of ``profile``; reduce and update are free.

    ``ops``: device -> schedule, without them 1F1B. Raises Deadlock.
    """
    return dry_run_works(schedules(plan) if ops is None else ops, plan_works(plan, profile))


def _explain(stuck: Mapping[str, Op], ops: Mapping[str, Sequence[Op]]) -> str:
    """Who waits at which op for what, and where that is."""
    sends = {op: device for device, schedule in ops.items() for op in schedule if op.kind in {"SA", "SG"}}
    lines = []
    for device, op in stuck.items():
        source = op.source()
        if source is None:
            others = [other for other in ops if other != device and stuck.get(other) != op]
            lines.append(f"{device} at {op} waits for {', '.join(others)}")
        elif source in sends:
            lines.append(f"{device} at {op} waits for {source} of {sends[source]}")
        else:
            lines.append(f"{device} at {op} waits for {source}, which nobody sends")
    return "deadlock: " + "; ".join(lines)
