"""The heart of a device: runs what its round machine asks for, with torch, sums and messages.

Owns one device's training of one job between two deployments. ``oobleckd.worker.round_machine`` decides, this
obeys: ``advance`` asks for one piece of work (a contribution, a vote, a task, a commit), does it and says
whether there was any; the device's loop calls it until there is none and then sleeps until a tensor message
or a control message arrives. Decisions come in through ``decide`` between two pieces of work, never inside
one; reports through ``report``, also while a layer computes (``yielding_lock``).

Owns neither processes nor sockets (``device``, ``messenger``), nor what a layer computes (``models``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from functools import partial
from typing import assert_never

import msgspec

from oobleckd.planner.plan import Layout
from oobleckd.protocol.job import Job
from oobleckd.protocol.learningrate import lr_at
from oobleckd.protocol.messages import Decide, FromWorker, Held
from oobleckd.protocol.parts import SPIKES, Counters, Vote
from oobleckd.worker.checkpointing.saving import CheckInputs, Saving, no_check
from oobleckd.worker.checkpointing.writer import InlineWriter, Writer
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.messaging.gather import KIND as SUMS
from oobleckd.worker.messaging.gather import MEANS
from oobleckd.worker.messaging.messenger import CountingMessenger, Messenger
from oobleckd.worker.recompute.block import recompute_of
from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.round.op_times import Round, op_times
from oobleckd.worker.round.passes import Passes, Returned
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.round.round import ComputeContext, RoundClock
from oobleckd.worker.round.sum_copies import KINDS as COPY_KINDS
from oobleckd.worker.round.sum_copies import Copies
from oobleckd.worker.round.update import apply_update, global_norm
from oobleckd.worker.round.weights import weights_of
from oobleckd.worker.round_machine.commands import (
    BeginRound,
    CastVote,
    Command,
    CommitRound,
    Contribute,
    Distrust,
    EnterExchange,
    ForgetSums,
    Give,
    Hold,
    InheritSums,
    RollBack,
    RoundSpec,
    RunTask,
    SendVote,
    TakeUp,
    Tell,
    UpdateEarly,
    WriteLast,
)
from oobleckd.worker.round_machine.commit import ReplicasDisagree
from oobleckd.worker.round_machine.exchange import Contribution, Given
from oobleckd.worker.round_machine.machine import RoundMachine, Rules
from oobleckd.worker.round_machine.tasks import Order, Task
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.runtime.timing import timer_of
from oobleckd.worker.runtime.yielding_lock import Released
from oobleckd.worker.sharding.copier import copier_of
from oobleckd.worker.sharding.group import GRADIENTS, UPDATED, ShardGroup
from oobleckd.worker.state.optimizer import clip_scale
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.training.early_update import EarlyUpdate, goes_through, restore, save
from oobleckd.worker.training.integrity import Check
from oobleckd.worker.training.report import evaluation_done, step_done
from oobleckd.worker.training.verdict import judge
from oobleckd.worker.transport.mailbox import Key, TensorMessage


class Executor:
    """One device's engine for one job: ``machine`` has its state, and this what goes with it.

    ``now``: the passes of the present round; ``early``: an update made before all votes were in, and the
    passes of the round behind it. ``returned``: what was taken for a round that was begun in vain.
    ``misread``: what it reads has changed, so nothing more is to come of it. ``gradients``: by which they are
    sent.
    """

    def __init__(
        self,
        device: str,
        job_id: str,
        job: Job,
        store: Store,
        corpus: Corpus,
        messenger: Messenger,
        faults: Faults,
        tell: Callable[[FromWorker], None],
        activity: ActivityPage | None = None,
        released: Released = nullcontext,
        writer: Writer | None = None,
        check_inputs: CheckInputs = no_check,
    ) -> None:
        self.device, self.job_id, self.job = device, job_id, job
        self.store, self.corpus, self.messenger, self.faults, self.tell = (
            store,
            corpus,
            messenger,
            faults,
            tell,
        )
        self.activity = activity or ActivityPage()
        self.saving = Saving(
            device, job_id, job, store, corpus, writer or InlineWriter(tell, faults), check_inputs
        )
        self.misread = False  # what it reads has changed: nothing more is to come of it
        self.check = Check(device, job_id, job, store, self.activity)
        uses = [bucket.uses for bucket in store.spec.buckets]
        self.weights_of = weights_of(job, corpus)
        self.gradients = CountingMessenger(messenger)
        self.machine = RoundMachine(
            device, Rules.of(job), uses, partial(goes_through, job), partial(judge, job, self.weights_of)
        )
        self.reducer = self._reducer(released)
        self.copies = Copies(self.machine.copies, messenger, self.reducer)
        self.checkpoint_due = False
        self.sample_every = 0  # op times are told of rounds whose number it divides
        timer = timer_of(store.device)
        self.group = ShardGroup(
            device,
            store,
            messenger,
            hear_gradients=self._hear_all_gradients,
            copier=copier_of(store.device),
            timer=timer,
        )
        self.context = ComputeContext(
            device,
            job,
            store,
            corpus,
            self.weights_of,
            messenger,
            faults,
            self.activity,
            self.group,
            released,
            timer=timer,
        )
        self.returned: dict[Key, TensorMessage] = {}
        self.now = self._passes(self.machine.now)
        self.early: EarlyUpdate | None = None
        self.precopy_source: PreCopySource | None = None

    def _reducer(self, released: Released) -> Reducer:
        return Reducer(
            self.machine.exchange,
            self.store,
            self.gradients,
            self.weights_of,
            exact=self.job.train.exact,
            guarded=bool(self.check.every),
            released=released,
            reached=lambda: self.faults.reach("means", self.counters.round),
        )

    def _passes(self, spec: RoundSpec, returned: Returned | None = None) -> Passes:
        recompute = recompute_of(self.job, self.machine.layout, self.device)
        return Passes(self.context, spec, self.copies, returned, recompute)

    # ------------------------------------------------------------------ what others ask

    @property
    def counters(self) -> Counters:
        """The round that is next, or under way."""
        return self.machine.counters

    @property
    def holding(self) -> bool:
        """Whether the device stands at a boundary."""
        return self.machine.holding

    @property
    def layout(self) -> Layout:
        """The one in force; of epoch 0 before the first."""
        return self.machine.layout

    # ------------------------------------------------------------------ layouts and boundaries

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> None:
        """Take ``layout`` into force at a boundary; its layers are in the store. Does not run yet.

        ``order``: what the planner would have this device do in every round; empty: whatever is ready.
        """
        self.early, self.returned = None, {}
        self.end_precopy()
        self.group.adopt(layout)
        self.machine.exchange.cut(*self.store.shards.cuts)
        commands = self.machine.adopt(layout, counters, order)
        self.corpus.draw_ahead(counters.step)
        self.reducer.adopt()
        self._obey(commands)

    def compare_every(self, steps: int) -> None:
        """From the next layout on holders compare what they have in every so many steps (0: in none)."""
        self.check.every = steps
        self.machine.rules = dataclasses.replace(self.machine.rules, check_every=steps)

    def resume(self) -> None:
        """Run from a boundary. After a rollback to the final checkpoint nothing is left to run."""
        if self.machine.over:
            self.saving.check_inputs(self.counters, hurry=True)
        self._obey(self.machine.resume())
        self.now.clock = RoundClock()

    def begin_precopy(self, precopy_source: PreCopySource) -> None:
        """Send pre-copies from now on. Until a round is committed the weights are those before it, but where
        they were updated early.
        """
        self.precopy_source = precopy_source
        if self.early is None:
            precopy_source.begin(self.counters, self.store)
            self.faults.reach("ahead", self.counters.round)

    def end_precopy(self) -> None:
        """Stop sending pre-copies."""
        if self.precopy_source is not None:
            self.precopy_source.stop()
        self.precopy_source = None

    # ------------------------------------------------------------------ one piece of work

    def advance(self) -> bool:
        """Do one piece of work; False if everything waits for others or for the disk, or the device holds.
        Raises UserError.
        """
        if self.checkpoint_due and not self.misread:
            return self._write_when_ready()
        if self.holding or self.misread or self.saving.writer.blocks:
            return False
        heard = self._hear()
        computes = not self.group.others or self.group.is_ready(self.counters.round)
        commands = self.machine.next(self.now.has_input, self._early_has_input, computes=computes)
        if commands:
            self._obey(commands)
            return True
        if (computes and self.now.advance_redundant()) or heard:
            return True
        # Samples of the next step are drawn now that there is time: at the step's end everybody would wait
        # for them.
        self.corpus.draw_ahead(self._next_step)
        return False

    @property
    def _next_step(self) -> int:
        """The first whose samples nobody may have needed yet."""
        return self.counters.step + (not self.now.board.evaluates)

    def _early_has_input(self, task: Task, kind: str) -> bool:
        return self.early is not None and self.early.passes.has_input(task, kind)

    def _hear(self) -> bool:
        """Take in contributions, votes and copies of sums; whether there were any."""
        heard = False
        for key in self.messenger.waiting():
            if key[0] == "V":
                message = self.messenger.take(key)
                assert message is not None
                vote = msgspec.msgpack.decode(message.meta, type=Vote)
                heard |= self.machine.commit.hear(str(key[3]), int(key[1]), int(key[2]), vote)
            elif key[0] in COPY_KINDS:
                heard |= self.copies.hear(key)
            elif key[0] in {SUMS, MEANS}:
                heard |= self._hear_sums(key)
            elif key[0] == UPDATED:
                heard |= self._hear_updated(key)
            elif key[0] == GRADIENTS:
                heard |= self._hear_gradients(key)
        if self.group.unopened:
            heard |= self._open_late()
        return heard

    def _hear_updated(self, key: Key) -> bool:
        """That another one of the shard group has updated. To open its memory takes as long as it takes to
        answer.
        """
        with self.activity.doing("open", units=0):
            return self.group.hear(key)

    def _open_late(self) -> bool:
        """Try again with those who did not answer; whether that has to go on."""
        with self.activity.doing("open", units=0):
            return self.group.open_late()

    def _hear_all_gradients(self) -> None:
        """Between two layers: what has come by now of the others of the shard group."""
        for key in self.messenger.waiting() if self.group.others else ():
            if key[0] == GRADIENTS:
                self._hear_gradients(key)

    def _hear_gradients(self, key: Key) -> bool:
        """What another one of the shard group has computed, of this one's shard."""
        round_, layer, micro_batch = int(key[1]), int(key[2]), int(key[3])
        if round_ > self.counters.round:
            return False
        message = self.messenger.take(key)
        assert message is not None
        if round_ == self.counters.round and self.machine.computes:
            grads, told = self.group.received(layer, message.tensors)
            self.now.board.counted_there(layer, micro_batch)
            self.reducer.note(layer, micro_batch, told)
            self.reducer.add(layer, micro_batch, grads)
        return True

    def _hear_sums(self, key: Key) -> bool:
        """A contribution of sums, or means that are given."""
        fence = self.machine.fence(int(key[1]), int(key[2]))
        if fence == "later":
            return False
        message = self.messenger.take(key)
        assert message is not None
        if fence == "old":
            return False
        bucket, source = int(key[3]), str(key[4])
        if key[0] == MEANS:
            given = msgspec.msgpack.decode(message.meta, type=Given)
            self.reducer.hear_means(bucket, source, given, message.tensors)
        else:
            what = msgspec.msgpack.decode(message.meta, type=Contribution)
            self.reducer.hear(bucket, source, what, message.tensors, added=message.added)
        return True

    def _obey(self, commands: Iterable[Command]) -> None:
        # The machine is in the state after them already, so they are obeyed in order and to their end before
        # it is asked again. (D-recovery-027)
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:  # noqa: C901, PLR0912 - one line a command
        match command:
            case RunTask():
                passes = self.early.passes if command.early and self.early is not None else self.now
                passes.run(command.kind, command.task)
            case Contribute():
                self.reducer.contribute(command)
                self.faults.reach("reduce", self.counters.round)
            case Give():
                self.reducer.give(command)
            case CastVote():
                self._vote()
            case SendVote():
                self._send_vote(command)
            case UpdateEarly():
                self._update_early(command)
            case RollBack():
                self._roll_back()
            case CommitRound():
                self._commit(command)
            case BeginRound():
                self._begin(command)
            case EnterExchange():
                self._enter()
            case InheritSums():
                self.copies.inherit(command.device, command.what)
            case ForgetSums():
                self.reducer.forget()
            case TakeUp():
                self.now.take_up(command)
            case Distrust():
                self.tell(self.check.corrupted(self.machine.epoch, self.counters, command.odds))
            case WriteLast():
                if not self.saving.only_evaluates:
                    self.checkpoint_due = True
                    self._write_when_ready()
            case Hold():
                self._hold()
            case Tell():
                self.tell(command.message)
            case _:
                assert_never(command)

    # ------------------------------------------------------------------ votes

    def _vote(self) -> None:
        if not self.reducer.look():
            return  # the next epoch is without somebody whose sums cannot be used
        compares = self.check.compares(self.counters.step)
        vote = self.reducer.vote(compared=compares)
        self.corpus.draw_ahead(self._next_step)  # who never waits still has a GPU that computes now
        self.context.timer.settle()
        # Digests travel in the votes, before the update: then what came of a flipped bit is in nobody's
        # weights. (D-corruption-001)
        if not self.now.board.evaluates:
            digests = self.check.digests(self.counters.step, self.machine.exchange.shared)
            vote = msgspec.structs.replace(vote, digests=digests, compared=self.check.every > 0)
        self.now.drop_redundant()
        send, *early = self.machine.cast(vote, writing=self.saving.writer.busy)
        self._do(send)
        self.faults.reach("reduced", self.counters.round)
        self._obey(early)

    def _send_vote(self, command: SendVote) -> None:
        meta = msgspec.msgpack.encode(command.vote)
        key = ("V", command.epoch, command.round, self.device)
        for peer in command.peers:
            self.messenger.send(peer, key, [], meta)

    # ------------------------------------------------------------------ early updates

    def _update_early(self, command: UpdateEarly) -> None:
        """Update, and begin the next round, as if all votes were in and let the round through."""
        began = self.context.timer.now()
        with self.activity.doing("U", units=max(1, len(self.store.layers))):
            saved = save(self.store)
            self.faults.reach("backup", self.counters.round)
            self._apply(self.counters, 1.0)
        self.now.note("U", None, began, early=True)
        self.now.clock.early = True
        self.early = EarlyUpdate(saved, self._passes(command.following))

    def _roll_back(self) -> None:
        """Be where the device was before its early update. What it was sent for the round that it had begun
        is kept.
        """
        assert self.early is not None, "there is an early update to take back"
        early, self.early = self.early, None
        self.store.settle()
        restore(self.store, early.saved)
        self.returned |= early.passes.taken

    # ------------------------------------------------------------------ commit

    def _commit(self, command: CommitRound) -> None:
        """Roll forward: update, and tell."""
        was, passes, began = command.was, self.now, self.context.timer.now()
        if command.early or command.taken_back:
            self.faults.reach("validate", was.round)
        if command.taken_back:
            self._roll_back()
        self.checkpoint_due = self.saving.decide(command.vote, was, self.counters).begins
        if command.outcome == "evaluated":
            self.faults.reach("commit", was.round)
            self._tell_evaluated(command)
        else:
            with self.activity.doing("U", units=max(1, len(self.store.layers))):
                self._update(command)
            if not command.early:
                passes.note("U", None, began)
        if self.precopy_source is not None:
            with self.activity.doing("copy", units=0):
                self.precopy_source.committed(
                    was, self.counters, self.store, self.reducer.reduced, hold=command.hold
                )
                self.faults.reach("ahead", was.round)
        self._tell_op_times(passes, command)

    def _update(self, command: CommitRound) -> None:
        """Update, and tell of the round."""
        was, vote = command.was, command.vote
        self.faults.reach("commit", was.round)
        norm = lr = 0.0
        if command.cause in SPIKES:
            norm = global_norm(vote)
        elif command.outcome == "applied":
            norm, lr = global_norm(vote), lr_at(was.step, self.job)
            if not command.early:
                self._apply(was, clip_scale(norm, self.job.optimizer.clip_norm))
        elif command.outcome == "repeated":
            self.store.squeeze(self.reducer.overflowed)
        self.tell(
            step_done(
                self.device, self.job_id, command.epoch, was, vote, command.outcome, (norm, lr),
                self.corpus, self.weights_of(was.step), self.now.clock, self.context.timer, self.saving.due,
                taken_back=self.now.clock.early and not command.early, cause=command.cause,
                fingerprints=self.check.told(was.step, vote), experts=self._expert_tokens(),
                sent=self.gradients.take_count(), group=self.group.take_count(),
            )
        )  # fmt: skip
        self.faults.reach("updated", was.round)

    def _expert_tokens(self) -> dict[int, tuple[int, ...]]:
        """By layer the tokens of its experts. One of its live holders tells them: they are many numbers."""
        layout, live = self.machine.layout, self.machine.live
        return {
            layer: router.tokens
            for layer, router in self.reducer.routers.items()
            if self.device == min(live.intersection(layout.holders(layer)))
        }

    def _tell_evaluated(self, command: CommitRound) -> None:
        """Tell of a round that evaluates."""
        evaluation = self.corpus.evaluation
        assert evaluation is not None, "a job without text to evaluate on has no such round"
        self.tell(
            evaluation_done(
                self.device, self.job_id, command.epoch, command.was, command.vote.losses, evaluation,
                self.now.eval_numbers, self.now.clock, self.context.timer, self.saving.due,
            )
        )  # fmt: skip
        self.faults.reach("updated", command.was.round)

    def _apply(self, counters: Counters, scale: float) -> None:
        """Make the update of the round that ``counters`` begin, with ``scale`` times its gradients."""
        self.store.settle()
        apply_update(self.job, self.store, self.reducer.reduced, scale, counters, self.faults)

    def _begin(self, command: BeginRound) -> None:
        """Set up the next round: the one begun early, or a new one, which is given again what was taken for
        that one.
        """
        early, self.early = self.early, None
        if command.begun:
            assert early is not None
            early.passes.clock, early.passes.taken = RoundClock(), {}
            self.now = early.passes
        else:
            if early is not None:
                self.returned |= early.passes.taken
            returned, self.returned = self.returned, {}
            self.now = self._passes(command.spec, returned)
        self.messenger.purge(lambda key: key[0] in {"F", "B"} and int(key[1]) < command.spec.tag)
        self.group.say(command.spec.counters.round)
        self.reducer.begin(command.spec.counters.step)
        self.copies.begin()

    def _enter(self) -> None:
        self.reducer.enter()
        # Begun when the sums of the committed round are gone: a copy of the state takes their room.
        self._write_when_ready()

    def _write_when_ready(self) -> bool:
        """Begin a checkpoint that is due, once the others of the shard group stand at this boundary as well:
        until they have voted in the next round nobody's state changes.
        """
        if not self.checkpoint_due:
            return False
        for key in self.messenger.waiting():
            if key[0] == UPDATED:
                self._hear_updated(key)
        late = bool(self.group.unopened) and self._open_late()
        # Where the group has lost a device there is nobody to wait for: no bucket falls to this one
        # (``writer_of``), and what it reads is looked at as ever.
        if self.machine.computes and not self.group.is_ready(self.counters.round):
            return late
        self.checkpoint_due = False
        self.write_checkpoint()
        return True

    def _tell_op_times(self, passes: Passes, command: CommitRound) -> None:
        """Of the round, if it is one of those that are told."""
        of = Round(self.device, self.job_id, command.epoch, self.layout.epoch, command.was)
        message = op_times(of, passes.pieces, self.sample_every, self.context.timer, repaired=passes.repaired)
        if message is not None:
            self.tell(message)

    def _hold(self) -> None:
        machine = self.machine
        last = machine.finished or self.saving.begun == machine.counters.round
        digests = self.check.of_state() if last else {}
        self.tell(Held(self.device, machine.epoch, machine.counters, machine.finished, digests))

    def distrust(self, error: ReplicasDisagree | SumsChanged) -> None:
        """Bits are wrong here or elsewhere: say so, and go no further until the daemon knows what to do."""
        self.machine.stand()
        found = (error.odds, "") if isinstance(error, ReplicasDisagree) else ((), str(error))
        self.tell(self.check.corrupted(self.machine.epoch, self.counters, *found))

    def write_checkpoint(self) -> None:
        """Begin to write this device's share of the state at this boundary."""
        machine = self.machine
        with self.activity.doing("checkpoint", units=0):
            self.saving.begin(
                machine.layout, machine.live, machine.counters, self.group, last=machine.finished
            )

    # ------------------------------------------------------------------ failures

    def report(self, epoch: int, dead: Collection[str]) -> None:
        """Devices died (docs/recovery.md, A failure, 2). Answers ``Progress``; stale reports are ignored."""
        self.copies.hear_all()
        self._look_before_telling()
        commands = self.machine.report(epoch, dead, self.now.has_input, self.now.boundary_cache.has)
        self._obey(commands)
        if commands:
            self.faults.reach("frozen", self.counters.round)

    def _look_before_telling(self) -> None:
        """What is said to be reduced is given to others."""
        try:
            self.reducer.look()
        except SumsChanged as error:
            self.distrust(error)

    def decide(self, message: Decide) -> None:
        """What all survivors do now (docs/recovery.md, A failure, 4). Stale decisions are ignored."""
        self._obey(self.machine.decide(message))
