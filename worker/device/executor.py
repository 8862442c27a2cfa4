"""The heart of a device: walks the tasks of a round, reduces, votes, commits, and starts over.

Owns one device's training of one job between two deployments. Reads top to bottom: ``advance`` does one piece
of work (a vote, a contribution, a task, a commit) and says whether there was any; the device's loop calls it
until there is none and then sleeps until a tensor message or a control message arrives. Decisions come in
through ``decide`` between two pieces of work, never inside one; reports through ``report``, also while a
layer computes (``yielding_lock``).

Owns neither processes nor sockets (``device``, ``messenger``), nor what a layer computes (``models``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext

import msgspec

from oobleckd.planner.plan import Detours, Layout, Route, standing_routes
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Decide, FromWorker, Held, Progress
from oobleckd.protocol.parts import Counters, Flags, Outcome, Vote
from oobleckd.worker.checkpointing.saving import CheckInputs, Saving, no_check
from oobleckd.worker.checkpointing.writer import InlineWriter, Writer
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.device.early_update import (
    SpeculativeUpdate,
    UpdatePredictor,
    goes_through,
    restore,
    save,
)
from oobleckd.worker.device.integrity import Check
from oobleckd.worker.device.report import step_done
from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.round.commit import Commit, ReplicasDisagree, outcome_of
from oobleckd.worker.round.gather import KIND as SUMS
from oobleckd.worker.round.gather import Contribution
from oobleckd.worker.round.messenger import Messenger
from oobleckd.worker.round.op_times import Round, op_times
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.round.round import ComputeContext, RoundClock, RoundSpec
from oobleckd.worker.round.sum_copies import KINDS as COPY_KINDS
from oobleckd.worker.round.sum_copies import Copies
from oobleckd.worker.round.tasks import NO_LAYERS, Order
from oobleckd.worker.round.update import apply_update, global_norm
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.runtime.timing import timer_of
from oobleckd.worker.runtime.yielding_lock import Released
from oobleckd.worker.state.optimizer import clip_scale, lr_at
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.transport.mailbox import Key, TensorMessage

NO_DONORS: Mapping[int, str] = {}


class Executor:
    """One device's engine for one job."""

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
        self.layout = Layout(0, store.spec.num_layers, {}, ())
        self.dead: frozenset[str] = frozenset()
        self.detours: Detours | None = None
        self.counters = Counters()
        self.flags = Flags()
        self.holding, self.hold_next = True, False
        self.commit = Commit(device)
        self.check = Check(device, job_id, job, store, self.activity)
        guarded = bool(self.check.every)
        self.reducer = Reducer(
            device,
            store,
            messenger,
            job.num_micro_batches,
            job.train.exact,
            guarded=guarded,
            released=released,
        )
        self.copies = Copies(device, job.schedule.sum_copies, messenger, self.reducer)
        self.order: Order = ()
        self.sample_every = 0  # op times are told of rounds whose number it divides
        self.context = ComputeContext(
            device,
            job,
            store,
            corpus,
            messenger,
            faults,
            self.activity,
            released,
            timer=timer_of(store.device),
        )
        self.late = False
        self.now = self._passes(self._spec_of(self.counters))
        self.speculative: SpeculativeUpdate | None = None
        self.returned: dict[Key, TensorMessage] = {}
        self.predictor = UpdatePredictor()
        self.precopy_source: PreCopySource | None = None

    # ------------------------------------------------------------------ layouts and boundaries

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> None:
        """Take ``layout`` into force at a boundary; its layers are in the store. Does not run yet.

        ``order``: what the planner would have this device do in every round; empty: whatever is ready.
        """
        self.order = order
        self.layout, self.dead, self.detours, self.counters = layout, frozenset(), None, counters
        self.holding, self.hold_next = True, False
        self.flags = Flags()
        self.late, self.speculative, self.returned = False, None, {}
        self.end_precopy()
        self.reducer.adopt()
        self.copies.adopt(layout.epoch)
        self.commit.adopt(layout.epoch, counters.round, layout.holdings)
        self._begin()

    def resume(self) -> None:
        """Run from a boundary. After a rollback to the final checkpoint nothing is left to run."""
        # Too many steps in a row were skipped: each device counts for itself, as the daemon may be away and
        # is not in the path of a step. The count travels with the counters. (D-training-001)
        if self.over:
            self.saving.check_inputs(self.counters, hurry=True)
            self.hold()
            return
        self.holding = False
        self.now.clock = RoundClock()

    @property
    def finished(self) -> bool:
        """Whether the job's last step is committed here."""
        return self.counters.step >= self.job.train.steps

    @property
    def over(self) -> bool:
        """Whether no round follows: the last step is committed, or too many in a row were skipped."""
        return self.finished or self.job.stopped_by(self.counters.skipped_in_row)

    def _begin(self, passes: Passes | None = None, donors: Mapping[int, str] = NO_DONORS) -> None:
        """Set up the next round: standing routes that touch no dead device. ``passes``: what was done of it
        already.
        """
        self.now = passes or self._passes(self._spec_of(self.counters))
        self.messenger.purge(lambda key: key[0] in {"F", "B"} and int(key[1]) < self.now.tag)
        self.now.board.forward_only = False
        self.now.contribute, self.now.copy_sums = self._between_layers, self._copy_sums
        self.reducer.begin(self.counters.round, self.now.board)
        self.copies.begin(self.counters.round)
        self._enter(donors)

    def _passes(self, spec: RoundSpec, *, forward_only: bool = False) -> Passes:
        return Passes(self.context, spec, self.reducer, forward_only=forward_only)

    def _spec_of(self, counters: Counters, returned: dict[Key, TensorMessage] | None = None) -> RoundSpec:
        """A round on the standing routes that touch no dead device."""
        standing = standing_routes(self.layout, self.detours, counters.round)
        routes = tuple(route for route in standing if not route.touches(self.dead))
        order = () if self.dead else self.order
        redundant = self.layout.redundant.get(self.device, NO_LAYERS)
        return RoundSpec(counters, self._tag(counters.round), routes, order, returned or {}, redundant)

    def _tag(self, round_: int) -> int:
        """What names ``round_`` in the keys of data.

        Where the round before did not go through, others may have begun it with weights that were taken back:
        what they sent then must not be taken for what they send now. All devices know whether it did from the
        same votes.
        """
        return 2 * round_ + (self.late and round_ == self.counters.round)

    def _standing(self) -> tuple[Route, ...]:
        """The routes of the present round, if nothing more fails."""
        return standing_routes(self.layout, self.detours, self.counters.round)

    def _enter(self, donors: Mapping[int, str]) -> None:
        self.reducer.enter(self.commit.epoch, self.layout, self.commit.live, donors)
        self.copies.enter(self.layout, self.commit.live)

    def begin_precopy(self, precopy_source: PreCopySource) -> None:
        """Send pre-copies from now on. Until a round is committed the weights are those before it, but where
        they were updated early.
        """
        self.precopy_source = precopy_source
        if self.speculative is None:
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
        if self.holding or self.misread or self.saving.writer.blocks:
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
        ahead = self.speculative.next_round if self.speculative else None
        if self.now.advance() or (ahead is not None and ahead.advance()) or heard:
            return True
        # Samples of the next step are drawn now that there is time: at the step's end everybody would wait
        # for them.
        self.corpus.of_step(self.counters.step + 1)
        return False

    def _hear(self) -> bool:
        """Take in contributions and votes; whether there were any."""
        heard = False
        here = (self.commit.epoch, self.counters.round)
        for key in self.messenger.waiting():
            if key[0] == "V":
                message = self.messenger.take(key)
                assert message is not None
                vote = msgspec.msgpack.decode(message.meta, type=Vote)
                heard |= self.commit.hear(str(key[3]), int(key[1]), int(key[2]), vote)
            elif key[0] in COPY_KINDS:
                heard |= self.copies.hear(key, self.dead)
            elif key[0] == SUMS and not self.commit.frozen:
                at = (int(key[1]), int(key[2]))
                if at[0] > here[0] or at[1] > here[1]:
                    continue  # from a peer that is ahead
                message = self.messenger.take(key)
                assert message is not None
                if at == here:
                    what = msgspec.msgpack.decode(message.meta, type=Contribution)
                    self.reducer.hear(int(key[3]), str(key[4]), what, message.tensors)
                    heard = True
        return heard

    def _contribute(self) -> bool:
        if self.commit.frozen or not self.reducer.contribute():
            return False
        self.faults.reach("reduce", self.counters.round)
        return True

    def _between_layers(self) -> None:
        """Of a backward pass. Peers are not kept waiting for the word that their copies have arrived."""
        self._contribute()
        self.copies.hear_all(self.dead)

    def _copy_sums(self) -> None:
        # What was inherited since the last decision is in the ledger, and not yet in the sums.
        if not self.commit.frozen:
            self.copies.send()

    def _vote(self) -> None:
        vote = self.reducer.vote()
        self.context.timer.settle()
        # Whether to stop or to write must be the same for all, so it is the union of the votes: a device
        # that decided alone could leave a checkpoint incomplete. (D-checkpoints-003)
        flags = self.flags | Flags(writing=self.saving.writer.busy)
        shared = [bucket for bucket, holders in self.reducer.holders.items() if len(holders) > 1]
        # Digests travel in the votes, before the update: then what came of a flipped bit is in nobody's
        # weights. (D-corruption-001)
        digests = self.check.digests(self.counters.step, shared)
        compared = self.check.every > 0
        self.commit.cast(msgspec.structs.replace(vote, flags=flags, digests=digests, compared=compared))
        self.now.drop_redundant()
        self._send_vote()
        self.faults.reach("reduced", self.counters.round)
        if self._may_hurry(vote):
            self._hurry()

    def _send_vote(self) -> None:
        meta = msgspec.msgpack.encode(self.commit.own)
        key = ("V", self.commit.epoch, self.counters.round, self.device)
        for peer in sorted(self.commit.live - {self.device}):
            self.messenger.send(peer, key, [], meta)

    # ------------------------------------------------------------------ staggered update

    def _may_hurry(self, own: Vote) -> bool:
        """Whether to go on with the next round before the votes for this one are in.

        Not while an attempt of this one has yet to pass through layers that are reduced already: it needs the
        weights as they are.
        """
        last = self.counters.step + 1 >= self.job.train.steps
        stops = self.hold_next or self.flags != Flags() or last or len(self.commit.live) == 1
        clean = not (own.nan or own.overflow) and self.now.board.idle
        return (
            self.job.schedule.update == "staggered"
            and clean
            and not stops
            and self.predictor.expects_a_commit
        )

    def _hurry(self) -> None:
        """Update, and begin the next round, as if all votes were in and let the round through."""
        began = self.context.timer.now()
        with self.activity.doing("U", units=max(1, len(self.store.layers))):
            saved = save(self.store)
            self.faults.reach("backup", self.counters.round)
            self._apply(1.0)
        self.now.note("U", None, began, early=True)
        self.now.clock.early = True
        # Forward passes alone: weight gradients before the commit would need sums of their own, as large as
        # the model's, for the few moments until the votes are in. (D-schedules-007)
        following = self._spec_of(self.counters.after("applied"))
        self.speculative = SpeculativeUpdate(saved, self._passes(following, forward_only=True))

    def _take_back(self) -> dict[Key, TensorMessage]:
        """Be where the device was before its speculative update. Returns what it was sent for the round that
        it had begun.
        """
        if self.speculative is None:
            return {}
        speculative, self.speculative = self.speculative, None
        self.store.settle()
        restore(self.store, speculative.saved)
        return speculative.next_round.taken

    # ------------------------------------------------------------------ commit

    def _commit(self, vote: Vote, donors: Mapping[int, str] = NO_DONORS) -> bool:
        """The round's one commit point has passed: roll forward. Returns whether to stop here. ``donors``: of
        buckets in the next round.
        """
        self.late = not goes_through(self.job, vote)
        self.predictor.saw(not self.late)
        speculative = self.speculative
        if speculative is not None:
            self.faults.reach("validate", self.counters.round)
        if speculative is not None and self.late:
            # What was taken for the round that was begun early is kept: who has committed already will not
            # send it again. (D-schedules-006)
            self.returned = self._take_back()
        due = self.saving.decide(vote, self.counters)
        passes, was, began = self.now, self.counters, self.context.timer.now()
        with self.activity.doing("U", units=max(1, len(self.store.layers))):
            self._update(vote)
        if self.speculative is None:
            passes.note("U", None, began)
        hold = self.hold_next or vote.flags.hold or self.over
        if self.precopy_source is not None:
            with self.activity.doing("copy", units=0):
                self.precopy_source.committed(was, self.counters, self.store, self.reducer.reduced, hold=hold)
                self.faults.reach("ahead", was.round)
        self.commit.advance(vote)
        done, later = vote.flags, self.flags  # a flag that came after the vote was cast waits for the next
        self.flags = Flags(
            later.hold and not done.hold,
            later.checkpoint and not done.checkpoint,
            full=later.full and not done.full,
        )
        self.hold_next = False
        self._begin(self._begun(hold=hold), donors)
        if due.begins:
            self.write_checkpoint()
        self._tell_op_times(passes, was)
        return hold

    def _begun(self, *, hold: bool) -> Passes:
        """The next round: the one begun in a hurry, or a new one, which is given again what was taken for
        that one.
        """
        speculative, self.speculative = self.speculative, None
        if speculative is not None and not hold:
            speculative.next_round.clock, speculative.next_round.taken = RoundClock(), {}
            return speculative.next_round
        returned = self.returned if speculative is None else speculative.next_round.taken
        self.returned = {}
        return self._passes(self._spec_of(self.counters, returned))

    def _update(self, vote: Vote) -> Outcome:
        """Update, tell, and count the round."""
        self.faults.reach("commit", self.counters.round)
        outcome = outcome_of(vote)
        norm = lr = 0.0
        if outcome == "applied":
            norm, lr = global_norm(vote), lr_at(self.counters.step, self.job)
            if self.speculative is None:
                self._apply(clip_scale(norm, self.job.optimizer.clip_norm))
        elif outcome == "repeated":
            over = [bucket for bucket, part in self.reducer.reduced.items() if part.what.overflow]
            self.store.squeeze(over)
        taken_back = self.now.clock.early and self.speculative is None
        self.tell(
            step_done(
                self.device, self.job_id, self.commit.epoch, self.counters, vote, outcome, (norm, lr),
                self.corpus, self.now.clock, self.context.timer, self.saving.due, taken_back=taken_back,
                fingerprints=self.check.told(self.counters.step, vote),
            )
        )  # fmt: skip
        self.counters = self.counters.after(outcome)
        self.faults.reach("updated", self.counters.round - 1)
        return outcome

    def _apply(self, scale: float) -> None:
        """Make the update of the present round, with ``scale`` times its gradients."""
        self.store.settle()
        apply_update(self.job, self.store, self.reducer.reduced, scale, self.counters, self.faults)

    def _tell_op_times(self, passes: Passes, was: Counters) -> None:
        """Of the round ``was``, if it is one of those that are told."""
        of = Round(self.device, self.job_id, self.commit.epoch, self.layout.epoch, was)
        message = op_times(of, passes.pieces, self.sample_every, self.context.timer, repaired=passes.repaired)
        if message is not None:
            self.tell(message)

    def hold(self) -> None:
        """Stop before the present round and say so."""
        self.holding = True
        last = self.finished or self.saving.begun == self.counters.round
        digests = self.check.of_state() if last else {}
        self.tell(Held(self.device, self.commit.epoch, self.counters, self.finished, digests))

    def distrust(self, error: ReplicasDisagree | SumsChanged) -> None:
        """Bits are wrong here or elsewhere: say so, and go no further until the daemon knows what to do."""
        self.holding = True
        found = (error.odds, "") if isinstance(error, ReplicasDisagree) else ((), str(error))
        self.tell(self.check.corrupted(self.commit.epoch, self.counters, *found))

    def write_checkpoint(self) -> None:
        """Begin to write this device's share of the state at this boundary."""
        live = frozenset(self.layout.holdings) - self.dead
        with self.activity.doing("checkpoint", units=0):
            self.saving.begin(self.layout, live, self.counters, last=self.finished)

    # ------------------------------------------------------------------ failures

    def report(self, epoch: int, dead: Collection[str]) -> None:
        """Devices died (docs/recovery.md, A failure, 2). Answers ``Progress``; stale reports are ignored."""
        odds = self.commit.disagreements()
        if not self.commit.report(epoch):
            return
        # The dead device may be the corrupted one; with it gone no device will collect every vote, so report
        # now.
        if odds:
            self.tell(self.check.corrupted(self.commit.epoch, self.counters, odds))
        self.copies.hear_all(self.dead)
        self.dead |= frozenset(dead)
        frozen = {route.micro_batch for route in self._standing() if route.touches(self.dead)}
        # At every report, also where the round will commit: then a failure meets a round as it was, which
        # is the one rule that is model-checked. It costs a copy and some forward passes. (D-schedules-005)
        self.returned |= self._take_back()
        self.now.board.freeze(frozen)
        # The ledger of the dead goes into the report with this device's own, so the daemon sees done work
        # and the decision needs no rule for copies. (D-recovery-018)
        self.copies.inherit(self.dead)
        if self.dead:
            self.now.board.forget_order()
        self.tell(
            Progress(
                self.device,
                epoch,
                self.counters,
                {layer: tuple(sorted(done)) for layer, done in self.now.board.done.items()},
                tuple(self.reducer.reduced),
                self.commit.heard(),
                self.commit.last,
                self.holding,
                # What neighbours still hold decides which hops are done again: with activations and
                # gradients both kept, it is the dead stage's own work and nothing else. (D-recovery-011)
                self.now.board.hops(frozen, self.now.has_input, self.now.boundary_cache.has),
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
            self._commit(message.commit, message.donors)
        else:
            self._enter(message.donors)
        frozen = {route.micro_batch for route in self._standing() if route.touches(self.dead)}
        self.now.add(message.routes, frozen)
        if message.hold_now or self.over:
            if self.finished:
                self.write_checkpoint()  # the dead may have had a bucket to write: its heir does it now
            self.hold()
            return
        self.hold_next, self.holding = message.hold, False
        if self.commit.own is not None:
            self._send_vote()
