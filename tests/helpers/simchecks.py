"""What must be so in a simulated world, whatever fails: asserted while it runs, and at the end of a job.

Owns what was seen on the wires and on the disk: rounds that devices committed, what they answered and what
they were told, what the journal has. None of it is asked of the code that is under test. The machine's own
state is checked by ``core.invariants``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from oobleckd.core.entries import (
    CorruptionFound,
    EpochRaised,
    Evaluated,
    LayoutDeployed,
    RolledBack,
    StepEntry,
)
from oobleckd.core.events import Tell
from oobleckd.core.state import JobRecord, Step
from oobleckd.daemon import stepstore
from oobleckd.planner.policy import ROLLING_BACK
from oobleckd.protocol.agentmessages import Ack
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Decide, Deploy, LinkDown, Progress, Report, Resume
from oobleckd.protocol.parts import Counters, EvalSum, Outcome
from oobleckd.worker import sums
from oobleckd.worker.checkpointing.snapshot import ledger_digest
from tests.helpers.simdevice import SimDevice
from tests.helpers.simpasses import evaluated_loss_of, loss_of
from tests.helpers.simstore import trail_of
from tests.helpers.simtext import SimCorpus, SimEvaluation

if TYPE_CHECKING:
    from tests.helpers.world import World

_SLACK_S = 3.0


class Checks:
    """``outcomes``: what was committed in each round of each history; one began at each of the epochs
    ``histories``.

    ``excuses``: node -> until when it may be given up although it lives, as something was wrong with it or
    its links. ``said``: (kind, epoch) -> what all were told under it; ``told_epoch``: device -> the highest
    that it was told of. ``answered``, ``decided``: incarnation of a device -> the highest epoch that it
    answered, and that it had a decision of. ``rounds_on_disk``: job -> the first round that is not there;
    ``evaluations``: job -> after which steps all of one is there; ``layouts``: job -> the layout that is, and
    its dead. ``given_up``: how many live devices were taken for
    dead, with an excuse. ``corruptions``: how often bits were found wrong, ``distrusted``: and nobody has
    gone back for it yet.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcomes: dict[tuple[str, int, int], tuple[Counters, str, tuple[int, int], int]] = {}
        self.histories: set[int] = set()
        self.last_copy_lost = False
        self.excuses: dict[str, float] = {}
        self.said: dict[tuple[str, int], Any] = {}
        self.told_epoch: dict[str, int] = {}
        self.answered: dict[str, int] = {}
        self.decided: dict[str, int] = {}
        self.rounds_on_disk: dict[str, int] = {}
        self.epoch_on_disk = 0
        self.layouts: dict[str, LayoutDeployed] = {}
        self.dead: dict[str, tuple[str, ...]] = {}
        self.evaluations: dict[str, set[int]] = {}
        self.given_up = self.rollbacks = self.corruptions = 0
        self.distrusted = False

    # ------------------------------------------------------------------ what devices commit

    def begin_history(self, epoch: int) -> None:
        """State comes from outside the devices: a history begins, whose rounds only it must agree on. Who
        hears nothing of it goes on in the one before.
        """
        self.histories.add(epoch)

    def committed(
        self, device: SimDevice, counters: Counters, outcome: Outcome, weights: tuple[int, int]
    ) -> None:
        """Every device commits a round with the same outcome, counters, weights after it and layout; and none
        that has answered a report before it has the decision.
        """
        answered, decided = self.answered.get(device.incarnation, 0), self.decided.get(device.incarnation, 0)
        assert answered <= decided, f"{device.name} answered {answered} and committed without its decision"
        here = (counters, outcome, weights, device.layout.epoch)
        history = max(epoch for epoch in self.histories if epoch <= device.layout.epoch)
        seen = self.outcomes.setdefault((device.job, history, counters.round), here)
        assert seen == here, f"{device.name}: {here}, others {seen}"

    def heard(self, device: SimDevice, message: Any) -> None:
        """``device`` is about to take in a message of the daemon."""
        if isinstance(message, Decide | Resume):
            self.decided[device.incarnation] = max(message.epoch, self.decided.get(device.incarnation, 0))

    def says(self, device: SimDevice, message: Any) -> None:
        """``device`` told its agent something."""
        if isinstance(message, Progress):
            before = self.answered.get(device.incarnation, -1)
            assert message.epoch > before, f"{device.name} answered {message.epoch} after {before}"
            self.answered[device.incarnation] = message.epoch
        elif isinstance(message, LinkDown):
            peer = self.world.device(message.peer)
            if peer is not None and peer.alive:
                for node in (device.node, peer.node):
                    self.excuse(node.name, self.world.config.link_grace_s)

    # ------------------------------------------------------------------ what the daemon says

    def told(self, command: Tell) -> None:
        """What is told leaves in the order of epochs, is the same for all under one epoch, and acknowledges
        nothing that is not on disk.
        """
        match command.message:
            case Report(device, epoch, layout, dead):
                self._same("report", epoch, (layout, dead))
            case Deploy(device=device, epoch=epoch) as message:
                rank = message.layout.rank
                kept = not message.held_per_stage
                assert all(kept <= (rank(each.source) == rank(each.target)) for each in message.transfers)
                told = (message.layout, message.counters, message.source, message.held_per_stage)
                self._same("deploy", epoch, told)
            case Decide(device=device, epoch=epoch) as message:
                self._same("decide", epoch, msgspec.structs.replace(message, device=""))
            case Resume(device, epoch, layout):
                self._same("resume", epoch, layout)
            case Ack(job, round_):
                self._acknowledged(job, round_)
                return
            case _:
                return
        last = self.told_epoch.get(device, 0)
        assert epoch >= last, f"{device} is told of epoch {epoch} after {last}"
        self.told_epoch[device] = epoch

    def _same(self, kind: str, epoch: int, content: Any) -> None:
        before = self.said.setdefault((kind, epoch), content)
        assert before == content, f"two {kind}s of epoch {epoch}: {before}, {content}"

    def _acknowledged(self, job: str, round_: int) -> None:
        machine = self.world.machine
        over = machine is None or job not in machine.core.state.jobs or self.world.job(job).final
        assert over or round_ < self.rounds_on_disk.get(job, 0), f"{job}: round {round_} is not on disk"

    # ------------------------------------------------------------------ what is on disk

    def journaled(self, entry: msgspec.Struct) -> None:
        """What the journal has in order is rounds without a gap, each with what a run without failures has;
        and epochs that rise. It has no rollback while somebody who is not to be given up holds the layer, but
        for a policy that always rolls back.
        """
        match entry:
            case StepEntry() | Evaluated():
                assert entry.counters.round == self.rounds_on_disk.get(entry.job, 0), "a round is missing"
                self.rounds_on_disk[entry.job] = entry.counters.round + 1
                self._check_round(entry)
            case EpochRaised():
                assert entry.epoch > self.epoch_on_disk, "an epoch is used twice"
                self.epoch_on_disk = entry.epoch
                self._check_dead(entry.job, entry.dead)
            case LayoutDeployed():
                self.layouts[entry.job], self.dead[entry.job] = entry, ()
            case CorruptionFound():
                self.distrusted = True
                self.corruptions += 1
            case RolledBack():
                before = self.layouts.pop(entry.job, None)
                lost = before is not None and bool(before.layout.lost(self.dead[entry.job]))
                excused = lost or self.distrusted or self._rolls_back(entry.job) or self.world.texts.written
                assert excused, "back although every layer has a copy that can be trusted"
                self.distrusted = False
                self.rounds_on_disk[entry.job] = entry.counters.round
                self.last_copy_lost |= lost
                self.rollbacks += 1
            case _:
                pass

    def forget_end(self, entries: list[Any]) -> None:
        """Of the journal only ``entries`` are left: what was on disk is looked at anew."""
        self.rounds_on_disk, self.epoch_on_disk, self.layouts, self.dead = {}, 0, {}, {}
        self.corruptions += 1
        self.distrusted = True
        for entry in entries:
            match entry:
                case StepEntry() | Evaluated():
                    self.rounds_on_disk[entry.job] = entry.counters.round + 1
                case EpochRaised():
                    self.epoch_on_disk = entry.epoch
                    self.dead[entry.job] = entry.dead
                case LayoutDeployed():
                    self.layouts[entry.job], self.dead[entry.job] = entry, ()
                case RolledBack():
                    self.layouts.pop(entry.job, None)
                    self.rounds_on_disk[entry.job] = entry.counters.round
                case _:
                    pass

    def _rolls_back(self, job: str) -> bool:
        return self.world.job(job).spec.fault_tolerance.policy in ROLLING_BACK

    def _check_dead(self, job: str, dead: tuple[str, ...]) -> None:
        """Who is taken for dead is, or something was wrong with it."""
        for device in sorted(set(dead) - set(self.dead.get(job, ()))):
            here = self.world.device(device)
            if here is not None and here.alive and here.incarnation == self.layouts[job].incarnations[device]:
                self.given_up += 1
                excused = not here.node.connected or self.world.now <= self.excuses.get(here.node.name, -1.0)
                assert excused, f"{device} lives and was given up: {self._cause(here.node.name)}"
        self.dead[job] = dead

    def _check_round(self, entry: StepEntry | Evaluated) -> None:
        rounds = self.world.job(entry.job).spec.eval_rounds
        evaluates = isinstance(entry, Evaluated)
        assert evaluates == rounds.evaluates(entry.counters), f"{entry.counters} is of another kind"
        if isinstance(entry, Evaluated):
            self._check_evaluated(entry)
        elif not self.world.texts.written:  # what was read before it was found is looked at in the end
            self._check_step(entry)

    def _check_evaluated(self, entry: Evaluated) -> None:
        """Its sums are of the weights that a run without failures has there, and of its micro-batches; in the
        end of all.
        """
        spec, counters = self.world.job(entry.job).spec, entry.counters
        rounds = spec.eval_rounds
        if rounds.is_last(counters):
            self.evaluations.setdefault(entry.job, set()).add(counters.step)
        else:
            assert not entry.totals
        if self.world.texts.written:
            return
        assert entry.sums == self._evaluated(spec, counters.step, rounds.micro_batches(counters))
        if rounds.is_last(counters):
            numbers = range(rounds.total)
            parts = [numbers[at : at + rounds.per_step] for at in numbers[:: rounds.per_step]]
            sums = [each for part in parts for each in self._evaluated(spec, counters.step, part)]
            assert entry.totals == tuple(
                EvalSum(
                    name,
                    math.fsum(each.loss_sum for each in sums if each.source == name),
                    sum(each.targets for each in sums if each.source == name),
                )
                for name in spec.eval_sources
            )

    def _evaluated(self, spec: Job, step: int, numbers: range) -> tuple[EvalSum, ...]:
        world, evaluation = self.world, SimEvaluation(spec)
        weights = (step - sum(skipped < step for skipped in world.passed_over), trail_of(step, world))
        found = []
        for name in spec.eval_sources:
            of = {
                number: evaluation.targets[number]
                for number in numbers
                if evaluation.source_of(number) == name
            }
            losses = [evaluated_loss_of(weights, number) * targets for number, targets in of.items()]
            if of:
                found.append(EvalSum(name, math.fsum(losses), sum(of.values())))
        return tuple(found)

    def _check_step(self, entry: StepEntry) -> None:
        step = entry.counters.step
        losses = {mb: loss_of(step, mb) for mb in range(self.world.sizes.micro_batches(step))}
        assert entry.loss == sums.added(losses.values()) / len(losses), f"step {step}: loss {entry.loss}"
        assert (entry.samples, entry.ledger) == ledger_digest(SimCorpus(), step, losses), (
            f"step {step}: ledger"
        )

    # ------------------------------------------------------------------ who is given up

    def excuse(self, node: str, seconds: float) -> None:
        """For so long, and until its lease can have run out, ``node`` may be given up."""
        until = self.world.now + seconds + self.world.config.lease_s + _SLACK_S
        self.excuses[node] = max(self.excuses.get(node, 0.0), until)

    def _cause(self, name: str) -> str:
        machine = self.world.machine
        return machine.core.members.nodes[name].cause if machine is not None else "the daemon is down"

    def note_lost_copies(self) -> None:
        """Only where this finds a layer without a copy may the job roll back."""
        stages: dict[tuple[str, ...], set[int]] = {}
        living = {device.name: device for device in self.world.devices()}
        for name, device in living.items():
            group = device.layout.group(name)
            whole = all(other in living for other in group)
            found = stages.setdefault(group, set(device.held_layers) if whole else set())
            found &= set(device.held_layers)
        held = set().union(*stages.values())
        self.last_copy_lost |= held != set(range(self.world.num_layers))

    # ------------------------------------------------------------------ at the end

    def done(self, job_id: str) -> None:
        """The job is done, every step is recorded once, with the loss of a run without failures."""
        world = self.world
        job = world.job(job_id)
        assert job.state == "done", (job.state, job.reason)
        steps = self._steps(job)
        assert [step.step for step in steps] == list(range(job.spec.train.steps))
        due = {step for step in range(job.spec.train.steps + 1) if job.spec.eval_rounds.due(step)}
        assert self.evaluations.get(job_id, set()) == due, "an evaluation is missing"
        assert self.last_copy_lost or self._rolls_back(job_id) or self._distrusts() or job.steps_lost == 0
        for incident in world.incidents():
            assert not incident.open
            assert min(incident.total_s, *(phase.duration_s for phase in incident.phases)) >= 0.0, incident
        for step in steps:
            losses = [loss_of(step.step, mb) for mb in range(world.sizes.micro_batches(step.step))]
            assert step.loss == sums.added(losses) / len(losses)
        wanted = (job.spec.train.steps - len(world.passed_over), trail_of(job.spec.train.steps, world))
        assert {state[::2] for state in world.complete[job.checkpoint].values()} == {wanted}

    def _steps(self, job: JobRecord) -> list[Step]:
        """All of them: those that are not in memory from the journal."""
        last, most = stepstore.before_memory(job), job.spec.train.steps
        older = []
        if last >= job.start.step:
            older = stepstore.in_journal(self.world.daemon.disk, job.id, job.start.step, last, most)
        return [*older, *stepstore.in_memory(job, job.start.step, most)]

    def _distrusts(self) -> bool:
        return bool(self.corruptions) or self.world.texts.written

    def describe(self) -> str:
        """Where everything stands, for a failing test."""
        world = self.world
        if world.machine is None or world.machine.core.run is None:
            return f"seed {world.seed}: no run"
        run = world.machine.core.run
        lines = [
            f"seed {world.seed}: {run.job.state} ({run.job.reason}) phase {run.phase} epoch {run.job.epoch}",
            f"dead {run.job.dead} held {sorted(run.held)} answers {sorted(run.answers)} asked {run.asked}",
        ]
        lines += [
            f"{device.name} alive={device.alive} conn={node.connected} job={device.job!r} "
            f"layout={device.layout.epoch} epoch={device.commit.epoch}/{device.commit.answered} "
            f"{device.counters} holding={device.holding} deployment={device.deployment is not None} "
            f"{device.at()}"
            for node in world.nodes.values()
            for device in node.devices.values()
        ]
        lines += [change.text for change in world.daemon.changes[-12:]]
        return "\n".join(lines)
