"""What a device has to compute in a round: forward and backward tasks of the routes that cross it.

Pure. Owns which task runs next; asks the ``ledger`` what is owed, and does not run anything.
Ready-first with priority backward > forward > weight gradients and at most ``segments - position``
micro-batches in flight: that is 1F1B (ENGINE facts in docs/design.md), and it needs no fixed order that a
failure could make impossible. A decoupled backward is different: what waits for nobody should be done when
there is nothing better, and that takes foresight. There the planner's order leads, for as long as nobody has
died; and where routes cross because somebody has, once the daemon has deployed an order for what is left.
Attempts that repair a failure are not capped: their number is small.

Standing routes may cross (docs/mechanisms/rerouted.md), so that a device is the second hop of one and the
third of another, and a route may come back to a device (docs/schedules.md, "Two chunks"), which is then two
of its hops. A cap over all in flight could then wait for itself. What counts against a hop's cap is only what
is as near to the end of its route or nearer: fewer or as many hops remain. Nobody then waits for ever.
Suppose that nothing can run and nothing is under way. By induction over the remaining hops r, no task with r
of them is in flight or has its input. In flight: at r = 1 its backward could run; at r > 1 the next hop, with
r - 1, has the input of its forward (which by induction cannot be), or is in flight (neither), or has sent the
gradient, so the backward could run. With its input: none with r or fewer is in flight, so the cap lets it
run. First hops have their input from the start, so all have run, and all is done. Nothing here asks which
devices the hops are on: whatever a device has in flight with more hops to go does not count, so it keeps
nobody who is nearer to the end from running, itself neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from oobleckd.planner.plan import BACKWARD, FORWARD, NOTHING, WEIGHTS, HopState, Layers, Range, Route
from oobleckd.planner.reroute.redundant import ahead
from oobleckd.planner.schedule import parse_ops
from oobleckd.worker.round_machine.ledger import Ledger

Kind = Literal["F", "B", "I", "W"]
Step = tuple[Kind, int, int]
"""(kind, hop, micro-batch)."""
Order = tuple[Step, ...]
"""What a device does on its standing routes, one after the other."""


@dataclass(frozen=True, slots=True)
class Task:
    """Hop ``position`` of ``route`` on this device."""

    route: Route
    position: int

    def __hash__(self) -> int:
        # Not of all segments: every task is looked up several times.
        return hash((self.route.micro_batch, self.route.attempt, self.position))

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
    def sends_back(self) -> bool:
        """Whether the hop before this one needs a gradient."""
        return not self.first and self.lowest < self.layers.start

    @property
    def cap(self) -> int:
        """Most micro-batches in flight at this hop (1F1B)."""
        return len(self.route.segments) - self.position

    def key(self, kind: str, round_: int, position: int) -> tuple[str, int, int, int, int]:
        """Key of a data message of this route at hop ``position``."""
        return (kind, round_, self.route.micro_batch, self.route.attempt, position)


NO_LAYERS = Layers()

Arrived = Callable[[Task, str], bool]


def order_of(ops: str) -> Order:
    """Parse a device's schedule: its F, B, I and W in order."""
    return tuple(
        (op.kind, op.stage, op.micro_batch) for op in parse_ops(ops) if op.kind in {"F", "B", "I", "W"}
    )


