"""The time of a step over routes that cross: pipelines with vacant places, whose peers compute for them.

Owns the event simulation of ready-first devices (``run_s``), with the costs of ``timeline`` and the rule of
``worker.tasks``: backward before forward, and at most as many micro-batches in flight as hops remain, counting
those that are as near to the end of their route or nearer; and the least that any order needs (``busiest_s``).
Chooses no route (``reroute``).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from planner.costs import stage_costs
from planner.plan import Range, Route
from planner.profile import Profile

Task = tuple[int, int]  # number of the route, hop


@dataclass(frozen=True, slots=True)
class Hops:
    """What hops cost in seconds on a device: forward and backward, with the sends that follow them."""

    forward_s: Sequence[float]  # entry i: of layers [0, i)
    backward_s: Sequence[float]
    cut_s: Sequence[float]  # entry i: one way of the tensor between layers i - 1 and i

    @classmethod
    def of(cls, profile: Profile) -> Hops:
        """Those of ``profile``."""
        return cls(
            list(accumulate((layer.forward_s for layer in profile.layers), initial=0.0)),
            list(accumulate((layer.backward_s for layer in profile.layers), initial=0.0)),
            [float(cut) for cut in stage_costs(profile).cut_s],
        )

    def forward(self, layers: Range) -> float:
        """Forward of ``layers``, and the activations handed on."""
        return self.forward_s[layers.stop] - self.forward_s[layers.start] + self.cut_s[layers.stop]

    def backward(self, layers: Range) -> float:
        """Backward of ``layers``, and the gradient handed back."""
        return self.backward_s[layers.stop] - self.backward_s[layers.start] + self.cut_s[layers.start]


@dataclass(slots=True)
class _Device:
    """What is ready on one device: ``forward`` by remaining hops, in route order; ``backward`` in the order in
    which forwards ran. ``flying``: remaining hops -> micro-batches in flight.
    """

    forward: dict[int, list[Task]] = field(default_factory=dict)
    backward: list[tuple[int, Task]] = field(default_factory=list)
    flying: Counter[int] = field(default_factory=Counter)
    ran: dict[Task, int] = field(default_factory=dict)
    idle: bool = True

    def next(self) -> tuple[str, Task] | None:
        """The task to run now."""
        if self.backward:
            return "B", heapq.heappop(self.backward)[1]
        open_ = [
            left
            for left, ready in self.forward.items()
            if ready and sum(count for hops, count in self.flying.items() if hops <= left) < left
        ]
        if not open_:
            return None
        return "F", heapq.heappop(self.forward[min(open_, key=lambda left: self.forward[left][0])])


@dataclass(slots=True)
class _Run:
    """A step under way. ``done``: (when, order, device, kind, task) of tasks that end."""

    routes: Sequence[Route]
    hops: Hops
    devices: dict[str, _Device] = field(init=False)
    done: list[tuple[float, int, str, str, Task]] = field(default_factory=list)
    order: int = 0

    def __post_init__(self) -> None:
        self.devices = {s.device: _Device() for route in self.routes for s in route.segments}

    def left(self, task: Task) -> int:
        """Hops from this one to the end of the route, itself among them."""
        return len(self.routes[task[0]].segments) - task[1]

    def device(self, task: Task) -> str:
        """Who runs it."""
        return self.routes[task[0]].segments[task[1]].device

    def ready(self, kind: str, task: Task) -> None:
        """The data of ``task`` are there."""
        device = self.devices[self.device(task)]
        if kind == "F":
            heapq.heappush(device.forward.setdefault(self.left(task), []), task)
        else:
            heapq.heappush(device.backward, (device.ran[task], task))

    def start(self, name: str, now_s: float) -> None:
        """``name`` begins what it may, if it is idle."""
        device = self.devices[name]
        if not device.idle or (found := device.next()) is None:
            return
        kind, task = found
        layers = self.routes[task[0]].segments[task[1]].layers
        seconds = self.hops.forward(layers) if kind == "F" else self.hops.backward(layers)
        device.idle = False
        self.order += 1
        heapq.heappush(self.done, (now_s + seconds, self.order, name, kind, task))

    def end(self, name: str, kind: str, task: Task) -> str:
        """``name`` has run ``task``; returns who has got something by it."""
        device, (route, hop) = self.devices[name], task
        device.idle = True
        if kind == "F":
            device.flying[self.left(task)] += 1
            device.ran[task] = self.order
            self.order += 1
            following: tuple[str, Task] = ("B", task) if self.left(task) == 1 else ("F", (route, hop + 1))
        else:
            device.flying[self.left(task)] -= 1
            if hop == 0:
                return name
            following = ("B", (route, hop - 1))
        self.ready(*following)
        return self.device(following[1])


def run_s(routes: Iterable[Route], profile: Profile) -> float:
    """Seconds of a step over ``routes``, all with whole gradients: until the last backward has ended, and the
    slowest update. The reduce is free, as in ``timeline``.
    """
    run = _Run(tuple(sorted(routes, key=lambda route: route.micro_batch)), Hops.of(profile))
    for number in range(len(run.routes)):
        run.ready("F", (number, 0))
    for name in sorted(run.devices):
        run.start(name, 0.0)
    now_s, left = 0.0, 2 * sum(len(route.segments) for route in run.routes)
    while run.done:
        now_s, _, name, kind, task = heapq.heappop(run.done)
        left -= 1
        other = run.end(name, kind, task)
        run.start(name, now_s)
        run.start(other, now_s)
    assert left == 0, "routes that wait for each other"
    return now_s + _update_s(run.routes, profile)


def busiest_s(routes: Iterable[Route], profile: Profile) -> float:
    """Seconds that the busiest device works in a step over ``routes``: no order takes less."""
    return max(device_s(routes, profile).values(), default=0.0)


def device_s(routes: Iterable[Route], profile: Profile) -> dict[str, float]:
    """Device -> seconds that it works in a step over ``routes``."""
    hops = Hops.of(profile)
    busy: defaultdict[str, float] = defaultdict(float)
    for route in routes:
        for segment in route.segments:
            busy[segment.device] += hops.forward(segment.layers) + hops.backward(segment.layers)
    return dict(busy)


def _update_s(routes: Iterable[Route], profile: Profile) -> float:
    """The slowest update: of what any device computes."""
    held: defaultdict[str, set[Range]] = defaultdict(set)
    for route in routes:
        for segment in route.segments:
            held[segment.device].add(segment.layers)
    computed = ({layer for part in parts for layer in part.layers()} for parts in held.values())
    return max((sum(profile.layers[n].update_s for n in sorted(layers)) for layers in computed), default=0.0)
