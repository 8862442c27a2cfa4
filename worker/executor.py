"""The heart of a device: walks the tasks of a round, reduces, votes, commits, and starts over.

Owns one device's training of one job between two deployments. Reads top to bottom: ``advance`` does
one piece of work (a vote, a contribution, a task, a commit) and says whether there was any; the device's
loop calls it until there is none and then sleeps until a letter or a control message arrives. Decisions come in
through ``decide`` between two pieces of work, never inside one; reports through ``report``, also while a layer
computes (``turn``).

Owns neither processes nor sockets (``device``, ``post``), nor what a layer computes (``models``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import msgspec

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Decide, FromWorker, Held, Progress, StepDone
from oobleckd.protocol.parts import Counters, Flags, Outcome, Vote
from planner.plan import Detours, Layout, Route, standing_routes
from worker.commit import Commit, outcome_of
from worker.copies import KINDS as COPY_KINDS
from worker.copies import Copies
from worker.data import Corpus
from worker.faults import Faults
from worker.mailbox import Key, Letter
from worker.optimizer import clip_scale, lr_at
from worker.passes import Clock, Given, Means, Passes
from worker.post import Post
from worker.pulse import Pulse
from worker.reduce import Contribution, Reducer
from worker.snapshot import Due, Share, due_after, ledger_digest, take_share
from worker.stagger import Foresight, goes_through, restore, save
from worker.store import Saved, Store
from worker.tasks import NO_LAYERS, Order
from worker.turn import Aside
from worker.update import apply_update, global_norm
from worker.writer import Inline, Writer


@dataclass(frozen=True, slots=True)
class Hurried:
    """The device has updated before all votes were in: the state ``saved`` before that, and the round ``ahead``."""

    saved: dict[int, Saved]
    ahead: Passes


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
        aside: Aside = nullcontext,
        writer: Writer | None = None,
    ) -> None:
        self.device, self.job_id, self.job = device, job_id, job
        self.store, self.corpus, self.post, self.faults, self.tell = store, corpus, post, faults, tell
        self.pulse = pulse or Pulse()
        self.writer = writer or Inline(tell, faults)
        self.share: Share | None = None
        self.due = Due()
        self.checkpointed = 0  # the first round after the boundary of the last one
        self.layout = Layout(0, store.spec.num_layers, {}, ())
        self.dead: frozenset[str] = frozenset()
        self.detours: Detours | None = None
        self.counters = Counters()
        self.flags = Flags()
        self.holding, self.hold_next = True, False
        self.commit = Commit(device)
        self.reducer = Reducer(device, store, post, job.num_micro_batches, job.train.exact)
        self.copies = Copies(device, job.schedule.sum_copies, post, self.reducer)
        self.order: Order = ()
        self.means = Means(device, job, store, corpus, post, faults, self.pulse, aside)
        self.late = False
        self.now = self._passes(self._given(self.counters))
        self.hurried: Hurried | None = None
        self.returned: dict[Key, Letter] = {}
        self.foresight = Foresight()

    # ------------------------------------------------------------------ layouts and boundaries

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> None:
        """Take ``layout`` into force at a boundary; its layers are in the store. Does not run yet.

        ``order``: what the planner would have this device do in every round; empty: whatever is ready.
        """
        self.order = order
        self.layout, self.dead, self.detours, self.counters = layout, frozenset(), None, counters
        self.holding, self.hold_next = True, False
        self.flags = Flags()
        self.late, self.hurried, self.returned = False, None, {}
        self.reducer.adopt()
        self.copies.adopt(layout.epoch)
        self.commit.adopt(layout.epoch, counters.round, layout.holdings)
        self._begin()

    def resume(self) -> None:
        """Run from a boundary. A way back to the checkpoint of the last step leads to the end."""
        if self.finished:
            self.hold()
            return
        self.holding = False
        self.now.clock = Clock()

    @property
    def finished(self) -> bool:
        """Whether the job's last step is committed here."""
        return self.counters.step >= self.job.train.steps

    def _begin(self, passes: Passes | None = None) -> None:
        """Set up the next round: standing routes that touch no dead device. ``passes``: what was done of it already."""
        self.now = passes or self._passes(self._given(self.counters))
        self.post.purge(lambda key: key[0] in {"F", "B"} and int(key[1]) < self.now.tag)
        self.now.board.forward_only = False
        self.now.contribute, self.now.copy_sums = self._between_layers, self._copy_sums
        self.reducer.begin(self.counters.round, self.now.board)
        self.copies.begin(self.counters.round)
        self._enter({})

    def _passes(self, given: Given, *, forward_only: bool = False) -> Passes:
        return Passes(self.means, given, self.reducer, forward_only=forward_only)

    def _given(self, counters: Counters, returned: dict[Key, Letter] | None = None) -> Given:
        """A round on the standing routes that touch no dead device."""
        standing = standing_routes(self.layout, self.detours, counters.round)
        routes = tuple(route for route in standing if not route.touches(self.dead))
        order = () if self.dead else self.order
        shadows = self.layout.shadows.get(self.device, NO_LAYERS)
        return Given(counters, self._tag(counters.round), routes, order, returned or {}, shadows)

    def _tag(self, round_: int) -> int:
        """What names ``round_`` in the keys of data.

        Where the round before did not go through, others may have begun it with weights that were taken back: what they
        sent then must not be taken for what they send now. All devices know whether it did from the same votes.
        """
        return 2 * round_ + (self.late and round_ == self.counters.round)

    def _standing(self) -> tuple[Route, ...]:
        """The routes of the present round, if nothing more fails."""
        return standing_routes(self.layout, self.detours, self.counters.round)

    def _enter(self, donors: Mapping[int, str]) -> None:
        self.reducer.enter(self.commit.epoch, self.layout, self.commit.live, donors)
        self.copies.enter(self.layout, self.commit.live)

    # ------------------------------------------------------------------ one piece of work

    def advance(self) -> bool:
        """Do one piece of work; False if everything waits for others or for the disk, or the device holds. Raises UserError."""
        self.writer.check()
        if self.holding or self.writer.blocks:
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
        ahead = self.hurried.ahead if self.hurried else None
        return self.now.advance() or (ahead is not None and ahead.advance()) or heard

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
            elif key[0] in COPY_KINDS:
                heard |= self.copies.hear(key, self.dead)
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
        flags = self.flags | Flags(writing=self.writer.busy)
        self.commit.cast(Vote(vote.norms, vote.losses, vote.nan, vote.overflow, flags))
        self.now.drop_shadows()
        self._send_vote()
        self.faults.reach("reduced", self.counters.round)
        if self._may_hurry(vote):
            self._hurry()

    def _send_vote(self) -> None:
        meta = msgspec.msgpack.encode(self.commit.own)
        key = ("V", self.commit.epoch, self.counters.round, self.device)
        for peer in sorted(self.commit.live - {self.device}):
            self.post.send(peer, key, [], meta)

    # ------------------------------------------------------------------ staggered update

    def _may_hurry(self, own: Vote) -> bool:
        """Whether to go on with the next round before the votes for this one are in.

        Not while an attempt of this one has yet to pass through layers that are reduced already: it needs the weights as they are.
        """
        last = self.counters.step + 1 >= self.job.train.steps
        stops = self.hold_next or self.flags != Flags() or last or len(self.commit.live) == 1
        clean = not (own.nan or own.overflow) and self.now.board.idle
        return self.job.schedule.update == "staggered" and clean and not stops and self.foresight.hopeful

    def _hurry(self) -> None:
        """Update, and begin the next round, as if all votes were in and let the round through."""
        with self.pulse.doing("U", units=max(1, len(self.store.layers))):
            saved = save(self.store)
            self.faults.reach("backup", self.counters.round)
            self._apply(1.0)
        self.now.clock.early = True
        following = self._given(_after(self.counters, "applied"))
        self.hurried = Hurried(saved, self._passes(following, forward_only=True))

    def _take_back(self) -> dict[Key, Letter]:
        """Be where the device was before it hurried. Returns what it was sent for the round that it had begun."""
        if self.hurried is None:
            return {}
        hurried, self.hurried = self.hurried, None
        self._settle()
        restore(self.store, hurried.saved)
        return hurried.ahead.taken

    # ------------------------------------------------------------------ commit

    def _commit(self, vote: Vote) -> bool:
        """The round's one commit point has passed: roll forward. Returns whether to stop here."""
        self.late = not goes_through(self.job, vote)
        self.foresight.saw(not self.late)
        hurried = self.hurried
        if hurried is not None:
            self.faults.reach("validate", self.counters.round)
        if hurried is not None and self.late:
            self.returned = self._take_back()
        self.due = due_after(self.job, vote, _after(self.counters, outcome_of(vote)).step)
        with self.pulse.doing("U", units=max(1, len(self.store.layers))):
            self._update(vote)
        hold = self.hold_next or vote.flags.hold or self.finished
        self.commit.advance(vote)
        done, after = vote.flags, self.flags  # a flag that came after the vote was cast waits for the next
        self.flags = Flags(after.hold and not done.hold, after.checkpoint and not done.checkpoint)
        self.hold_next = False
        self._begin(self._begun(hold=hold))
        if self.due.begins:
            self.write_checkpoint()
        return hold

    def _begun(self, *, hold: bool) -> Passes:
        """The next round: the one begun in a hurry, or a new one, which is given again what was taken for that one."""
        hurried, self.hurried = self.hurried, None
        if hurried is not None and not hold:
            hurried.ahead.clock, hurried.ahead.taken = Clock(), {}
            return hurried.ahead
        returned = self.returned if hurried is None else hurried.ahead.taken
        self.returned = {}
        return self._passes(self._given(self.counters, returned))

    def _update(self, vote: Vote) -> Outcome:
        """Update, tell, and count the round."""
        self.faults.reach("commit", self.counters.round)
        outcome = outcome_of(vote)
        norm = lr = 0.0
        if outcome == "applied":
            norm, lr = global_norm(vote), lr_at(self.counters.step, self.job)
            if self.hurried is None:
                self._apply(clip_scale(norm, self.job.optimizer.clip_norm))
        elif outcome == "repeated":
            over = [bucket for bucket, part in self.reducer.reduced.items() if part.what.overflow]
            self.store.squeeze(over)
        self._tell_step_done(vote, outcome, norm, lr)
        self.counters = _after(self.counters, outcome)
        self.faults.reach("updated", self.counters.round - 1)
        return outcome

    def _apply(self, scale: float) -> None:
        """Make the update of the present round, with ``scale`` times its gradients."""
        self._settle()
        apply_update(self.job, self.store, self.reducer.reduced, scale, self.counters, self.faults)

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
                time.perf_counter() - self.now.clock.began,
                self.now.clock.busy_s,
                self.now.clock.gradients,
                self.now.clock.forwards,
                early=self.now.clock.early,
                taken_back=self.now.clock.early and self.hurried is None,
                checkpoint=self.due.begins,
                skipped=self.due.skipped,
            )
        )

    def hold(self) -> None:
        """Stop before the present round and say so."""
        self.holding = True
        self.tell(Held(self.device, self.commit.epoch, self.counters, self.finished))

    def write_checkpoint(self) -> None:
        """Begin to write this device's share of the state at this boundary: of a copy, where the plan has room for one."""
        live = frozenset(self.layout.holdings) - self.dead
        copied = self.job.checkpoint.every != 0 and not self.finished and not self.writer.busy
        with self.pulse.doing("checkpoint", units=0):
            self.share = take_share(
                self.device, self.job_id, self.job, self.store, self.layout, live, self.counters,
                self.corpus.digest, copied=copied,
            )  # fmt: skip
            self.checkpointed = self.counters.round
            self.writer.begin(self.share)

    def _settle(self) -> None:
        """The state is about to change."""
        if self.share is not None:
            self.share.settle()
            self.share = None

    # ------------------------------------------------------------------ failures

    def report(self, epoch: int, dead: Collection[str]) -> None:
        """Devices died (docs/recovery.md, A failure, 2). Answers ``Progress``; stale reports are ignored."""
        if not self.commit.report(epoch):
            return
        self.copies.hear_all(self.dead)
        self.dead |= frozenset(dead)
        frozen = {route.micro_batch for route in self._standing() if route.touches(self.dead)}
        self.returned |= self._take_back()
        self.now.board.freeze(frozen)
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
                self.now.board.hops(frozen, self.now.given, self.now.kept.has),
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
        frozen = {route.micro_batch for route in self._standing() if route.touches(self.dead)}
        self.now.add(message.routes, frozen)
        if message.hold_now or self.finished:
            if self.finished:
                self.write_checkpoint()  # the dead may have had a bucket to write: its heir does it now
            self.hold()
            return
        self.hold_next, self.holding = message.hold, False
        if self.commit.own is not None:
            self._send_vote()


def _after(was: Counters, outcome: Outcome) -> Counters:
    return Counters(was.round + 1, was.step + (outcome != "repeated"), was.applied + (outcome == "applied"))
