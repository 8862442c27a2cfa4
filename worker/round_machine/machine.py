"""The round machine: one device's half of the commit protocol, as a pure state machine.

What happens comes in as a call (a vote, a contribution, a report, a decision, a flag, a layout), what is to
be done goes out as commands, in order; the state is that after them. ``next`` is asked for what to do now,
which is one piece of work. Owns the round, its phase, ledger, votes, flags and the early update; computes
nothing, sends nothing and knows no time. The rule and why it is safe: docs/recovery.md.

Run by ``oobleckd.worker.training.executor`` with torch and sockets, by the tests' worlds and the simulator
without, and walked through every interleaving by the model check (tests/helpers/commit_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from oobleckd.planner.plan import Detours, Layers, Layout, Route
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.job import Job, stops
from oobleckd.protocol.messages import Decide, Progress
from oobleckd.protocol.parts import Counters, Flags, Outcome, SkipCause, Vote, outcome_of
from oobleckd.worker.round_machine.commands import (
    BeginRound,
    CastVote,
    Command,
    CommitRound,
    Distrust,
    EnterExchange,
    ForgetSums,
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
from oobleckd.worker.round_machine.commit import Commit
from oobleckd.worker.round_machine.copies import SumCopies
from oobleckd.worker.round_machine.early import UpdatePredictor
from oobleckd.worker.round_machine.exchange import NO_DONORS, Donors, Exchange
from oobleckd.worker.round_machine.phases import PHASES, Phase
from oobleckd.worker.round_machine.tasks import NO_LAYERS, Arrived, Board, Order, Task

NO_FLAGS = Flags()
Fence = Literal["old", "now", "later"]
"""Whether sums are of an exchange that is over, of the present one, or of one to come."""
Commands = tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """What of a job the machine goes by. ``evaluation``: its steps, and which rounds evaluate.
    ``max_skipped``: steps skipped in a row as not finite after which no round follows (0: any number may be),
    ``max_spiked``: the same of those skipped for a spike. ``apart``: the backward is decoupled.
    ``staggered``: a device may update before all votes are in. ``redundant``: forward passes are run ahead
    for others. ``copies``: of the sums, in a round. ``check_every``: in steps whose number it divides a
    second holder makes each mean of gradients (0: in none).
    """

    evaluation: EvalRounds
    max_skipped: int = 0
    apart: bool = False
    staggered: bool = False
    redundant: bool = False
    copies: int = 0
    max_spiked: int = 0
    check_every: int = 0

    @classmethod
    def of(cls, job: Job) -> Rules:
        """As ``job`` has them."""
        return cls(
            job.eval_rounds,
            job.max_skipped,
            apart=job.schedule.apart,
            staggered=job.schedule.update == "staggered",
            redundant=bool(job.schedule.redundant_bytes),
            copies=job.schedule.sum_copies,
            max_spiked=job.max_spiked,
            check_every=job.fault_tolerance.check_every,
        )

    def checks(self, step: int) -> bool:
        """Whether ``step`` is compared."""
        return self.check_every > 0 and step % self.check_every == 0


Judge = Callable[[Counters, Vote, Outcome], tuple[SkipCause, Counters]]
"""Why the round that these counters begin is skipped ("": it is not), where the votes alone come to that
outcome, and the counters behind it. The same on every device, or they part.
"""


def judged_by_votes(was: Counters, _vote: Vote, outcome: Outcome) -> tuple[SkipCause, Counters]:
    """Where nobody looks for spikes."""
    return "not-finite" if outcome == "skipped" else "", was.after(outcome)


class RoundMachine:
    """The machine of ``device``. ``uses``: of each bucket of the model, the layers that use it; ``numbers``:
    of each of its slices, how many it has (none: buckets are not cut). ``goes_through``: whether a round with
    this union of votes, which is applied, is so with its gradients as they are. ``judge``: whether it is, and
    what follows.

    ``phase``: see ``phases``. ``counters``: the round that is next, or under way. ``dead``: of the layout,
    cumulative. ``flags`` travel with the next vote; with ``hold_next`` the device stops when the round is
    committed. ``late``: the round before did not go through as it was. ``now``: the present round; ``ahead``:
    the one that was begun early.
    """

    def __init__(
        self,
        device: str,
        rules: Rules,
        uses: Sequence[tuple[int, ...]],
        goes_through: Callable[[Vote], bool],
        judge: Judge = judged_by_votes,
        numbers: Sequence[Sequence[int]] = (),
    ) -> None:
        self.device, self.rules, self.goes_through, self.judge = device, rules, goes_through, judge
        self.phase: Phase = "held"
        self.layout = Layout(0, 0, {}, ())
        self.dead: frozenset[str] = frozenset()
        self.detours: Detours | None = None
        self.order: Order = ()
        self.counters = Counters()
        self.flags = Flags()
        self.hold_next = self.late = False
        self.commit = Commit(device)
        self.exchange = Exchange(device, uses, numbers or [(1,)] * len(uses))
        self.copies = SumCopies(device, rules.copies)
        self.predictor = UpdatePredictor()
        self.now = self._round(self.counters)
        self.ahead: RoundSpec | None = None

    # ------------------------------------------------------------------ what others ask

    @property
    def holding(self) -> bool:
        """Whether the device stands at a boundary."""
        return not PHASES[self.phase].computes

    @property
    def frozen(self) -> bool:
        """Whether a report was answered and its decision is still to come."""
        return self.commit.frozen

    @property
    def answered(self) -> int:
        """The highest epoch of which it has answered a report."""
        return self.commit.answered

    @property
    def epoch(self) -> int:
        """The one that it votes and sends sums under."""
        return self.commit.epoch

    @property
    def finished(self) -> bool:
        """Whether the job's last step is committed here, and the evaluation behind it."""
        return self.rules.evaluation.finished(self.counters)

    @property
    def over(self) -> bool:
        """Whether no round follows: the last one is committed, or too many steps in a row were skipped."""
        # Too many steps in a row were skipped: each device counts for itself, as the daemon may be away and
        # is not in the path of a step. The count travels with the counters. (D-training-001)
        return self.finished or stops(self.counters, self.rules.max_skipped, self.rules.max_spiked)

    @property
    def live(self) -> frozenset[str]:
        """Devices of the layout that are not known to be dead."""
        return frozenset(self.layout.holdings) - self.dead

    @property
    def computes(self) -> bool:
        """Whether nobody of its shard group is known to be dead."""
        return self.device not in self.layout.unable(self.dead)

    @property
    def standing(self) -> tuple[Route, ...]:
        """The routes of the present round, if nothing more fails."""
        return self.rules.evaluation.routes(self.layout, self.detours, self.counters)

    @property
    def interrupted(self) -> frozenset[int]:
        """Micro-batches of the present round that a dead device had a part in."""
        unable = self.layout.unable(self.dead)
        return frozenset(route.micro_batch for route in self.standing if route.touches(unable))

    def fence(self, epoch: int, round_: int) -> Fence:
        """What sums of that epoch and round are here and now."""
        if self.frozen or epoch > self.commit.epoch or round_ > self.counters.round:
            return "later"
        return "now" if (epoch, round_) == (self.commit.epoch, self.counters.round) else "old"

    # ------------------------------------------------------------------ boundaries

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> Commands:
        """Take ``layout`` into force at a boundary. Does not run yet.

        ``order``: what the planner would have this device do in every round; empty: whatever is ready.
        """
        self.order = order
        self.layout, self.dead, self.detours, self.counters = layout, frozenset(), None, counters
        self.flags, self.hold_next, self.late = Flags(), False, False
        self.ahead = None
        self.exchange.adopt(layout)
        # Of a shard nobody takes over sums: its group does nothing more in the round. (D-recovery-029)
        self.copies.per_round = self.rules.copies if layout.devices_per_stage == 1 else 0
        self.copies.adopt(layout.epoch)
        self.commit.adopt(layout.epoch, counters.round, layout.holdings)
        self.phase = "asked-held" if self.frozen else "held"
        return self._begin(self._round(counters), NO_DONORS)

    def resume(self) -> Commands:
        """Run from a boundary; Hold where no round follows, as after a rollback to the final checkpoint. Who
        runs goes on: it may be said twice.
        """
        if self.over:
            return self.hold()
        if not self.holding:
            return ()
        self._run()
        return ()

    def flag(self, flags: Flags) -> None:
        """``flags`` go into the next vote."""
        self.flags |= flags

    def hold(self) -> Commands:
        """Stop before the present round."""
        self.stand()
        return (Hold(),)

    def stand(self) -> None:
        """Go no further until the daemon says so."""
        self._enter("asked-held" if self.frozen else "held")

    # ------------------------------------------------------------------ a round

    def next(self, here: Arrived, early: Arrived, *, computes: bool = True) -> Commands:
        """What to do now; nothing where all waits for others. ``here`` and ``early``: whether what a task of
        the present round, and of that begun early, waits for has arrived; ``computes``: whether all that
        tasks compute with is. Raises ReplicasDisagree.
        """
        # Asked for one piece of work at a time: tasks that were given out ahead would have to be taken back
        # at every report. (D-recovery-027)
        allowed = PHASES[self.phase]
        if not allowed.computes:
            return ()
        if allowed.commits:
            if ready := self.exchange.ready():
                return ready
            if self.exchange.complete and self.commit.own is None:
                return (CastVote(),)
            vote = self.commit.committed()
            if vote is not None:
                return self._commit(vote, NO_DONORS, then_holds=True)
        found = self.now.board.next(here) if computes else None
        if found is not None:
            return (RunTask(*found),)
        found = self.ahead.board.next(early) if self.ahead is not None else None
        return (RunTask(*found, early=True),) if found is not None else ()

    def cast(self, vote: Vote, *, writing: bool = False) -> Commands:
        """All is reduced here, and this is what the device knows of the round; ``writing``: it still writes a
        checkpoint. Its flags are added.
        """
        # Whether to stop or to write must be the same for all, so it is the union of the votes: a device
        # that decided alone could leave a checkpoint incomplete. (D-checkpoints-003)
        self.commit.cast(msgspec.structs.replace(vote, flags=self.flags | Flags(writing=writing)))
        self._enter("voted")
        if not self._may_hurry(vote):
            return self._own_vote()
        # Forward passes alone: weight gradients before the commit would need sums of their own, as large as
        # the model's, for the few moments until the votes are in. (D-schedules-007)
        self.ahead = self._round(self.counters.after("applied"), forward_only=True)
        self._enter("early")
        return (*self._own_vote(), UpdateEarly(self.ahead))

    @property
    def undisturbed(self) -> bool:
        """Whether there is nothing to vote on but the round itself: no flag waits, and nobody is to hold."""
        return not self.hold_next and self.flags == NO_FLAGS

    def pass_over(self, num_steps: int, vote: Vote) -> Counters:
        """Commit so many steps, all applied, as one round with ``vote`` and the flags, none of which says
        hold; the last one's counters. For a machine without layers and peers: its rounds have no more.
        """
        # A simulated month has a hundred thousand such rounds: with their votes it took a tenth longer.
        assert not self.exchange.held
        assert not self.hold_next
        assert not self.flags.hold
        assert not any(
            self.rules.evaluation.evaluates(self.counters.further(steps)) for steps in range(num_steps)
        )
        was = self.counters.further(num_steps - 1)
        self.counters, self.late = was.after("applied"), False
        if self.flags != NO_FLAGS:
            vote, self.flags = msgspec.structs.replace(vote, flags=self.flags), NO_FLAGS
        self.commit.advance(vote)
        return was

    def _own_vote(self) -> Commands:
        assert self.commit.own is not None
        peers = tuple(sorted(self.commit.live - {self.device}))
        return (SendVote(peers, self.commit.epoch, self.counters.round, self.commit.own),)

    def _may_hurry(self, own: Vote) -> bool:
        """Whether to go on with the next round before the votes for this one are in.

        Not while an attempt of this one has yet to pass through layers that are reduced already: it needs the
        weights as they are.
        """
        rounds, following = self.rules.evaluation, self.counters.after("applied")
        # An evaluation has nothing to update, and needs the weights of the step before it: to begin it with
        # some that may be taken back would save a moment every few hundred steps. (D-recovery-028)
        steps = not self.now.board.evaluates and not rounds.evaluates(following)
        last = following.step >= rounds.steps
        halts = self.hold_next or self.flags != Flags() or last or len(self.commit.live) == 1
        clean = steps and not (own.nan or own.overflow) and self.now.board.idle
        # Others of a shard group gather weights here until they have voted themselves. (D-recovery-029)
        alone = self.layout.devices_per_stage == 1
        return self.rules.staggered and alone and clean and not halts and self.predictor.expects_a_commit

    def _commit(self, vote: Vote, donors: Donors, *, then_holds: bool) -> Commands:
        """The round's one commit point has passed: roll forward. ``donors``: of buckets in the next round.
        ``then_holds``: stop behind it where that was asked for; else the decision says so.
        """
        assert self.exchange.complete, f"{self.device}: {self.counters} commits before all is reduced here"
        was, evaluated = self.counters, self.now.board.evaluates
        outcome = outcome_of(vote, evaluates=evaluated)
        cause, self.counters = self.judge(was, vote, outcome)
        outcome = "skipped" if cause else outcome
        self.late = not evaluated and not (outcome == "applied" and self.goes_through(vote))
        if not evaluated:
            self.predictor.saw(not self.late)
        ahead, self.ahead = self.ahead, None
        # What was taken for the round that was begun early is kept: who has committed already will not send
        # it again. (D-schedules-006)
        taken_back = ahead is not None and self.late
        hold = self.hold_next or vote.flags.hold or self.over
        early = ahead is not None and not taken_back
        committed = CommitRound(was, self.commit.epoch, vote, outcome, early, taken_back, hold, cause)
        self.commit.advance(vote)
        done, later = vote.flags, self.flags  # a flag that came after the vote was cast waits for the next
        self.flags = Flags(
            later.hold and not done.hold,
            later.checkpoint and not done.checkpoint,
            full=later.full and not done.full,
        )
        self.hold_next = False
        following = ahead if early and not hold else None
        begin = self._begin(following or self._round(self.counters), donors, begun=following is not None)
        commands: Commands = (committed, *begin)
        if then_holds:
            self._enter("held" if hold else "computing")
            return (*commands, Hold()) if hold else commands
        return commands

    def _begin(self, spec: RoundSpec, donors: Donors, *, begun: bool = False) -> Commands:
        """The next round: standing routes that touch no dead device."""
        self.now = spec
        spec.board.forward_only = False
        rounds, step = self.rules.evaluation, self.counters.step
        steps = rounds.of_step(step), rounds.of_step(step + 1)
        num_evaluated = rounds.num_evaluated(self.counters)
        twice = self.rules.checks(step) and not num_evaluated
        self.exchange.begin(self.counters.round, spec.board.ledger, steps, num_evaluated, twice=twice)
        self.copies.begin(self.counters.round)
        return (BeginRound(spec, begun), *self._exchange(donors))

    def _exchange(self, donors: Donors) -> Commands:
        self.exchange.enter(self.commit.epoch, self.layout, self.commit.live, donors)
        # Losses are a few bytes: the head's holders have them with its contribution, and what a dead one had
        # said to nobody is a forward pass. (D-recovery-028)
        copied = () if self.now.board.evaluates else self.now.board.ledger.done
        self.copies.enter(self.layout, self.commit.live, copied)
        return (EnterExchange(),)

    def _round(self, counters: Counters, *, forward_only: bool = False) -> RoundSpec:
        """A round on the standing routes that touch no dead device."""
        standing = self.rules.evaluation.routes(self.layout, self.detours, counters)
        unable = self.layout.unable(self.dead)
        routes = tuple(route for route in standing if not route.touches(unable))
        board = Board(self.device, self.rules.apart, forward_only=forward_only)
        board.evaluates = self.rules.evaluation.evaluates(counters)
        if not board.evaluates:
            board.fellows = frozenset(self.layout.group(self.device)) - {self.device}
        board.begin(self._counts(board), routes, *self._besides(board, counters.step))
        # What names the round in the keys of data. Where the round before did not go through, others may have
        # begun it with weights that were taken back: what they sent then must not be taken for what they send
        # now. All devices know whether it did from the same votes.
        tag = 2 * counters.round + (self.late and counters.round == self.counters.round)
        return RoundSpec(counters, tag, board)

    def _counts(self, board: Board) -> Sequence[int]:
        """The layers of which this device counts micro-batches in a round."""
        held = self.layout.holdings.get(self.device, NO_LAYERS).layers()
        return [layer for layer in held if layer == self.layout.num_layers - 1 or not board.evaluates]

    def _besides(self, board: Board, step: int) -> tuple[Order, Layers]:
        """The order of a round of ``step``, and the layers whose forward passes are run ahead for others."""
        # Nothing waits for gradients in an evaluation, so whatever is ready is as good as any order. A hop
        # may be ahead of the next one by all of its share: what waits there are the activations between two
        # layers, and no graphs, which are larger, are kept meanwhile. (D-recovery-028)
        if board.evaluates:
            return (), NO_LAYERS
        redundant = self.layout.redundant.get(self.device, NO_LAYERS) if self.rules.redundant else NO_LAYERS
        return (() if self.dead else self._order_of(step)), redundant

    def _order_of(self, step: int) -> Order:
        """What is left of the order where ``step`` has fewer micro-batches than a whole one: none waits for
        another, so what is left can be run as well.
        """
        num = self.rules.evaluation.of_step(step)
        if num == self.rules.evaluation.per_step:
            return self.order
        return tuple(each for each in self.order if each[2] < num)

    # ------------------------------------------------------------------ failures

    def report(
        self, epoch: int, dead: Collection[str], arrived: Arrived, kept: Callable[[str, Task], bool]
    ) -> Commands:
        """Devices died (docs/recovery.md, A failure, 2). Answers with ``Progress``; stale reports are
        ignored.

        ``arrived``: whether what a task waits for is here. ``kept``: whether what it sent can be sent again.
        """
        odds = self.commit.disagreements()
        if not self.commit.report(epoch):
            return ()
        self.dead |= frozenset(dead)
        # At every report, also where the round will commit: then a failure meets a round as it was, which
        # is the one rule that is model-checked. It costs a copy and some forward passes. (D-schedules-005)
        roll_back = self.ahead is not None
        self.ahead = None
        frozen, board = self.interrupted, self.now.board
        board.freeze(frozen)
        left = self.device in self.layout.unable(self.dead) and not board.evaluates
        if left:
            board.leave()
        # The ledger of the dead goes into the report with this device's own, so the daemon sees done work
        # and the decision needs no rule for copies. (D-recovery-018)
        inherited = self.copies.inherit(self.dead)
        for what in inherited.values():
            for layer, micro_batches in what.done.items():
                for micro_batch in micro_batches:
                    board.ledger.inherit(layer, micro_batch)
        if self.dead:
            board.forget_order()
        self._enter("asked-held" if self.holding else "asked")
        self.exchange.open = False
        answer = Progress(
            self.device,
            epoch,
            self.counters,
            board.ledger.counted(board.ledger.done),
            self.exchange.told,
            self.commit.heard(),
            self.commit.last,
            self.holding,
            # What neighbours still hold decides which hops are done again: with activations and
            # gradients both kept, it is the dead stage's own work and nothing else. (D-recovery-011)
            board.hops(frozen, arrived, kept),
        )
        return (
            # The dead device may be the corrupted one; with it gone no device will collect every vote, so
            # report now.
            *((Distrust(odds),) if odds else ()),
            *((RollBack(),) if roll_back else ()),
            *((ForgetSums(),) if left else ()),
            *(InheritSums(device, what) for device, what in inherited.items()),
            Tell(answer),
        )

    def decide(self, message: Decide) -> Commands:
        """What all survivors do now (docs/recovery.md, A failure, 4). Stale decisions are ignored."""
        if not self.commit.decide(message.epoch, self.live):
            return ()
        self.detours = message.detours
        if self.counters.round < message.round:
            assert message.commit is not None
            commands = self._commit(message.commit, message.donors, then_holds=False)
        else:
            commands = self._exchange(message.donors)
        frozen = self.interrupted
        resumed = self.now.board.add(message.routes)
        commands = (*commands, TakeUp(frozen, resumed, bool(message.routes)))
        if message.hold_now or self.over:
            last = (WriteLast(),) if self.finished else ()
            return (*commands, *last, *self.hold())
        self.hold_next = message.hold
        self._run()
        return (*commands, *self._own_vote()) if self.commit.own is not None else commands

    # ------------------------------------------------------------------ phases

    def _run(self) -> None:
        self._enter("computing" if self.commit.own is None else "voted")

    def _enter(self, phase: Phase) -> None:
        assert phase in PHASES[self.phase].then, f"{self.device}: {phase} after {self.phase}"
        self.phase = phase
