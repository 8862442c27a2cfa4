"""What a device has to compute in a round: forward and backward tasks of the routes that cross it.

Pure. Owns which task runs next and which layers' gradients a device still owes; does not run anything.
Ready-first with priority backward > forward and at most ``segments - position`` micro-batches in
flight: that is 1F1B (ENGINE facts in docs/design.md), and it needs no fixed order that a failure
could make impossible. Attempts that repair a failure are not capped: their number is small.

Standing routes may cross (docs/recovery.md, "Re-routed"), so that a device is the second hop of one and the
third of another. A cap over all in flight could then wait for itself. What counts against a hop's cap is only
what is as near to the end of its route or nearer: fewer or as many hops remain. Nobody then waits for ever.
Suppose that nothing can run and nothing is under way. By induction over the remaining hops r, no task with r
of them is in flight or has its input. In flight: at r = 1 its backward could run; at r > 1 the next hop, with
r - 1, has the input of its forward (which by induction cannot be), or is in flight (neither), or has sent the
gradient, so the backward could run. With its input: none with r or fewer is in flight, so the cap lets it run.
First hops have their input from the start, so all have run, and all is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from planner.plan import Range, Route


@dataclass(frozen=True, slots=True)
class Task:
    """Hop ``position`` of ``route`` on this device."""

    route: Route
    position: int

    @property
    def layers(self) -> Range:
        """The layers of the hop."""
        return self.route.segments[self.position].layers

    @property
    def first(self) -> bool:
        """Whether the hop starts at the embedding."""
        return self.position == 0

    @property
    def last(self) -> bool:
        """Whether the hop ends with the loss."""
        return self.position == len(self.route.segments) - 1

    @property
    def lowest(self) -> int:
        """The lowest layer whose weight gradients the route wants: no gradient flows below it."""
        return 0 if self.route.mask is None else min(self.route.mask)

    @property
    def has_backward(self) -> bool:
        """Whether any gradient flows through this hop."""
        return self.lowest < self.layers.stop

    @property
    def cap(self) -> int:
        """Most micro-batches in flight at this hop (1F1B)."""
        return len(self.route.segments) - self.position

    def key(self, kind: str, round_: int, position: int) -> tuple[str, int, int, int, int]:
        """Key of a data message of this route at hop ``position``."""
        return (kind, round_, self.route.micro_batch, self.route.attempt, position)


Arrived = Callable[[Task, str], bool]


@dataclass(slots=True)
class Board:
    """Tasks of one round on ``device``, and its ledger.

    ``done``: layer -> micro-batches whose weight gradients are in this device's sums.
    """

    device: str
    forward: list[Task] = field(default_factory=list)
    in_flight: list[Task] = field(default_factory=list)
    done: dict[int, set[int]] = field(default_factory=dict)
    owed: dict[int, set[int]] = field(default_factory=dict)

    def begin(self, layers: Iterable[int], routes: Iterable[Route]) -> None:
        """A new round with these standing routes; ``layers`` are those that the device holds."""
        self.forward, self.in_flight = [], []
        self.done = {layer: set() for layer in layers}
        self.owed = {layer: set() for layer in self.done}
        self.add(routes)

    def add(self, routes: Iterable[Route]) -> None:
        """More routes: attempts that a decision has made."""
        for route in routes:
            for position, segment in enumerate(route.segments):
                if segment.device != self.device:
                    continue
                self.forward.append(Task(route, position))
                for layer in segment.layers.layers():
                    if route.wants(layer):
                        self.owed[layer].add(route.micro_batch)

    def freeze(self, micro_batches: Collection[int]) -> None:
        """Drop unfinished work of ``micro_batches``; what is in the sums stays there."""
        self.forward = [task for task in self.forward if task.route.micro_batch not in micro_batches]
        self.in_flight = [task for task in self.in_flight if task.route.micro_batch not in micro_batches]
        for layer, done in self.done.items():
            self.owed[layer] -= set(micro_batches) - done

    def next(self, arrived: Arrived) -> tuple[str, Task] | None:
        """The task to run now: ("B" | "F", task), or None when all wait for data."""
        for task in self.in_flight:
            if task.last or arrived(task, "B"):
                return "B", task
        for task in self.forward:
            capped = task.route.mask is None and self._flying(task.cap) >= task.cap
            if not capped and (task.first or arrived(task, "F")):
                return "F", task
        return None

    def ran_forward(self, task: Task) -> None:
        """``task``'s forward is done."""
        self.forward.remove(task)
        if task.has_backward:
            self.in_flight.append(task)

    def ran_backward(self, task: Task) -> None:
        """``task``'s backward is done."""
        self.in_flight.remove(task)

    def count(self, layer: int, micro_batch: int) -> None:
        """The weight gradients of (micro-batch, layer) went into the sums: exactly once."""
        assert micro_batch not in self.done[layer], (
            f"layer {layer} of micro-batch {micro_batch} counted twice"
        )
        assert micro_batch in self.owed[layer], f"layer {layer} of micro-batch {micro_batch} was not owed"
        self.done[layer].add(micro_batch)

    def complete(self, layer: int) -> bool:
        """Whether everything that this device owes to ``layer`` is in its sums."""
        return self.owed[layer] <= self.done[layer]

    def _flying(self, cap: int) -> int:
        """In flight with as many hops to the end of their routes, or fewer."""
        return sum(task.route.mask is None and task.cap <= cap for task in self.in_flight)