@dataclass(slots=True)
class Board:
    """Tasks of one round on ``device``, and its ledger.

    ``apart``: the backward is decoupled, so a task is run as F, I, W and not as F, B. ``weights``: those
    whose W is still to be run. ``forward_only``: backwards wait. ``frozen``: micro-batches whose next attempt
    is awaited. ``ledger``: what this device owes of the round. ``reached``: how far each task is, those of
    frozen micro-batches too. ``order``: what is to be run next as the planner had it; when it is empty,
    whatever is ready. ``redundant``: other devices' hops whose forward pass may be run ahead here, for the
    case that they die, when there is nothing else to do; ``redundant_done``: those where it was.
    ``evaluates``: the round is forward alone. Nothing is in flight in it, and what is owed is the head's: the
    losses of its micro-batches. ``fellows``: the others of its shard group. What they compute this device
    owes its shard of, and gets the gradients from them. ``theirs``: of frozen micro-batches what it owed so:
    what they have counted by now is on its way.
    """

    device: str
    apart: bool = False
    forward_only: bool = False
    evaluates: bool = False
    forward: list[Task] = field(default_factory=list)
    in_flight: list[Task] = field(default_factory=list)
    weights: list[Task] = field(default_factory=list)
    reached: dict[Task, int] = field(default_factory=dict)
    redundant: list[Task] = field(default_factory=list)
    redundant_done: list[Task] = field(default_factory=list)
    order: deque[Step] = field(default_factory=deque)
    frozen: set[int] = field(default_factory=set)
    ledger: Ledger = field(default_factory=Ledger)
    fellows: frozenset[str] = frozenset()
    theirs: set[tuple[int, int]] = field(default_factory=set)

    def begin(
        self,
        layers: Iterable[int],
        routes: Collection[Route],
        order: Order = (),
        redundant: Layers = NO_LAYERS,
    ) -> None:
        """A new round with these standing routes; ``layers`` are those that the device holds, ``redundant``
        what of them it holds for others.
        """
        self.forward, self.in_flight, self.weights = [], [], []
        self.redundant, self.redundant_done = [], []
        self.reached, self.order, self.frozen = {}, deque(order), set()
        self.ledger, self.theirs = Ledger.of(layers), set()
        self.add(routes)
        if redundant.ranges:
            self.redundant = [
                Task(route, at) for route in routes for at in ahead(route, self.device, redundant)
            ]

    def add(self, routes: Iterable[Route]) -> dict[Task, Task]:
        """More routes: attempts that a decision has made. Returns what goes on: the new task -> the one of
        the attempt before.
        """
        resumed: dict[Task, Task] = {}
        done, self.redundant_done = (
            self.redundant_done,
            [t for t in self.redundant_done if not self._is_frozen(t)],
        )
        for route in routes:
            own = {t.layers: t for t in self.reached if t.route.micro_batch == route.micro_batch}
            others = {t.layers: t for t in done if t.route.micro_batch == route.micro_batch}
            for position, segment in enumerate(route.segments):
                is_own = segment.device == self.device
                if is_own or segment.device in self.fellows:
                    for layer in segment.layers.layers():
                        if route.wants(layer):
                            self.ledger.owe(layer, route.micro_batch)
                if not is_own:
                    continue
                task, reached = Task(route, position), route.reached_at(position)
                before = own.get(segment.layers) or (
                    others.get(segment.layers) if reached == FORWARD else None
                )
                if reached and before is not None:  # else it was a dead device's, and a peer has its sums
                    resumed[task] = before
                self._place(task, reached)
            for task in own.values():
                del self.reached[task]
            if self.theirs:
                wanted = {(layer, route.micro_batch) for layer in self.ledger.owed if route.wants(layer)}
                self.theirs -= wanted
        # A decision asks once more for what nobody has counted: the rest is in sums of this group, or in a
        # message to this device.
        for layer, micro_batch in self.theirs:
            self.ledger.owe(layer, micro_batch)
        self.frozen, self.theirs = set(), set()
        return resumed

    def counted_there(self, layer: int, micro_batch: int) -> None:
        """A fellow has it in its sums, and this device's part has come: it is owed, whatever is known of
        routes.
        """
        self.theirs.discard((layer, micro_batch))
        self.ledger.owe(layer, micro_batch)

    def _place(self, task: Task, reached: int) -> None:
        self.reached[task] = reached
        if reached == NOTHING:
            self.forward.append(task)
        elif reached == FORWARD and self._comes_back(task):
            self.in_flight.append(task)
        elif reached == BACKWARD:
            self.weights.append(task)

    def hops(
        self, micro_batches: Collection[int], arrived: Arrived, kept: Callable[[str, Task], bool]
    ) -> tuple[HopState, ...]:
        """How far the tasks of ``micro_batches`` are; ``kept``: whether what was sent ("F" or "B") is still
        there.

        Forward passes that were run ahead for others are among them: what comes out of one is there as long
        as its graph.
        """
        own = (
            HopState(
                task.route.micro_batch,
                task.route.attempt,
                task.position,
                reached,
                has_input=reached < BACKWARD and arrived(task, "F" if reached == NOTHING else "B"),
                has_output=kept("F", task),
                has_gradient=kept("B", task),
            )
            for task, reached in self.reached.items()
            if task.route.micro_batch in micro_batches
        )
        others = (
            HopState(task.route.micro_batch, task.route.attempt, task.position, FORWARD, has_output=True)
            for task in self.redundant_done
            if task.route.micro_batch in micro_batches
        )
        return (*own, *others)

    def freeze(self, micro_batches: Collection[int]) -> None:
        """Drop unfinished work of ``micro_batches``; what is in the sums stays there, and forward passes that
        were run ahead.
        """
        self.forward = [task for task in self.forward if task.route.micro_batch not in micro_batches]
        self.in_flight = [task for task in self.in_flight if task.route.micro_batch not in micro_batches]
        self.weights = [task for task in self.weights if task.route.micro_batch not in micro_batches]
        self.redundant = [task for task in self.redundant if task.route.micro_batch not in micro_batches]
        self.frozen |= set(micro_batches)
        if self.fellows:
            own = {(layer, task.route.micro_batch) for task in self.reached for layer in task.layers.layers()}
            self.theirs |= self.ledger.missing(micro_batches) - own
        self.ledger.excuse(micro_batches)

    def leave(self) -> None:
        """The shard group has lost somebody: nothing more is computed here in this round, and what was does
        not count.
        """
        self.freeze({task.route.micro_batch for task in self.reached})
        self.ledger.forget()
        self.theirs = set()

    def forget_order(self) -> None:
        """From here on run whatever is ready: the planner did not foresee what is to be done now."""
        # A failure makes the planned order impossible, so it is dropped whole: some devices in order and
        # others ready-first could wait for each other. (D-schedules-004, D-schedules-011)
        self.order.clear()

    def next(self, arrived: Arrived) -> tuple[Kind, Task] | None:
        """The task to run now, or None when all wait for data."""
        # With a decoupled backward whatever is ready, I before F before W, fills bubbles too early and too
        # late: 0.80 of the ideal where the planner's order has 0.89. (D-schedules-004)
        if self.order:
            return self._planned(arrived)
        for task in () if self.forward_only else self.in_flight:
            if task.last or arrived(task, "B"):
                return self._backward, task
        for task in self.forward:
            # Standing routes may cross, where a cap over all in flight would wait for itself: only what is
            # as near to its route's end counts, or nearer. (D-recovery-008)
            capped = task.route.mask is None and self._flying(task.cap) >= task.cap
            if not capped and (task.first or arrived(task, "F")):
                return "F", task
        return ("W", self.weights[0]) if self.weights and not self.forward_only else None

    def next_redundant(self) -> Task | None:
        """The forward pass to run ahead while there is nothing else to do: the first whose own hop before it
        is through.
        """
        for task in self.redundant:
            if task.first or self.reached.get(Task(task.route, task.position - 1), NOTHING) >= FORWARD:
                return task
        return None

    def skip_redundant(self, task: Task) -> None:
        """Leave ``task`` out: there is no room to run it ahead."""
        self.redundant = [other for other in self.redundant if other != task]

    def ran_redundant(self, task: Task) -> None:
        """The forward pass of another device's hop is done here, too."""
        self.redundant.remove(task)
        self.redundant_done.append(task)

    def ran_forward(self, task: Task) -> None:
        """``task``'s forward is done. In a round that evaluates a last hop has the loss, and that counts."""
        self.forward.remove(task)
        self.reached[task] = FORWARD
        if self._comes_back(task):
            self.in_flight.append(task)
        elif self.evaluates and task.last:
            self.ledger.count(task.layers.stop - 1, task.route.micro_batch)
        self._follow("F", task)

    def ran_backward(self, task: Task) -> None:
        """``task``'s backward is done, or its I."""
        self.in_flight.remove(task)
        self.reached[task] = BACKWARD if self.apart else WEIGHTS
        if self.apart:
            self.weights.append(task)
        self._follow(self._backward, task)

    def ran_weights(self, task: Task) -> None:
        """``task``'s W is done."""
        self.weights.remove(task)
        self.reached[task] = WEIGHTS
        self._follow("W", task)

    @property
    def idle(self) -> bool:
        """Whether no task is left."""
        return not (self.forward or self.in_flight or self.weights)

    @property
    def _backward(self) -> Kind:
        return "I" if self.apart else "B"

    def _comes_back(self, task: Task) -> bool:
        """Whether ``task`` has a backward in this round."""
        return task.has_backward and not self.evaluates

    def _is_frozen(self, task: Task) -> bool:
        return task.route.micro_batch in self.frozen

    def _planned(self, arrived: Arrived) -> tuple[Kind, Task] | None:
        kind, *place = self.order[0]
        if self.forward_only and kind != "F":
            return None
        waiting = {"F": self.forward, "W": self.weights}.get(kind, self.in_flight)
        task = next(task for task in waiting if [task.position, task.route.micro_batch] == place)
        if kind == "F":
            return (kind, task) if task.first or arrived(task, "F") else None
        return (kind, task) if kind == "W" or task.last or arrived(task, "B") else None

    def _follow(self, kind: Kind, task: Task) -> None:
        if self.order:
            assert self.order[0] == (kind, task.position, task.route.micro_batch)
            self.order.popleft()

    def _flying(self, cap: int) -> int:
        """In flight with as many hops to the end of their routes, or fewer.

        What W will need is held as well: with as many as 1F1B has in flight, memory is no more than its.
        """
        return sum(task.route.mask is None and task.cap <= cap for task in (*self.in_flight, *self.weights))
