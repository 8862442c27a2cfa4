"""One round's forward and backward on a device: runs the board's tasks and hands on what they make.

Owns graphs, what a decoupled backward still owes, and what was sent. While no task is ready it runs forward
passes of devices whose layers this one holds, too, a layer at a time, so that none waits longer than for a
layer. Owns neither which task is next (``tasks``) nor what becomes of weight gradients (``reduce``), nor when
a round begins and ends (``executor``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from oobleckd.planner.plan import BACKWARD, FORWARD, NOTHING, Recompute
from oobleckd.worker.models import Batch, Call, Owed, gradients, input_gradients, seed_layer, tensors_of
from oobleckd.worker.recompute.block import BlockInput, Held, LayerGraph, computed
from oobleckd.worker.round.batch_ahead import BatchAhead
from oobleckd.worker.round.boundary_cache import BoundaryCache
from oobleckd.worker.round.marks import Place
from oobleckd.worker.round.op_times import Piece
from oobleckd.worker.round.redundant_forward import RedundantForwards
from oobleckd.worker.round.round import ComputeContext, Debts, Graph, Pieces, RoundClock, Work
from oobleckd.worker.round.sum_copies import Copies
from oobleckd.worker.round_machine.commands import RoundSpec, TakeUp
from oobleckd.worker.round_machine.tasks import Kind, Task
from oobleckd.worker.runtime.timing import Moment
from oobleckd.worker.sharding.group import Waited
from oobleckd.worker.transport.mailbox import Key, TensorMessage

Returned = Mapping[Key, TensorMessage]


class Passes:
    """The forward and backward passes of the round of ``spec``, whose sums go to the reducer of ``copies``.

    Activations between hops and their gradients are (batch, sequence, hidden), losses float32 scalars, weight
    gradients float32 of the parameters' shapes. ``returned``: messages that were taken for the round in vain.
    ``pieces``: what was done in it, and when; ``repaired``: attempts in it make up for a loss.
    ``routed``: what routers told in forward passes, by layer and micro-batch, which is the same in each of
    them. ``eval_numbers``: of its micro-batches in the evaluation, where it is a round of one. ``recompute``:
    what blocks compute again in the backward.
    """

    def __init__(
        self,
        context: ComputeContext,
        spec: RoundSpec,
        copies: Copies,
        returned: Returned | None = None,
        recompute: Recompute = "none",
    ) -> None:
        self.context, self.counters, self.tag, self.board = context, spec.counters, spec.tag, spec.board
        self.copies, self.reducer, self.recompute = copies, copies.reducer, recompute
        self.graphs: dict[Task, Graph] = {}
        self.debts: dict[Task, Debts] = {}
        self.routed: dict[Place, Tensor] = {}
        self.under_way: Work | None = None
        self.halted: dict[tuple[Kind, Task], Work] = {}
        self.boundary_cache = BoundaryCache(context.job.schedule.boundary_bytes)
        self.redundant_forwards = RedundantForwards(
            context.job.schedule.redundant_bytes, context.redundant_bytes.setdefault(recompute, {})
        )
        self.redundant_work: Work | None = None
        self.returned: dict[Key, TensorMessage] = dict(returned or {})
        self.taken: dict[Key, TensorMessage] = {}
        self.eval_numbers = context.job.eval_rounds.micro_batches(spec.counters)
        self.batch_ahead = BatchAhead(context.store.device)
        self.clock = RoundClock()
        self.gathers = bool(context.group.others)  # weights, of a shard group
        self.pieces: list[Piece] = []
        self.repaired = False

    # ------------------------------------------------------------------ tasks

    def run(self, kind: Kind, task: Task) -> None:
        """Run a task to its end, or until a report freezes its micro-batch."""
        began, num_waits = self.context.timer.now(), len(self.context.group.waits)
        # Another kind of work for who looks for hangs: the first forward pass with a graph has more to load.
        # (D-detection-016)
        like = "E" if self.board.evaluates else kind
        with self.context.activity.doing(
            like, f"{task.position}{kind}{task.route.micro_batch}", len(task.layers)
        ):
            work = self.halted.pop((kind, task), None)
            self._run(work or self._begun(kind, task))
        waits = self.context.group.waits[num_waits:]
        self.clock.busy.append((began, self.note(kind, task, began, waits=waits)))

    def note(
        self,
        kind: str,
        task: Task | None,
        began: Moment,
        *,
        early: bool = False,
        waits: Sequence[Waited] = (),
    ) -> Moment:
        """Note that work of ``kind`` on ``task`` (None: on the whole round) has ended, or halts, which began
        at ``began`` (``Piece``). Returns the moment of now.
        """
        stopped = self.context.timer.now()
        self.pieces.append(Piece(kind, task, began, stopped, early, tuple(waits)))
        return stopped

    def _begun(self, kind: Kind, task: Task) -> Work:
        work = Work(kind, task)
        forward = self._evaluation if self.board.evaluates else self._forward
        pieces = {"F": forward, "W": self._weights}.get(kind, self._backward)
        work.pieces = pieces(work)
        return work

    def _run(self, work: Work) -> None:
        """Compute layer by layer, to the end or until it halts."""
        self.under_way = work
        while self._computed(work):
            # Others of the group send as much as the gradients of all layers here in a backward pass: it
            # must not wait until this device is through with its own.
            if self.gathers:
                self.context.group.hear_gradients()
            if self._halts(work):
                break
        self.under_way = None

    def _computed(self, work: Work) -> bool:
        """Compute one layer of it; whether there are more."""
        if not self.context.faults.drags:
            return work.compute()
        began_s = self.context.timer.settle()
        more = work.compute()
        self.context.faults.drag(self.context.timer.settle() - began_s)
        return more

    def _halts(self, work: Work) -> bool:
        """Whether a report froze its micro-batch while a layer was computed, or its gradients were added up.

        The report was answered with what is in the sums by then, these gradients among it. What was found is
        kept in case the next attempt goes on here; a forward pass begins again.
        """
        if not self._is_frozen(work):
            return False
        # Half a backward pass is worth keeping, as the next attempt mostly stays with this hop; half a
        # forward pass is one message to be sent again. (D-recovery-014)
        if work.kind == "F":
            self.clock.forwards += work.num_pieces
        else:
            self.halted[work.kind, work.task] = work
        return True

    def _is_frozen(self, work: Work) -> bool:
        return work.task.route.micro_batch in self.board.frozen

    def arrived(self, task: Task, kind: str) -> bool:
        """Whether the message that ``task`` waits for is here."""
        key = task.key(kind, self.tag, task.position)
        return key in self.returned or self.context.messenger.has(key)

    def has_input(self, task: Task, kind: str) -> bool:
        """Whether ``task`` has received the message, including when it is already being computed."""
        works = [*self.halted.values(), *([self.under_way] if self.under_way else [])]
        back = {"F": False, "B": True, "I": True}
        taken = any(work.task is task and back.get(work.kind) == (kind == "B") for work in works)
        return taken or self.arrived(task, kind)

    def _input(self, task: Task, kind: str) -> Tensor:
        key = task.key(kind, self.tag, task.position)
        message = self.returned.pop(key, None) or self.context.messenger.take(key)
        assert message is not None
        if self.board.forward_only:
            self.taken[key] = message
        return message.tensors[0]

    def _reach(self, point: str) -> None:
        self.context.faults.reach(point, self.counters.round)

    def _forward(self, work: Work) -> Pieces:
        self._reach("forward")
        task, low, stop = work.task, work.task.lowest, work.task.layers.stop
        x = None if task.first else self._input(task, "F")
        batch = self._batch(task)
        calls, weight = self._calls(task, batch), self._weight(task)
        graph: Graph = []
        for layer in task.layers.layers():
            needed = layer >= low
            into = None if x is None else x.detach().requires_grad_(layer > low)
            # With a graph also below the lowest layer that is wanted: without one torch may choose another
            # kernel, and whoever computed it the first time had one. (D-recompute-005)
            ahead = layer + 1 if layer + 1 < stop else None
            entered = self._with_weights(layer, ahead) if self.gathers else self.context.released()
            with entered, torch.enable_grad():
                x, held = self._layer_forward(task, layer, into, batch, calls.get(layer), weight)
            if self.context.store.layers[layer].router is not None:
                self._note_routing(task, layer)
            yield
            if needed:
                graph.append(held)
            x = x.detach()
            del held
            self.clock.forwards += task.route.again(task.position) >= FORWARD
        self.board.ran_forward(task)
        if task.has_backward:
            self.graphs[task] = graph
        assert x is not None
        self._ran_forward(task, x)

    def _layer_forward(
        self,
        task: Task,
        layer: int,
        into: Tensor | None,
        batch: Batch | None,
        call: Call | None,
        weight: float,
    ) -> tuple[Tensor, Held]:
        """What comes out of ``layer``, and what is held of it for the backward."""
        self._seed(task, layer)
        module = self.context.store.layers[layer]
        apart = self.board.apart and task.route.wants(layer)
        if self.recompute != "none" and self._is_block(layer):
            assert into is not None
            keeps = self.recompute == "selective"
            return computed(module, into, call, weight, apart=apart, keeps_products=keeps)
        owed: Owed | None = None
        if apart:
            x, owed = module.forward_apart(into, batch, call, weight)
        else:
            x = module(into, batch, call, weight)
        return x, LayerGraph(into, x, owed)

    @contextmanager
    def _with_weights(self, layer: int, following: int | None, point: str = "gather") -> Iterator[None]:
        """While ``layer`` is computed by a device of a shard group, and then ``following``. ``point``: of the
        faults, where it has its weights and those of ``following`` are on their way.
        """
        with self.context.released(), self.context.group.weights(layer, following):
            self._reach(point)
            yield

    def _seed(self, task: Task, layer: int) -> None:
        # Before each layer, so that dropout is the same wherever the layer runs, the first time and when it
        # is computed again (docs/exactness.md).
        job, store = self.context.job, self.context.store
        seed_layer(job.train.seed, self.counters.step, task.route.micro_batch, layer, store.device)

    def _is_block(self, layer: int) -> bool:
        """Whether ``layer`` may be computed again in the backward."""
        return 0 < layer < self.context.store.spec.num_layers - 1

    def _evaluation(self, work: Work) -> Pieces:
        """F in a round that evaluates. Of what it computes the output alone is kept, where it is sent on."""
        self._reach("forward")
        task, layers, stop = work.task, self.context.store.layers, work.task.layers.stop
        x = None if task.first else self._input(task, "F")
        batch = self._batch(task)
        calls = self._calls(task, batch)
        for layer in task.layers.layers():
            ahead = layer + 1 if layer + 1 < stop else None
            with self._with_weights(layer, ahead) if self.gathers else self.context.released():
                x = layers[layer].evaluate(x, batch, calls.get(layer))
            yield
            self.clock.forwards += task.route.again(task.position) >= FORWARD
        assert x is not None
        if task.last:  # of the one target that stands in for none the loss says nothing
            self.reducer.losses[task.route.micro_batch] = x if self._num_targets(task) else 0.0
        self.board.ran_forward(task)
        self._ran_forward(task, x)

    def _ran_forward(self, task: Task, out: Tensor) -> None:
        """Hand on what came out of ``task``."""
        self._draw_ahead()
        if not task.last and task.route.reached_at(task.position + 1) == NOTHING:
            self._pass_on(task, "F", out)
        self._expect_redundant(Task(task.route, task.position + 1), out)

    def _batch(self, task: Task) -> Batch | None:
        """The micro-batch, where a hop begins or ends the model; in between, where documents are kept apart,
        their places alone.
        """
        if not self._has_batch(task):
            return None
        return self.batch_ahead.take(self._batch_key(task), lambda: self._drawn(task))

    def _has_batch(self, task: Task) -> bool:
        return task.first or task.last or self.context.job.data.is_separate

    def _batch_key(self, task: Task) -> tuple[int, bool, bool]:
        return task.route.micro_batch, task.first, task.last

    def _drawn(self, task: Task) -> Batch:
        reads = task.first or task.last
        draw = self._evaluated if self.board.evaluates else self._trained_on
        return draw(task, reads=reads)

    def _draw_ahead(self) -> None:
        """Send the micro-batch of the next forward pass to a GPU while that has work."""
        task = next((task for task in self.board.forward if self._has_batch(task)), None)
        if task is not None:
            self.batch_ahead.draw(self._batch_key(task), lambda: self._drawn(task))

    def _trained_on(self, task: Task, *, reads: bool) -> Batch:
        corpus, step, micro_batch = self.context.corpus, self.counters.step, task.route.micro_batch
        batch = corpus.batch(step, micro_batch, tokens=reads)
        if task.last:
            counted = corpus.targets_of(step)[micro_batch]
            assert batch.num_targets == counted, "a micro-batch weighs what it does not ask for"
            if not self._weight(task):
                batch = batch.with_a_target()
        return batch

    def _evaluated(self, task: Task, *, reads: bool) -> Batch:
        evaluation = self.context.corpus.evaluation
        assert evaluation is not None, "a job without text to evaluate on has no such round"
        batch = evaluation.batch(self.eval_numbers[task.route.micro_batch], tokens=reads)
        return batch.with_a_target() if task.last and not self._num_targets(task) else batch

    def _num_targets(self, task: Task) -> int:
        """How many tokens a micro-batch of an evaluation asks for."""
        evaluation = self.context.corpus.evaluation
        assert evaluation is not None, "a job without text to evaluate on has no such round"
        return evaluation.targets[self.eval_numbers[task.route.micro_batch]]

    def _calls(self, task: Task, batch: Batch | None) -> Mapping[int, Call]:
        """What the blocks of a hop are called with, where that depends on the micro-batch: layer -> call."""
        spec, layers = self.context.store.spec, task.layers
        has_blocks = layers.stop > 1 and layers.start < spec.num_layers - 1
        if batch is None or batch.positions is None or batch.documents is None or not has_blocks:
            return {}
        # Every hop makes masks and angles by itself, on its own device and in every attempt: sent along, a
        # mask would be larger than all that is computed with it. (D-models-007)
        with self.context.released():
            return spec.calls(batch.positions, batch.documents)

    def _weight(self, task: Task) -> float:
        """How much its micro-batch counts."""
        return self.context.weights_of(self.counters.step).each[task.route.micro_batch]

    def _weighed(self, task: Task, head: Held) -> Tensor:
        """What the backward pass of the loss, the mean over its micro-batch, begins with."""
        assert isinstance(head, LayerGraph), "a head is not computed again"
        return torch.full_like(head.out, self._weight(task))

    def _backward(self, work: Work) -> Pieces:
        """B, or the I of a decoupled one. Its task may be another when it goes on: the next attempt's."""
        task = work.task
        graph = self.graphs.pop(task)
        g: Tensor | None = self._weighed(task, graph[-1]) if task.last else self._input(task, "B")
        debts: Debts = []
        low, stop = max(task.lowest, task.layers.start), task.layers.stop
        for layer in reversed(range(low, stop)):
            ahead = layer - 1 if layer > low else None
            entered = (
                self._with_weights(layer, ahead, "gather-backward")
                if self.gathers
                else self.context.released()
            )
            with entered:
                ran, grads = self._layer_backward(work.task, layer, graph.pop(), g)
            yield
            flows, owed = ran.into is not None and ran.into.requires_grad, ran.owed
            g = grads.pop() if flows else None
            if owed is not None:
                self._note_told(work.task, layer, ran.out)
                debts.append((layer, grads, owed))
            elif work.task.route.wants(layer):
                self._note_told(work.task, layer, ran.out)
                self._add(work.task, layer, [grad for grad in grads if grad is not None])
                # A report came while the gradients were added: it was told that they are in. The task halts
                # behind the addition, or it would go on with a hop that may not be its own any more.
                # (D-recovery-022)
                if self._is_frozen(work):
                    yield
            del ran, grads  # of a block that is computed again there is no more than one at a time
            self._reach("backward")
            self._contribute()
        if self.board.apart:
            self.debts[work.task] = debts
        self.board.ran_backward(work.task)
        if work.task.sends_back:
            assert g is not None
            self._pass_on(work.task, "B", g)
        if not self.board.apart:
            self.copies.send()

    def _layer_backward(
        self, task: Task, layer: int, held: Held, g: Tensor | None
    ) -> tuple[LayerGraph, list[Tensor | None]]:
        """The backward of ``layer``, or its I: the graph that it went through, and the gradients found, that
        of the layer's input last where one flows through it.
        """
        module, wants = self.context.store.layers[layer], task.route.wants(layer)
        if isinstance(held, BlockInput):
            held = held.again(module, partial(self._seed, task, layer))
        inputs = module.leaves if held.owed is not None or wants else []
        if held.into is not None and held.into.requires_grad:
            inputs.append(held.into)
        if held.owed is not None:
            return held, input_gradients(held.out, inputs, g, held.owed)
        return held, [*gradients(held.out, inputs, g)]

    def _weights(self, work: Work) -> Pieces:
        for layer, found, owed in self.debts.pop(work.task):
            leaves = self._leaves(layer)
            with self.context.released():
                grads = owed.complete(leaves, found)
            yield
            self._add(work.task, layer, grads)
            if self._is_frozen(work):
                yield
            self._reach("weights")
            self._contribute()
        self.board.ran_weights(work.task)
        self.copies.send()

    # ------------------------------------------------------------------ redundant forward passes

    def _expect_redundant(self, task: Task, x: Tensor) -> None:
        """Set room aside for hop ``task``, which this device may run ahead for another; ``x``
        goes into it.
        """
        if task in self.board.redundant and not self.redundant_forwards.expect(task, x):
            self.board.skip_redundant(task)

    def advance_redundant(self) -> bool:
        """Compute one layer of a forward pass ahead, as nothing else is ready; False if there is
        none to run.
        """
        if self.redundant_work is not None and self.redundant_work.task not in self.board.redundant:
            self._abandon(self.redundant_work.task)  # its micro-batch was frozen while it computed
        work = self.redundant_work = self.redundant_work or self._begun_redundant()
        if work is None:
            return False
        began = self.context.timer.now()
        with self.context.activity.doing("S", f"{work.task.position}S{work.task.route.micro_batch}"):
            # One layer at a time, and only as nothing is ready: Bamboo overlaps such passes on a second
            # stream, which on one device would delay what others wait for. (D-policies-007)
            more = work.compute()
        self.note("S", work.task, began)
        if not more:
            self.redundant_work = None
        elif not self.redundant_forwards.fits:
            self.redundant_forwards.measured(work.task)
            self.board.skip_redundant(work.task)
            self._abandon(work.task)
        return True

    def _begun_redundant(self) -> Work | None:
        while (task := self.board.next_redundant()) is not None:
            if self.redundant_forwards.begins(task):
                work = Work("F", task)
                work.pieces = self._redundant(work)
                return work
            self.board.skip_redundant(task)
        return None

    def _abandon(self, task: Task) -> None:
        self.redundant_work = None
        self.redundant_forwards.forget(task)

    def _redundant(self, work: Work) -> Pieces:
        """The forward pass of a hop that another device computes, with its bits: from the same input, weights
        and seeds.

        The backward would be whole, if it comes to one: what a decoupled one keeps for W would stay on the
        device.
        """
        task = work.task
        x, batch = self.redundant_forwards.taken(task), self._batch(task)
        calls = self._calls(task, batch)
        graph: Graph = []
        for index in task.layers.layers():
            into = None if x is None else x.detach().requires_grad_(index > 0)
            ahead = index + 1 if index + 1 < task.layers.stop else None
            with self._with_weights(index, ahead) if self.gathers else self.context.released():
                x, held = self._redundant_layer(task, index, into, batch, calls.get(index))
            if self.context.store.layers[index].router is not None:
                self._note_routing(task, index)
            yield
            graph.append(held)
        self._ran_redundant(task, graph)

    def _redundant_layer(
        self, task: Task, index: int, into: Tensor | None, batch: Batch | None, call: Call | None
    ) -> tuple[Tensor, Held]:
        """As ``_layer_forward``; what is held is counted."""
        self._seed(task, index)
        layer, forwards = self.context.store.layers[index], self.redundant_forwards
        weight = self._weight(task)
        if self.recompute != "none" and self._is_block(index):
            assert into is not None
            # Its input alone, whatever is held of blocks here: what is made of it is wanted after a loss
            # only. (D-recompute-003)
            forwards.hold(task, into)
            return computed(layer, into, call, weight)
        shared = tensors_of(call) if call is not None else ()
        # A whole backward, also in decoupled jobs: what is held for W would stay on the device, beside a
        # GPU too, and the sums are the same bits. (D-policies-008)
        with forwards.saving(task, into, layer.leaves, shared):
            x = layer(into, batch, call, weight)
        return x, LayerGraph(into, x, None)

    def _ran_redundant(self, task: Task, graph: Graph) -> None:
        self.redundant_forwards.measured(task)
        self.board.ran_redundant(task)
        self.graphs[task] = graph

    def drop_redundant(self) -> None:
        """Drop all forward passes run ahead: all layers held here are reduced, so this device has what the
        dead would have added.
        """
        for task in self.board.redundant_done:
            del self.graphs[task]
        self.board.redundant, self.board.redundant_done = [], []
        self.redundant_work = None
        self.redundant_forwards.clear()

    # ------------------------------------------------------------------ sums and messages

    def _leaves(self, layer: int) -> list[Tensor]:
        return self.context.store.layers[layer].leaves

    def _note_routing(self, task: Task, layer: int) -> None:
        """Keep what the router of ``layer``, which has just computed, told of the micro-batch, until its
        gradients are there.
        """
        router = self.context.store.layers[layer].router
        if router is not None and router.told is not None:
            self.routed[layer, task.route.micro_batch] = router.told

    def _note_told(self, task: Task, layer: int, out: Tensor) -> None:
        """Hand on what is told of the micro-batch beside the gradients of ``layer``."""
        what, micro_batch = self.context.store.layers[layer], task.route.micro_batch
        if what.is_head:
            self.reducer.losses[micro_batch] = out.detach()
        if what.router is not None:
            self.reducer.routed[layer, micro_batch] = self.routed[layer, micro_batch]

    def _add(self, task: Task, layer: int, grads: list[Tensor]) -> None:
        """Add the gradients of all parameters of ``layer`` (float32, in the layer's order) to the sums."""
        spec, rest, group = self.context.store.spec, iter(grads), self.context.group
        by_bucket = {b: [*islice(rest, len(spec.buckets[b].keys))] for b in spec.buckets_of(layer)}
        if not self.gathers:
            self.reducer.add(layer, task.route.micro_batch, by_bucket)
        else:
            told = self.reducer.told_of(layer, task.route.micro_batch)
            self.reducer.add(layer, task.route.micro_batch, group.parts(by_bucket))
            # Whatever was asked meanwhile: it is in the ledger, and so it will be in those of the others.
            group.send(self.counters.round, layer, task.route.micro_batch, by_bucket, told)
        self.clock.gradients += task.route.again(task.position) >= BACKWARD

    def _contribute(self) -> None:
        """Send what is complete, between two layers. Peers are not kept waiting for the word that their
        copies have arrived, either.
        """
        if self.reducer.contribute_ready():
            self._reach("reduce")
        self.copies.hear_all()

    def _pass_on(self, task: Task, kind: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._send(task, kind, tensor)
        self.boundary_cache.put(kind, task, tensor)

    def _send(self, task: Task, kind: str, tensor: Tensor) -> None:
        position = task.position + (1 if kind == "F" else -1)
        peer = task.route.segments[position].device
        self.context.messenger.send(peer, task.key(kind, self.tag, position), [tensor])

    # ------------------------------------------------------------------ failures

    def take_up(self, command: TakeUp) -> None:
        """Go on with new attempts of frozen micro-batches.

        What was done in the attempt before is taken over where the new route says so (graphs, halted backward
        passes, gradients that have arrived), and dropped elsewhere.
        """
        frozen = command.frozen
        self.repaired = self.repaired or command.repairs
        graphs, debts = self.graphs, self.debts
        halted, self.halted = self.halted, {}
        self.redundant_forwards.freeze(frozen)
        self.graphs = {task: graph for task, graph in graphs.items() if task.route.micro_batch not in frozen}
        self.debts = {task: debt for task, debt in debts.items() if task.route.micro_batch not in frozen}
        for task, before in command.resumed.items():
            for kind in ("B", "I", "W"):
                if work := halted.get((kind, before)):
                    work.task = task
                    self.halted[kind, task] = work
            if before in graphs and task.has_backward:
                self.graphs[task] = graphs[before]
            if before in debts:
                self.debts[task] = debts[before]
            self._readdress(task, before)
            self._send_again(task, before, graphs.get(before))

    def _readdress(self, task: Task, before: Task) -> None:
        """Hand a gradient that arrived for ``before`` to ``task``: its sender may have nothing left to do."""
        key, old = (of.key("B", self.tag, of.position) for of in (task, before))
        message = self.returned.pop(old, None) or self.context.messenger.take(old)
        if message is not None:
            self.returned[key] = message

    def _send_again(self, task: Task, before: Task, graph: Graph | None) -> None:
        """Send once more what a neighbouring hop needs that is in new hands: activations, or
        their gradient.
        """
        position, reached, device = task.position, task.route.reached, self.context.store.device
        if reached[position] >= FORWARD and not task.last and reached[position + 1] == NOTHING:
            self._send(task, "F", self._activations(before, graph))
        waited_for = task.sends_back and reached[position - 1] < BACKWARD
        if reached[position] >= BACKWARD and waited_for and self.boundary_cache.has("B", before):
            self._send(task, "B", self.boundary_cache.get("B", before, device))

    def _activations(self, task: Task, graph: Graph | None) -> Tensor:
        """The activations that came out of ``task``: as they were sent, or from its graph where it was run
        ahead.
        """
        if self.boundary_cache.has("F", task):
            return self.boundary_cache.get("F", task, self.context.store.device)
        assert graph is not None, "a decision counts on what was told to be there"
        return self._out(task, graph)

    def _out(self, task: Task, graph: Graph) -> Tensor:
        last, layer = graph[-1], task.layers.stop - 1
        if isinstance(last, LayerGraph):
            return last.out.detach()
        with self.context.activity.doing("F", f"{task.position}F{task.route.micro_batch}"):
            self._seed(task, layer)
            with self.context.group.weights(layer):
                return computed(self.context.store.layers[layer], last.into, last.call, last.weight)[0]
