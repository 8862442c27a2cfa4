"""The job's devices as one: a shell of the round machine that computes nothing, and knows how long all takes.

All devices of a job do the same at the same time, so one machine stands for all of them, and a message that
all of them get is obeyed once. It goes by a layout of its own, in which it is the only device and holds no
layer: its rounds have no task and no sums, and its vote is all votes. A round of which the core hears may
stand for many steps: nothing happens in them, and the machine passes over them.

Owns what such a machine cannot know: the layout as it is, and so who computes what; how far a round is; who
is dead before anybody knows; how long everything takes; and when a checkpoint is due. What each device
answers to a report is ``progress``'s estimate.

In one thing devices are not followed. A device keeps a flag that was said before a report, or while it
stands, for its next vote; here it is forgotten, since published results have it so. Kept, a hold that no plan
waits for any more is resumed at once, and a checkpoint begins some steps earlier.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import msgspec

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.plan import Layers, Layout, Route, node_of, standing_routes
from oobleckd.planner.profile import Profile
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import (
    Decide,
    Deploy,
    Held,
    Progress,
    Ready,
    Report,
    Resume,
    StepDone,
    ToDecideBy,
)
from oobleckd.protocol.parts import Counters, Flags, Vote
from oobleckd.simulator import saving
from oobleckd.simulator.account import Account
from oobleckd.simulator.clock import VirtualClock
from oobleckd.simulator.costs import Costs
from oobleckd.simulator.precopy import SimulatedPreCopy
from oobleckd.simulator.progress import Moment, answers, forward_share
from oobleckd.simulator.steps import mended_at
from oobleckd.simulator.sums import Sums
from oobleckd.worker.round_machine.commands import CommitRound, Tell
from oobleckd.worker.round_machine.machine import RoundMachine, Rules

ALL = "all"
"""The name of the machine that stands for all devices."""
NOTHING = Vote({}, {})
"""What it knows of a round: all votes are the same."""


class TrainingShell(Protocol):
    """What training needs of the world around it."""

    clock: VirtualClock
    account: Account

    def hear(self, device: str, message: ToDecideBy) -> None:
        """Bring a device's message to the core."""

    def step_s(self) -> float:
        """Seconds of a step as training goes now."""

    def besides_s(self) -> float:
        """Of these what follows the last pass, besides the update."""

    def exchange_s(self) -> float:
        """Of that what the planner has of the exchange of gradients."""

    def best_s(self) -> float:
        """Seconds of a step with the best plan for whoever is alive."""

    @property
    def watched(self) -> bool:
        """Whether the core is to hear of every step from every device: while an incident is open."""

    def look_s(self) -> float:
        """For how long the core need not hear of steps that nothing disturbs; 0 while an incident is open."""

    def committed(self) -> None:
        """Steps were committed."""


class SimulatedDeployment(msgspec.Struct, frozen=True):
    """A layout that is being brought in, as every device was told."""

    told: Deploy
    devices: tuple[str, ...]


