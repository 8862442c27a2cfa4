"""One round's forward and backward on a device: runs the board's tasks and hands on what they make.

Owns graphs, what a decoupled backward still owes, and what was sent. Owns neither which task is next
(``tasks``) nor what becomes of weight gradients (``reduce``), nor when a round begins and ends (``executor``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters
from planner.plan import BACKWARD, FORWARD, NOTHING, Route
from worker.data import Corpus
from worker.faults import Faults
from worker.kept import Kept
from worker.mailbox import Key, Letter
from worker.models import Owed, gradients, input_gradients, seed_layer
from worker.post import Post
from worker.pulse import Pulse
from worker.reduce import Reducer
from worker.store import Store
from worker.tasks import Board, Kind, Order, Task

Graph = list[tuple[Tensor | None, Tensor, Owed | None]]
Debts = list[tuple[int, list[Tensor | None], Owed]]
"""Of the layers whose I has run, from the last to the first: (layer, gradients found, what W adds to them)."""


@dataclass(slots=True)
class Clock:
    """What the present round cost so far on this device."""

    began: float = field(default_factory=time.perf_counter)
    busy_s: float = 0.0
    gradients: int = 0
    forwards: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """What a device has to compute with, the same in every round."""

    device: str
    job: Job
    store: Store
    corpus: Corpus
    post: Post
    faults: Faults
    pulse: Pulse


@dataclass(frozen=True, slots=True)
class Given:
    """A round to be run: ``tag`` names it in the keys of data; ``returned``: letters that were taken for it in vain."""

    counters: Counters
    tag: int
    routes: tuple[Route, ...]
    order: Order = ()
    returned: dict[Key, Letter] = field(default_factory=dict)


class Passes:
    """The round ``given``. With ``forward_only`` it goes no further than its forward passes."""

    def __init__(self, means: Means, given: Given, reducer: Reducer, *, forward_only: bool = False) -> None:
        self.means, self.counters, self.tag, self.reducer = means, given.counters, given.tag, reducer
        self.board = Board(means.device, means.job.schedule.apart, forward_only=forward_only)
        self.board.begin(sorted(means.store.layers), given.routes, given.order)
        self.graphs: dict[Task, Graph] = {}
        self.debts: dict[Task, Debts] = {}
        self.kept = Kept(means.job.schedule.boundary_bytes)
        self.returned = given.returned
        self.taken: dict[Key, Letter] = {}
        self.clock = Clock()
        self.contribute: Callable[[], object] = lambda: None

    # ------------------------------------------------------------------ tasks

    def advance(self) -> bool:
        """Run one task; False if none is ready."""
        found = self.board.next(self.arrived)
        if found is None:
            return False
        kind, task = found
        began = time.perf_counter()
        with self.means.pulse.doing(kind, f"{task.position}{kind}{task.route.micro_batch}", len(task.layers)):
            self._run(kind, task)
        self.clock.busy_s += time.perf_counter() - began
        return True

    def _run(self, kind: Kind, task: Task) -> None:
        if kind == "F":
            self._forward(task)
        elif kind == "W":
            self._weights(task)
        else:
            self._backward(task)

    def arrived(self, task: Task, kind: str) -> bool:
        """Whether the message that ``task`` waits for is here."""
        key = task.key(kind, self.tag, task.position)
        return key in self.returned or self.means.post.has(key)

    def _input(self, task: Task, kind: str) -> Tensor:
        key = task.key(kind, self.tag, task.position)
        letter = self.returned.pop(key, None) or self.means.post.take(key)
        assert letter is not None
        if self.board.forward_only:
            self.taken[key] = letter
        return letter.tensors[0]

    def _reach(self, point: str) -> None:
        self.means.faults.reach(point, self.counters.round)

    def _forward(self, task: Task) -> None:
        self._reach("forward")
        store, job, step = self.means.store, self.means.job, self.counters.step
        micro_batch, low = task.route.micro_batch, task.lowest
        x = None if task.first else self._input(task, "F")
        batch = None
        if task.first or task.last:
            batch = self.means.corpus.batch(step, micro_batch).to(store.device)
        graph: Graph = []
        for layer in task.layers.layers():
            needed = layer >= low
            into = None if x is None else x.detach().requires_grad_(layer > low)
            seed_layer(job.train.seed, step, micro_batch, layer, store.device)
            owed = None
            with torch.set_grad_enabled(needed):
                if self.board.apart and task.route.wants(layer):
                    x, owed = store.layers[layer].forward_apart(into, batch)
                else:
                    x = store.layers[layer](into, batch)
            if needed:
                graph.append((into, x, owed))
            self.clock.forwards += task.route.again(task.position) >= FORWARD
        self.board.ran_forward(task)
        if task.has_backward:
            self.graphs[task] = graph
        if not task.last and task.route.reached_at(task.position + 1) == NOTHING:
            assert x is not None
            self._pass_on(task, "F", x.detach())

    def _backward(self, task: Task) -> None:
        low = task.lowest
        g = None if task.last else self._input(task, "B")
        graph = self.graphs.pop(task)
        self.debts[task] = []
        for layer in reversed(range(max(low, task.layers.start), task.layers.stop)):
            into, out, owed = graph.pop()
            if owed is None:
                g = self._backward_layer(task, layer, into, out, g)
            else:
                g = self._input_gradients(task, layer, into, out, g, owed)
            self._reach("backward")
            self.contribute()
        self.board.ran_backward(task)
        if task.sends_back:
            assert g is not None
            self._pass_on(task, "B", g)

    def _backward_layer(
        self, task: Task, layer: int, into: Tensor | None, out: Tensor, g: Tensor | None
    ) -> Tensor | None:
        """One layer's gradients: the weights' into the sums if the route wants them, the input's returned."""
        inputs = self.means.store.layers[layer].leaves if task.route.wants(layer) else []
        through = into is not None and into.requires_grad
        if through:
            assert into is not None
            inputs.append(into)
        grads = gradients(out, inputs, g)
        below = grads.pop() if through else None
        if task.route.wants(layer):
            self._note_loss(task, layer, out)
            self._add(task, layer, grads)
        return below

    def _input_gradients(
        self, task: Task, layer: int, into: Tensor | None, out: Tensor, g: Tensor | None, owed: Owed
    ) -> Tensor | None:
        """I of one layer: the gradient of its input is returned, its weights' are left to W."""
        inputs = self.means.store.layers[layer].leaves
        through = into is not None and into.requires_grad
        if through:
            assert into is not None
            inputs.append(into)
        grads = input_gradients(out, inputs, g)
        below = grads.pop() if through else None
        self._note_loss(task, layer, out)
        self.debts[task].append((layer, grads, owed))
        return below

    def _weights(self, task: Task) -> None:
        for layer, grads, owed in self.debts.pop(task):
            self._add(task, layer, owed.complete(self.means.store.layers[layer].leaves, grads))
            self._reach("weights")
            self.contribute()
        self.board.ran_weights(task)

    def _note_loss(self, task: Task, layer: int, out: Tensor) -> None:
        if layer == self.means.store.spec.num_layers - 1:
            self.reducer.losses[task.route.micro_batch] = float(out.detach())

    def _add(self, task: Task, layer: int, grads: list[Tensor]) -> None:
        """Gradients of all parameters of ``layer`` go into the sums."""
        store = self.means.store
        by_bucket: dict[int, list[Tensor]] = {b: [] for b in store.spec.buckets_of(layer)}
        for (bucket, _, _), grad in zip(store.layers[layer].params, grads, strict=True):
            by_bucket[bucket].append(grad)
        self.reducer.add(layer, task.route.micro_batch, by_bucket)
        self.clock.gradients += task.route.again(task.position) >= BACKWARD

    def _pass_on(self, task: Task, kind: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._send(task, kind, tensor)
        self.kept.put(kind, task, tensor)

    def _send(self, task: Task, kind: str, tensor: Tensor) -> None:
        position = task.position + (1 if kind == "F" else -1)
        peer = task.route.segments[position].device
        self.means.post.send(peer, task.key(kind, self.tag, position), [tensor])

    # ------------------------------------------------------------------ failures

    def add(self, routes: Iterable[Route], frozen: Collection[int]) -> None:
        """New attempts of the ``frozen`` micro-batches. What was done in the one before is taken over where the route
        says so, and dropped elsewhere.
        """
        graphs, debts = self.graphs, self.debts
        self.graphs = {task: graph for task, graph in graphs.items() if task.route.micro_batch not in frozen}
        self.debts = {task: debt for task, debt in debts.items() if task.route.micro_batch not in frozen}
        for task, before in self.board.add(routes).items():
            if before in graphs and task.has_backward:
                self.graphs[task] = graphs[before]
            if before in debts:
                self.debts[task] = debts[before]
            self._send_again(task, before)

    def _send_again(self, task: Task, before: Task) -> None:
        """A hop beside this one is in new hands: what it was given it is given once more."""
        position, reached, device = task.position, task.route.reached, self.means.store.device
        if reached[position] >= FORWARD and not task.last and reached[position + 1] == NOTHING:
            self._send(task, "F", self.kept.get("F", before, device))
        if reached[position] >= BACKWARD and task.sends_back and reached[position - 1] < BACKWARD:
            self._send(task, "B", self.kept.get("B", before, device))
