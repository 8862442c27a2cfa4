"""Forward and backward of a simulated device: the worker's own tasks, in virtual time and without arithmetic.

In place of a tensor travels a ``Token`` that says from which weights it was made. Whoever takes one in, and
every backward of a forward, asserts that they were the weights that it has itself: nothing may come from a
state that was taken back, or from another round.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from oobleckd.planner.plan import BACKWARD, FORWARD
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round.round import ComputeContext, Pieces, Work
from oobleckd.worker.round.sum_copies import Copies
from oobleckd.worker.round_machine.commands import RoundSpec
from oobleckd.worker.round_machine.tasks import Kind, Task
from tests.helpers.simshards import SimShardGroup, shared_out
from tests.helpers.simstore import CPU, Gradient

if TYPE_CHECKING:
    import torch

    from tests.helpers.simdevice import SimDevice

_SHARE = {"F": 1.0, "B": 2.0, "I": 1.2, "W": 0.8}  # of a layer's time


def loss_of(step: int, micro_batch: int) -> float:
    """The loss of a micro-batch: a pure function of the step, whoever computes it."""
    return 10.0 / (1 + step) + 0.001 * micro_batch


def evaluated_loss_of(weights: tuple[int, int], number: int) -> float:
    """That of micro-batch ``number`` of an evaluation: a pure function of the (updates applied, trail)."""
    applied, trail = weights
    return 10.0 / (1 + applied) + 0.0001 * (trail % 997) + 0.001 * number


@dataclass(frozen=True, slots=True)
class Token:
    """An activation or its gradient."""

    step: int
    micro_batch: int
    weights: tuple[int, int]
    nbytes: int = 1
    misread: bool = field(default=False, compare=False)  # it comes from a wrong text

    @property
    def device(self) -> torch.device:
        return CPU

    def contiguous(self) -> Token:
        return self

    def to(self, _device: object) -> Token:
        return self


class SimPasses(Passes):
    """``run`` begins a task; it has run when its time is over."""

    def __init__(
        self, sim: SimDevice, context: ComputeContext, spec: RoundSpec, copies: Copies, returned: Any = None
    ) -> None:
        super().__init__(context, spec, copies, returned)
        self.sim, self.sim_group = sim, cast("SimShardGroup", context.group)

    def run(self, kind: Kind, task: Task) -> None:
        self.sim.followed += bool(self.board.order)
        self.under_way = self.halted.pop((kind, task), None) or self._begun(kind, task)
        self.began = self.context.timer.now()
        self._compute(self.under_way)

    def _compute(self, work: Work) -> None:
        if work.compute():
            self.sim.work(_SHARE[work.kind], self._computed, work)
        else:
            self._stopped(work)

    def _stopped(self, work: Work) -> None:
        self.under_way = None
        self.note(work.kind, work.task, self.began)

    def _computed(self, work: Work) -> None:
        """A layer's time is over."""
        if self._halts(work):
            self._stopped(work)
        else:
            self._compute(work)

    def advance_redundant(self) -> bool:
        """A layer ahead takes its time, too, in which nothing else is begun."""
        ran = super().advance_redundant()
        self.sim.ahead += ran
        if ran:
            piece = self.pieces.pop()
            self.sim.work(_SHARE["F"], self.note, piece.kind, piece.task, piece.start)
        return ran

    def _redundant(self, work: Work) -> Pieces:
        task, made = work.task, self._token(work.task)
        came = self.redundant_forwards.taken(task)
        assert came == (None if task.first else made)
        reads = task.first or task.last
        misread = (came is not None and came.misread) or (reads and self.context.corpus.wrong)
        made = replace(made, misread=misread)
        for _ in task.layers.layers():
            yield
            assert self._token(task) == made, "weights changed under a forward that is run ahead"
        self._ran_redundant(task, made)

    def _out(self, _task: Task, graph: Token) -> Token:
        return graph

    def _token(self, task: Task) -> Token:
        """What this device makes of the micro-batch now."""
        weights = self.context.store.weights(task.layers)
        assert weights[0] == self.counters.applied, f"{self.context.device}: {weights} in {self.counters}"
        self.sim_group.check(task.layers, weights)
        return Token(self.counters.step, task.route.micro_batch, weights)

    def _forward(self, work: Work) -> Pieces:
        self._reach("forward")
        task, made = work.task, self._token(work.task)
        came = made if task.first else self._input(task, "F")
        assert came == made
        reads = task.first or task.last
        made = replace(made, misread=came.misread or (reads and self.context.corpus.wrong))
        for _ in task.layers.layers():
            yield
            assert self._token(task) == made, "weights changed under a forward"
            self.clock.forwards += task.route.again(task.position) >= FORWARD
        self.board.ran_forward(task)
        if task.has_backward:
            self.graphs[task] = made
        self._ran_forward(task, made)

    def _evaluation(self, work: Work) -> Pieces:
        self._reach("forward")
        task, made = work.task, self._token(work.task)
        came = made if task.first else self._input(task, "F")
        assert came == made
        for _ in task.layers.layers():
            yield
            assert self._token(task) == made, "weights changed under an evaluation"
            self.clock.forwards += task.route.again(task.position) >= FORWARD
        if task.last:
            micro_batch = task.route.micro_batch
            self.reducer.losses[micro_batch] = evaluated_loss_of(made.weights, self.eval_numbers[micro_batch])
        self.board.ran_forward(task)
        self._ran_forward(task, made)

    def _backward(self, work: Work) -> Pieces:
        task, made = work.task, self._token(work.task)
        if not task.last:
            assert self._input(task, "B") == made
        graph = self.graphs.pop(task)
        assert graph == made, "the forward was made from other weights"
        owed = []
        for layer in reversed(range(max(task.lowest, task.layers.start), task.layers.stop)):
            yield
            assert self._token(work.task) == made, "weights changed under a backward"
            wanted = work.task.route.wants(layer)
            if wanted:
                self._note(work.task, layer, misread=graph.misread)
            if wanted and self.board.apart:
                owed.append((layer, [made], made))
            elif wanted:
                self._add(work.task, layer, [])
            self._reach("backward")
            self._contribute()
        if self.board.apart:
            self.debts[work.task] = owed
        self.board.ran_backward(work.task)
        if work.task.sends_back:
            self._pass_on(work.task, "B", made)

    def _weights(self, work: Work) -> Pieces:
        made = self._token(work.task)
        for layer, _, token in self.debts.pop(work.task):
            yield
            assert token == made, "what W completes was made from other weights"
            self._add(work.task, layer, [])
            self._reach("weights")
            self._contribute()
        self.board.ran_weights(work.task)

    def _note(self, task: Task, layer: int, *, misread: bool) -> None:
        if layer == self.context.store.spec.num_layers - 1:
            micro_batch = task.route.micro_batch
            self.reducer.losses[micro_batch] = loss_of(self.counters.step, micro_batch) + misread
            job, round_ = self.sim.job_id, self.counters.round
            self.sim.world.texts.note(job, round_, micro_batch, wrong=misread)

    def _add(self, task: Task, layer: int, _grads: object) -> None:
        world, store, step = self.sim.world, self.context.store, self.counters.step
        micro_batch = task.route.micro_batch
        by_bucket = {
            bucket: Gradient(
                world.is_nan(step, bucket, micro_batch),
                world.overflows_at(step, bucket, micro_batch, store.buckets[bucket].exponents[1]),
            )
            for bucket in store.spec.buckets_of(layer)
        }
        parts: Any = shared_out(by_bucket, micro_batch, store.shards.num_shards)
        told = [self.reducer._told_of(layer, micro_batch)] if store.spec.num_told(layer) else []
        self.reducer.add(layer, micro_batch, parts[store.rank])
        self.sim_group.send_all(self.counters.round, layer, micro_batch, parts, told)
        self.clock.gradients += task.route.again(task.position) >= BACKWARD