@dataclass(slots=True)
class Training:
    """All devices that train ``spec``.

    ``machine``: where they stand. ``layout``: the one in force, as it is; without one no device holds
    anything. ``stricken``: somebody died in the round under way, and the daemon does not know. ``late_s``:
    the first step under way ends so much later, for the snapshot before it. ``share`` of the round was done
    at the loss. ``mended_at``: when a round that lost devices is committed (inf: none has). ``gone``: devices
    that are dead, whether anybody knows or not; ``new`` have never held anything of the job. ``losses``
    counts, so that a checkpoint knows whether its writers all lived; ``writing``: one is under way.
    """

    world: TrainingShell
    costs: Costs
    profile: Profile
    spec: Job
    sums: Sums
    job: str = ""
    layout: Layout | None = None
    stricken: bool = False
    gone: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)
    every: int = 0
    begun_at: float = 0.0
    step_s: float = 0.0
    late_s: float = 0.0
    share: float = 0.0
    mended_at: float = inf
    deployment: SimulatedDeployment | None = None
    losses: int = 0
    writing: bool = False
    precopy: SimulatedPreCopy = field(init=False)
    machine: RoundMachine = field(init=False)

    def __post_init__(self) -> None:
        self.precopy = SimulatedPreCopy(self.world, self.profile, self.gone)
        self.machine = self._machine()

    def _machine(self) -> RoundMachine:
        return RoundMachine(ALL, Rules.of(self.spec), (), lambda _vote: True)

    # ------------------------------------------------------------------ time

    @property
    def running(self) -> bool:
        """Whether a round is under way that nothing disturbs."""
        return self.machine.phase == "computing" and not self.stricken

    @property
    def boundary(self) -> float:
        """When the next commit is that the core is told of; inf where none is coming."""
        if not self.running:
            return inf
        if self.mended_at < inf:
            return self.mended_at
        return self.after_steps(self._stride())

    def _stride(self) -> int:
        """Steps until then."""
        if not self.machine.undisturbed:
            return 1
        steps = max(1, int(self.world.look_s() / self.step_s))
        return min(steps, self.every - self.machine.counters.step % self.every) if self.every else steps

    def whole_steps(self, until: float) -> int:
        """Undisturbed steps that are complete by ``until``, of those under way."""
        if not self.running or self.mended_at < inf:
            return 0
        return max(0, int((until - self.begun_at - self.late_s) / self.step_s * (1 + 1e-12)))

    def commit_to(self, when: float) -> None:
        """Commit what is complete at ``when``: the next boundary, or one before it."""
        num_steps = max(1, round((when - self.begun_at - self.late_s) / self.step_s))
        self._commit(1 if self.mended_at < inf else num_steps)

    def after_steps(self, num_steps: int) -> float:
        """When so many of the steps under way are complete."""
        return self.begun_at + self.late_s + num_steps * self.step_s

    # ------------------------------------------------------------------ who is there

    def survivors(self) -> list[str]:
        """Devices of the layout that nobody believes dead and that are not: by name, the last one first.

        The core asks whether all have answered; that it hears the first one last makes that cheap.
        """
        if self.layout is None:
            return []
        dead, gone = self.machine.dead, self.gone
        return sorted((d for d in self.layout.holdings if d not in dead and d not in gone), reverse=True)

    def strike(self, devices: Collection[str]) -> None:
        """Devices are dead from now on."""
        self.gone.update(devices)
        held = self.layout.holdings.keys() - self.machine.dead if self.layout is not None else frozenset()
        if held.isdisjoint(devices):
            return
        self.losses += 1
        if self.running:
            self.share, self.stricken = self._share(), True
        self.world.account.spend(self.world.clock.now, "detect")

    def _share(self) -> float:
        """How much of the passes of the round under way is done."""
        took_s = self.mended_at - self.begun_at if self.mended_at < inf else self.step_s
        passes_s = max(took_s - self.world.exchange_s(), 1e-9)
        return min(1.0, max(0.0, (self.world.clock.now - self.begun_at - self.late_s) / passes_s))

    def born(self, devices: Collection[str]) -> None:
        """Names are borne by new incarnations, which hold nothing: in the layout in force they are dead, and
        the core knows or is about to.
        """
        self.gone.difference_update(devices)
        self.new.update(devices)
        for device in devices:
            self.precopy.preloads.pop(device, None)

    def release(self) -> None:
        """No device holds anything any more."""
        self.machine, self.layout, self.deployment = self._machine(), None, None
        self.stricken, self.mended_at, self.late_s = False, inf, 0.0

    # ------------------------------------------------------------------ what they are told

    def deploy(self, message: Deploy) -> None:
        """A new layout, which all of its devices and of the one before get ready for."""
        if self.deployment is not None and self.deployment.told.epoch >= message.epoch:
            return
        self.job = message.job
        self.deployment = SimulatedDeployment(message, tuple(sorted(message.peers, reverse=True)))
        fixed_s, moved_s = self._takes(message)
        now, clock = self.world.clock.now, self.world.clock
        self.world.account.spend(now, "reconfigure")
        clock.at(now + fixed_s, lambda: self._copying(message.epoch))
        clock.at(now + fixed_s + moved_s, lambda: self._ready(message.epoch))

    def _takes(self, message: Deploy) -> tuple[float, float]:
        """Seconds of a deployment, and of what is copied or read in it."""
        costs = self.costs
        fixed_s = costs.deploy_s
        joining = self.new.intersection(message.layout.holdings)
        loaded_s = (self.precopy.loaded_s(message, device) for device in joining)
        fixed_s += max((max(0.0, costs.begin_s - since_s) for since_s in loaded_s), default=0.0)
        if message.source == "copy":
            return fixed_s, self.precopy.copies_s(message)
        if message.source == "init":
            return fixed_s + costs.init_s, 0.0
        held: dict[str, int] = {}
        for device, layers in message.layout.holdings.items():
            num_bytes = sum(copy_bytes(self.profile.layers[n]) for n in layers.layers())
            held[node_of(device)] = held.get(node_of(device), 0) + num_bytes
        most = max(held.values()) / message.layout.devices_per_stage
        return fixed_s + costs.restart_s, most / costs.load_bytes_per_s

    def _copying(self, epoch: int) -> None:
        if self.deployment is not None and self.deployment.told.epoch == epoch:
            self.world.account.spend(self.world.clock.now, "copy")

    def _ready(self, epoch: int) -> None:
        """Who lives has its layers; of who died the core will hear."""
        found = self.deployment
        if found is None or found.told.epoch != epoch:
            return
        self.new.difference_update(found.told.layout.holdings)
        copied = self.precopy.copied(found.told)
        for device in found.devices:
            if device not in self.gone and self.deployment is found:
                self.world.hear(device, Ready(device, epoch, *copied.get(device, (0, 0))))

    def resume(self, message: Resume) -> None:
        """Run from the boundary, in the layout that was deployed or in the one in force."""
        found = self.deployment
        if found is not None and found.told.epoch == message.layout:
            self._adopt(found.told)
        elif self.machine.phase != "held" or self.layout is None or self.layout.epoch != message.layout:
            return
        self._forget_flags()
        self.machine.resume()
        self._begin()

    def _forget_flags(self) -> None:
        # A device keeps them. Here a step more or less of runs that are published would hang on it.
        # (D-simulator-015)
        self.machine.flags = Flags()

    def _adopt(self, told: Deploy) -> None:
        self.layout, self.deployment, self.stricken = told.layout, None, False
        alone = Layout(told.layout.epoch, told.layout.num_layers, {ALL: Layers()}, ())
        self.machine.adopt(alone, told.counters)
        every = told.spec.checkpoint.every
        self.every = self.costs.every or (every if isinstance(every, int) else 0)

    def _begin(self) -> None:
        """The next round begins now."""
        self.mended_at = inf
        self.begun_at, self.step_s = self.world.clock.now, self.world.step_s()
        self.world.account.spend(self.world.clock.now, "round")
        assert self.layout is not None
        unknown = self.gone & (self.layout.holdings.keys() - self.machine.dead)
        if unknown:
            self.strike(unknown)  # died after its last word

    # ------------------------------------------------------------------ a loss

    def report(self, message: Report) -> None:
        """They are asked how far they are."""
        found = self.deployment
        if found is not None and found.told.epoch == message.layout:
            self._adopt(found.told)
        if self.layout is None:
            return
        # Where a round is running nobody of them died: the daemon asks for a reason of its own.
        share = self._share() if self.running else self.share
        commands = self.machine.report(message.epoch, message.dead, _never, _never)
        if not commands:
            return
        self.deployment, self.stricken, self.share = None, False, share
        self._forget_flags()
        self.world.account.spend(self.world.clock.now, "plan")
        told = commands[-1]
        assert isinstance(told, Tell)
        assert isinstance(told.message, Progress)
        answer = told.message
        self.world.clock.after(self.costs.report_s, lambda: self._answer(answer))

    def _answer(self, told: Progress) -> None:
        if not self.machine.frozen or self.machine.answered != told.epoch or self.layout is None:
            return
        kept, nothing = self.spec.schedule.boundary_bytes > 0, self.costs.keeps == "nothing"
        moment = Moment(told, self.share, kept, nothing)
        standing, survivors = self.standing(), self.survivors()
        dead = self.layout.unable(self.machine.dead)  # whose fellows have forgotten their sums
        theirs = self.sums.inherited(self.layout, standing, dead, survivors, self.share, self.step_s)
        forward_of = forward_share(self.layout, self.profile)
        found = answers(moment, self.layout.routes, standing, dead, survivors, theirs, forward_of)
        for device, answer in found.items():
            self.world.hear(device, answer)

    def standing(self) -> tuple[Route, ...]:
        """Who computes which micro-batch in the round under way."""
        assert self.layout is not None
        return standing_routes(self.layout, self.machine.detours, self.machine.counters.round)

    def decide(self, message: Decide) -> None:
        """The round goes on, or they stand at the boundary before it."""
        now, before = self.world.clock.now, self.machine.detours
        if self.layout is None or not self.machine.decide(message):
            return
        if self.machine.holding:
            self.world.account.spend(now, "plan")
            self.world.clock.after(0.0, lambda: self._held(message.epoch))
            return
        if self.costs.keeps == "nothing":
            self.mended_at = now + self.step_s
        else:
            began = self.begun_at + self.late_s
            self.mended_at = mended_at(
                now,
                began,
                self.step_s,
                self.share,
                standing_routes(self.layout, before, message.round),
                message.routes,
                self.layout.unable(self.machine.dead),
                self.profile,
                self.world.besides_s(),
                self.layout.recompute,
            )
        self.world.account.spend(now, "round")

    def _held(self, epoch: int) -> None:
        machine = self.machine
        if machine.phase == "held" and machine.epoch == epoch:
            self.world.account.spend(self.world.clock.now, "plan")
        for device in self.survivors():
            if machine.phase == "held" and machine.epoch == epoch:
                self.world.hear(device, Held(device, epoch, machine.counters))

    # ------------------------------------------------------------------ a boundary

    def _commit(self, num_steps: int) -> None:
        """Commit ``num_steps`` steps: it is the boundary after them."""
        now, machine = self.world.clock.now, self.machine
        asked, may_hold = machine.flags.checkpoint, machine.hold_next or machine.flags.hold
        was, held = self._vote() if may_hold else (machine.pass_over(num_steps, NOTHING), False)
        step = machine.counters.step
        normal_s, best_s = num_steps * self.step_s, num_steps * self.world.best_s()
        self.world.account.commit(now, step, normal_s, best_s, self.late_s)
        writes = self._writes(step, held=held, asked=asked)
        told_s = self.step_s + self.late_s / num_steps
        self.late_s, self.mended_at = 0.0, inf
        if writes and not held:
            assert self.layout is not None
            # Written from a copy, as the engine's is: waited for, a checkpoint that a change met was chance
            # larger than the difference between policies. (D-simulator-012)
            self.late_s = saving.copy_s(self.layout, self.profile, self.costs)
        if held:
            self.world.account.spend(now, "checkpoint" if writes else "plan")
        else:
            self.begun_at = now  # the pace of the steps that follow is known when the core has heard
            self.world.account.spend(now, "round")
        self.world.committed()
        self._tell(was, num_steps, told_s, writes=writes)
        if self.running:
            self.step_s = self.world.step_s()
        if held:
            self._stop(writes=writes)
        if writes:
            self._write()

    def _vote(self) -> tuple[Counters, bool]:
        """Commit a round of one step: its counters, and whether all hold."""
        self.machine.cast(NOTHING)
        committed, *_ = self.machine.next(_never, _never)
        assert isinstance(committed, CommitRound)
        return committed.was, committed.hold

    def _stop(self, *, writes: bool) -> None:
        """Say that all hold, once what is to be written is copied; or written, where the one before it is
        still being.
        """
        epoch = self.machine.epoch
        if not writes:
            self._held(epoch)
            return
        assert self.layout is not None
        takes_s = saving.write_s if self.writing else saving.copy_s
        after_s = takes_s(self.layout, self.profile, self.costs)
        self.world.clock.after(after_s, lambda: self._held(epoch))

    def _tell(self, was: Counters, num_steps: int, step_s: float, *, writes: bool) -> None:
        """One device tells of a round whose steps took ``step_s`` each; all of them where an incident waits
        for that.
        """
        everybody, epoch = self.survivors(), self.machine.epoch
        num_samples = self.spec.train.global_batch * num_steps
        # Many undisturbed steps are told as one round: the core looks at all nodes at each, milliseconds
        # with thousands, and 30 days have half a million. (D-simulator-002)
        told = everybody if self.world.watched else everybody[-1:]
        for device in told:
            message = StepDone(
                device, self.job, epoch, was, "applied", 0.0, 0.0, 0.0,
                num_samples, "", step_s, self.step_s, checkpoint=writes,
            )  # fmt: skip
            self.world.hear(device, message)

    # ------------------------------------------------------------------ checkpoints

    def _writes(self, step: int, *, held: bool, asked: bool) -> bool:
        """Whether a checkpoint is begun at the boundary before ``step``: not while the last one is still
        being written, unless all hold.
        """
        due = asked or (self.every > 0 and step % self.every == 0)
        return due and (held or not self.writing)

    def _write(self) -> None:
        """The state of this boundary is written, while training goes on."""
        assert self.layout is not None
        counters, losses = self.machine.counters, self.losses
        self.writing = True

        def written() -> None:
            self.writing = False
            # Where a writer died meanwhile the checkpoint stays torn. (The engine has its heir write the
            # share anew.)
            if self.losses == losses and self.layout is not None and (living := self.survivors()):
                self.world.hear(living[-1], saving.part(living[-1], self.job, counters, self.profile))

        self.world.clock.after(saving.write_s(self.layout, self.profile, self.costs), written)


def _never(*_: object) -> bool:
    """Whether anything has arrived for, or is kept of, a task: there are none."""
    return False
