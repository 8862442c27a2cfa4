"""The heart of a device: walks the tasks of a round, reduces, votes, commits, and starts over.

Owns one device's training of one job between two deployments. Reads top to bottom: ``advance`` does
one piece of work (a vote, a contribution, a task, a commit) and says whether there was any; the device's
loop calls it until there is none and then sleeps until a letter or a control message arrives. Reports and
decisions come in through ``report`` and ``decide`` between two pieces of work, never inside one.

Owns neither processes nor sockets (``device``, ``post``), nor what a layer computes (``models``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Decide, FromWorker, Held, Progress, StepDone
from oobleckd.protocol.parts import Counters, Flags, Outcome, Vote
from planner.plan import BACKWARD, FORWARD, NOTHING, Detours, Layout, Route, standing_routes
from worker.commit import Commit, outcome_of
from worker.data import Corpus
from worker.faults import Faults
from worker.kept import Kept
from worker.models import Owed, gradients, input_gradients, seed_layer
from worker.post import Post
from worker.pulse import Pulse
from worker.reduce import Contribution, Reducer
from worker.snapshot import ledger_digest, write_share
from worker.store import Store
from worker.tasks import Board, Order, Task
from worker.update import apply_update

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


class Executor:
    """One device's engine for one job."""

    def __init__(
        self,
        device: str,
        job_id: str,
        job: Job,
        store: Store,
        corpus: Corpus,
        post: Post,
        faults: Faults,
        tell: Callable[[FromWorker], None],
        pulse: Pulse | None = None,
    ) -> None:
        self.device, self.job_id, self.job = device, job_id, job
        self.store, self.corpus, self.post, self.faults, self.tell = store, corpus, post, faults, tell
        self.pulse = pulse or Pulse()
        self.layout = Layout(0, store.spec.num_layers, {}, ())
        self.dead: frozenset[str] = frozenset()
        self.detours: Detours | None = None
        self.counters = Counters()
        self.flags = Flags()
        self.holding, self.hold_next = True, False
        self.commit = Commit(device)
        self.board = Board(device, job.schedule.apart)
        self.reducer = Reducer(device, store, self.board, post, job.num_micro_batches, job.train.exact)
        self.graphs: dict[Task, Graph] = {}
        self.debts: dict[Task, Debts] = {}
        self.kept = Kept(job.schedule.boundary_bytes)
        self.order: Order = ()
        self.clock = Clock()

    # ------------------------------------------------------------------ layouts and boundaries

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> None:
        """Take ``layout`` into force at a boundary; its layers are in the store. Does not run yet.

        ``order``: what the planner would have this device do in every round, where the backward is decoupled.
        """
        self.order = order
        self.layout, self.dead, self.detours, self.counters = layout, frozenset(), None, counters
        self.holding, self.hold_next = True, False
        self.flags = Flags()
        self.reducer.adopt()
        self.commit.adopt(layout.epoch, counters.round, layout.holdings)
        self._begin()

    def resume(self) -> None:
        """Run from a boundary."""
        self.holding = False
        self.clock = Clock()

    @property
    def finished(self) -> bool:
        """Whether the job's last step is committed here."""
        return self.counters.step >= self.job.train.steps

    def _begin(self) -> None:
        """Set up the next round: standing routes that touch no dead device."""
        self.post.purge(lambda key: key[0] in {"F", "B"} and int(key[1]) < self.counters.round)
        self.graphs.clear()
        self.debts.clear()
        self.kept.clear()
        standing = [r for r in self._standing() if not r.touches(self.dead)]
        self.board.begin(sorted(self.store.layers), standing, () if self.dead else self.order)
        self.reducer.begin(self.counters.round)
        self._enter({})

    def _standing(self) -> tuple[Route, ...]:
        """The routes of the present round, if nothing more fails."""
        return standing_routes(self.layout, self.detours, self.counters.round)

    def _enter(self, donors: Mapping[int, str]) -> None:
        self.reducer.enter(self.commit.epoch, self.layout, self.commit.live, donors)

    # ------------------------------------------------------------------ one piece of work

    def advance(self) -> bool:
        """Do one piece of work; False if everything waits for others or the device holds."""
        if self.holding:
            return False
        heard = self._hear()
        if not self.commit.frozen:
            if self._contribute():
                return True
            if self.reducer.complete and self.commit.own is None:
                self._vote()
                return True
            vote = self.commit.committed()
            if vote is not None:
                if self._commit(vote):
                    self.hold()
                return True
        found = self.board.next(self._arrived)
        if found is None:
            return heard
        self._run(*found)
        return True

    def _hear(self) -> bool:
        """Take in contributions and votes; whether there were any."""
        heard = False
        here = (self.commit.epoch, self.counters.round)
        for key in self.post.waiting():
            if key[0] == "V":
                letter = self.post.take(key)
                assert letter is not None
                vote = msgspec.msgpack.decode(letter.meta, type=Vote)
                heard |= self.commit.hear(str(key[3]), int(key[1]), int(key[2]), vote)
            elif key[0] == "G" and not self.commit.frozen:
                at = (int(key[1]), int(key[2]))
                if at[0] > here[0] or at[1] > here[1]:
                    continue  # from a peer that is ahead
                letter = self.post.take(key)
                assert letter is not None
                if at == here:
                    what = msgspec.msgpack.decode(letter.meta, type=Contribution)
                    self.reducer.hear(int(key[3]), str(key[4]), what, letter.tensors)
                    heard = True
        return heard

    def _arrived(self, task: Task, kind: str) -> bool:
        return self.post.has(task.key(kind, self.counters.round, task.position))

    def _contribute(self) -> bool:
        if self.commit.frozen or not self.reducer.contribute():
            return False
        self.faults.reach("reduce", self.counters.round)
        return True

    def _vote(self) -> None:
        vote = self.reducer.vote()
        self.commit.cast(Vote(vote.norms, vote.losses, vote.nan, vote.overflow, self.flags))
        self._send_vote()
        self.faults.reach("reduced", self.counters.round)

    def _send_vote(self) -> None:
        meta = msgspec.msgpack.encode(self.commit.own)
        key = ("V", self.commit.epoch, self.counters.round, self.device)
        for peer in sorted(self.commit.live - {self.device}):
            self.post.send(peer, key, [], meta)

    # ------------------------------------------------------------------ forward and backward

    def _run(self, kind: str, task: Task) -> None:
        began = time.perf_counter()
        with self.pulse.doing(kind, f"{task.position}{kind}{task.route.micro_batch}", len(task.layers)):
            if kind == "F":
                self._forward(task)
            elif kind == "W":
                self._weights(task)
            else:
                self._backward(task)
        self.clock.busy_s += time.perf_counter() - began

    def _input(self, task: Task, kind: str) -> Tensor:
        letter = self.post.take(task.key(kind, self.counters.round, task.position))
        assert letter is not None
        return letter.tensors[0]

    def _forward(self, task: Task) -> None:
        self.faults.reach("forward", self.counters.round)
        micro_batch, low = task.route.micro_batch, task.lowest
        x = None if task.first else self._input(task, "F")
        batch = None
        if task.first or task.last:
            batch = self.corpus.batch(self.counters.step, micro_batch).to(self.store.device)
        graph: Graph = []
        for layer in task.layers.layers():
            needed = layer >= low
            into = None if x is None else x.detach().requires_grad_(layer > low)
            seed_layer(self.job.train.seed, self.counters.step, micro_batch, layer, self.store.device)
            owed = None
            with torch.set_grad_enabled(needed):
                if self.board.apart and task.route.wants(layer):
                    x, owed = self.store.layers[layer].forward_apart(into, batch)
                else:
                    x = self.store.layers[layer](into, batch)
            if needed:
                graph.append((into, x, owed))
            self.clock.forwards += task.again
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
            self.faults.reach("backward", self.counters.round)
            self._contribute()
        self.board.ran_backward(task)
        if task.sends_back:
            assert g is not None
            self._pass_on(task, "B", g)

    def _backward_layer(
        self, task: Task, layer: int, into: Tensor | None, out: Tensor, g: Tensor | None
    ) -> Tensor | None:
        """One layer's gradients: the weights' into the sums if the route wants them, the input's returned."""
        inputs = self.store.layers[layer].leaves if task.route.wants(layer) else []
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
        inputs = self.store.layers[layer].leaves
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
            self._add(task, layer, owed.complete(self.store.layers[layer].leaves, grads))
            self.faults.reach("weights", self.counters.round)
            self._contribute()
        self.board.ran_weights(task)

    def _note_loss(self, task: Task, layer: int, out: Tensor) -> None:
        if layer == self.store.spec.num_layers - 1:
            self.reducer.losses[task.route.micro_batch] = float(out.detach())

    def _add(self, task: Task, layer: int, grads: list[Tensor]) -> None:
        """Gradients of all parameters of ``layer`` go into the sums."""
        by_bucket: dict[int, list[Tensor]] = {b: [] for b in self.store.spec.buckets_of(layer)}
        for (bucket, _, _), grad in zip(self.store.layers[layer].params, grads, strict=True):
            by_bucket[bucket].append(grad)
        self.reducer.add(layer, task.route.micro_batch, by_bucket)
        self.clock.gradients += task.again

    def _pass_on(self, task: Task, kind: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._send_on(task, kind, tensor)
        self.kept.put(kind, task, tensor)

    def _send_on(self, task: Task, kind: str, tensor: Tensor) -> None:
        position = task.position + (1 if kind == "F" else -1)
        peer = task.route.segments[position].device
        self.post.send(peer, task.key(kind, self.counters.round, position), [tensor])

    # ------------------------------------------------------------------ commit

    def _commit(self, vote: Vote) -> bool:
        """The round's one commit point has passed: roll forward. Returns whether to stop here."""
        with self.pulse.doing("U", units=max(1, len(self.store.layers))):
            outcome = self._update(vote)
        hold = self.hold_next or vote.flags.hold or self.finished
        due = self._checkpoint_due(vote, outcome)
        self.commit.advance(vote)
        done, late = vote.flags, self.flags  # a flag that came after the vote was cast waits for the next
        self.flags = Flags(late.hold and not done.hold, late.checkpoint and not done.checkpoint)
        self.hold_next, self.clock = False, Clock()
        self._begin()
        if due:
            self.write_checkpoint()
        return hold

    def _update(self, vote: Vote) -> Outcome:
        """Update, tell, and count the round."""
        self.faults.reach("commit", self.counters.round)
        outcome = outcome_of(vote)
        norm = lr = 0.0
        if outcome == "applied":
            norm, lr = apply_update(
                self.job, self.store, self.reducer.reduced, vote, self.counters, self.faults
            )
        elif outcome == "repeated":
            over = [bucket for bucket, part in self.reducer.reduced.items() if part.what.overflow]
            self.store.squeeze(over)
        self._tell_step_done(vote, outcome, norm, lr)
        self._count(outcome)
        self.faults.reach("updated", self.counters.round - 1)
        return outcome

    def _tell_step_done(self, vote: Vote, outcome: Outcome, norm: float, lr: float) -> None:
        samples, ledger = ledger_digest(self.corpus, self.counters.step, vote.losses)
        losses = [vote.losses[micro_batch] for micro_batch in sorted(vote.losses)]
        self.tell(
            StepDone(
                self.device,
                self.job_id,
                self.commit.epoch,
                self.counters,
                outcome,
                sum(losses) / len(losses),
                norm,
                lr,
                samples,
                ledger,
                time.perf_counter() - self.clock.began,
                self.clock.busy_s,
                self.clock.gradients,
                self.clock.forwards,
            )
        )

    def _count(self, outcome: Outcome) -> None:
        was = self.counters
        self.counters = Counters(
            was.round + 1, was.step + (outcome != "repeated"), was.applied + (outcome == "applied")
        )

    def _checkpoint_due(self, vote: Vote, outcome: Outcome) -> bool:
        every = self.job.checkpoint.every
        periodic = bool(every) and self.counters.step % every == 0 and outcome != "repeated"
        return periodic or vote.flags.checkpoint or self.finished

    def hold(self) -> None:
        """Stop before the present round and say so."""
        self.holding = True
        self.tell(Held(self.device, self.commit.epoch, self.counters, self.finished))

    def write_checkpoint(self) -> None:
        """Write this device's share of the state at this boundary."""
        live = frozenset(self.layout.holdings) - self.dead
        corpus = self.corpus.digest
        with self.pulse.doing("checkpoint", units=0):
            for part in write_share(
                self.device, self.job_id, self.job, self.store, self.layout, live, self.counters, corpus
            ):
                self.faults.reach("checkpoint", self.counters.round)
                self.tell(part)

    # ------------------------------------------------------------------ failures

    def report(self, epoch: int, dead: Collection[str]) -> None:
        """Devices died (docs/recovery.md, A failure, 2). Answers ``Progress``; stale reports are ignored."""
        if not self.commit.report(epoch):
            return
        self.dead |= frozenset(dead)
        frozen = {route.micro_batch for route in self._standing() if route.touches(self.dead)}
        self.board.freeze(frozen)
        if self.dead:
            self.board.forget_order()
        self.tell(
            Progress(
                self.device,
                epoch,
                self.counters,
                {layer: tuple(sorted(done)) for layer, done in self.board.done.items()},
                tuple(self.reducer.reduced),
                self.commit.heard(),
                self.commit.last,
                self.holding,
                self.board.hops(frozen, self.kept.has),
            )
        )
        self.faults.reach("frozen", self.counters.round)

    def decide(self, message: Decide) -> None:
        """What all survivors do now (docs/recovery.md, A failure, 4). Stale decisions are ignored."""
        live = frozenset(self.layout.holdings) - self.dead
        if not self.commit.decide(message.epoch, live):
            return
        self.detours = message.detours
        if self.counters.round < message.round:
            assert message.commit is not None
            self._commit(message.commit)
        self._enter(message.donors)
        self._add_routes(message.routes)
        if message.hold_now or self.finished:
            if self.finished:
                self.write_checkpoint()  # the dead may have had a bucket to write: its heir does it now
            self.hold()
            return
        self.hold_next, self.holding = message.hold, False
        if self.commit.own is not None:
            self._send_vote()

    def _add_routes(self, routes: tuple[Route, ...]) -> None:
        """New attempts. What was done in the one before is taken over where the route says so, and dropped elsewhere."""
        frozen = {route.micro_batch for route in self._standing() if route.touches(self.dead)}
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
        route, position, reached = task.route, task.position, task.route.reached_at(task.position)
        if reached >= FORWARD and not task.last and route.reached[position + 1] == NOTHING:
            self._send_on(task, "F", self.kept.get("F", before, self.store.device))
        if (
            reached >= BACKWARD
            and not task.first
            and route.reached[position - 1] < BACKWARD
            and task.sends_back
        ):
            self._send_on(task, "B", self.kept.get("B", before, self.store.device))
