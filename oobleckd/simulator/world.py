"""A cluster on a virtual clock: the shell around the core machine, as the daemon is one.

Owns virtual time, the order of things, and what is written down of a run. Performs the core's commands and
brings it its events; what nodes and devices do with them is ``nodes``' and ``training``'s. The journal is not
kept, since this daemon does not restart.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import inf
from typing import assert_never

import msgspec

from oobleckd.core.cadence import cadence
from oobleckd.core.config import CoreConfig
from oobleckd.core.entries import (
    CheckpointWritten,
    IncidentOpened,
    LayoutDeployed,
    Released,
    RolledBack,
)
from oobleckd.core.events import (
    Announce,
    Asked,
    Command,
    Discard,
    Event,
    Heard,
    KeepState,
    LookAtRoom,
    MakePlan,
    ManifestWritten,
    Record,
    Reply,
    SetAside,
    Tell,
    Tick,
    WriteManifest,
)
from oobleckd.core.machine import Machine
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import node_of
from oobleckd.protocol.agentmessages import (
    Ack,
    Dismiss,
    EndStopped,
    Inject,
    Refused,
    TellLog,
    Wake,
    Welcome,
)
from oobleckd.protocol.artifactmessages import ArtifactHere, ArtifactKept, ArtifactPart, ArtifactTaken
from oobleckd.protocol.datamessages import Identify, PrepareData, PrepareDone, StopPreparing
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.jobparts import parts_of
from oobleckd.protocol.messages import (
    Decide,
    Deploy,
    Emptied,
    Flag,
    Measure,
    Measured,
    PreCopy,
    Release,
    Report,
    Resume,
    ToDecideBy,
    ToWorker,
)
from oobleckd.protocol.requests import Submit
from oobleckd.simulator import traces
from oobleckd.simulator.account import NS, Account
from oobleckd.simulator.clock import VirtualClock
from oobleckd.simulator.nodes import TICKET, SimulatedNodes
from oobleckd.simulator.outcome import Decided, Outcome, Point, Question, SimulationError, WrittenCheckpoint
from oobleckd.simulator.planning import Oracle, Planner
from oobleckd.simulator.steps import Besides, Steps
from oobleckd.simulator.sums import Sums
from oobleckd.simulator.training import Training

LOOK_S = 30.0
LOOK_NODE_S = 0.06
"""The core hears of undisturbed steps so often at least, so that what it decides by the time it decides in
time; less often on more nodes, where hearing of one takes longer.
"""
ENDLESS = 2**50
MAX_POINTS = 2000
_TURNS = 512  # between two words about how far it is

Progress = Callable[[float], None]


class World:
    """One run of one question."""

    def __init__(self, question: Question, planner: Planner | None = None) -> None:
        self.question, self.costs = question, question.costs
        self.clock, self.account, self.written = VirtualClock(), Account(), WrittenCheckpoint()
        self.planner = planner or Planner()
        # The daemon's own core, told of deaths by who knows: leases learned from heartbeats would be
        # thousands of events a second for what is one number, silence_s. (D-simulator-001, D-simulator-003)
        config = CoreConfig(
            daemon="simulator", state_dir="/", lease_s=inf, look_s=inf, snapshot_every=0, simulated=True
        )
        self.machine = Machine(config)
        self.steps = Steps(self.costs.longer)
        self.job = job = _endless(question)
        # A part of a step that no layout changes, and one that goes with the bytes of sums: without them
        # the simulator had 10 to 49 % more steps than a live run. The planner has the second where the job
        # says its link; what is measured here comes on top of that.
        # (D-simulator-011, D-planner-014)
        self.besides = Besides.of(job, question.profile, self.costs.commit_s, self.costs.sums_bytes_per_s)
        self.sums = Sums.of(job, question.profile, kept=self.costs.keeps != "nothing")
        self.training = Training(self, self.costs, question.profile, job, self.sums)
        self.nodes = SimulatedNodes(
            self,
            self.training,
            self.costs,
            question.devices_per_node,
            question.profile.device,
            question.limit_bytes,
            question.trace.zones,
        )
        self.tick_at = inf
        self._oracle: Oracle | None = None

    # ------------------------------------------------------------------ a run

    def run(self, progress: Progress | None = None) -> Outcome:
        """All of the trace. ``progress`` hears from time to time which share of it has passed. Raises
        SimulationError.
        """
        trace = self.question.trace
        for name in trace.nodes:
            self.nodes.join(name, start_s=0.0)
        self.clock.at(0.0, self._submit)
        for at_s, together in groupby(trace.events, key=lambda event: event.at_s):
            events = tuple(together)
            self.clock.at(at_s, lambda events=events: self._happens(events))  # type: ignore[misc]
        turns = 0
        while self._turn(trace.duration_s):
            turns += 1
            if progress is not None and turns % _TURNS == 0:
                progress(self.clock.now / trace.duration_s)
        self._check_began()
        self.clock.now = trace.duration_s
        self.account.close(trace.duration_s)
        return self._outcome()

    def _turn(self, end_s: float) -> bool:
        """The next thing that happens; False if that is the end."""
        due, boundary = min(self.clock.next_at, end_s), self.training.boundary
        if boundary <= due:
            self._commit(boundary)
            return True
        complete = self.training.whole_steps(due)
        if complete:
            self._commit(min(self.training.after_steps(complete), due))
            return True
        if self.clock.next_at > end_s:
            return False
        self.clock.step()
        return True

    def _commit(self, when: float) -> None:
        self.clock.pass_to(max(when, self.clock.now))
        self.training.commit_to(when)

    def _submit(self) -> None:
        self.feed(Asked(TICKET, Submit(self.job, who="simulator")))

    def _happens(self, events: tuple[traces.TraceEvent, ...]) -> None:
        """All that the trace has at this moment. Who dies together dies at once."""
        failed = [event.node for event in events if event.kind == "fail"]
        if failed:
            self.nodes.fail(failed)
        for event in events:
            if event.kind == "leave":
                self.nodes.leave(event.node, event.notice_s)
            elif event.kind == "join":
                self.nodes.join(event.node, start_s=self.costs.start_s)
        self.written.struck_at += [self.clock.now] * len(failed)

    def _check_began(self) -> None:
        job = self._record()
        if job is not None and job.state == "failed":
            raise SimulationError(f"{job.spec.name} under {self.question.policy}: {job.reason}")
        if self.written.plans == 0:
            raise SimulationError(
                f"{self.question.job.name} never began to train: "
                f"{self.written.waits[1] or 'its nodes were gone before'}",
                "simulate more nodes, or for longer",
            )

    # ------------------------------------------------------------------ the core

    def feed(self, event: Event) -> None:
        """Bring an event to the core, and do what it says."""
        self.written.events += 1
        for command in self.machine.handle(event, self.clock.now):
            self._perform(command)
        self._book()
        due = self.machine.next_deadline()
        if due is not None and due < self.tick_at:
            self.tick_at = max(due, self.clock.now + 1e-6)
            self.clock.at(self.tick_at, lambda at=self.tick_at: self._tick(at))  # type: ignore[misc]

    def hear(self, device: str, message: ToDecideBy) -> None:
        """Bring a device's message to the core."""
        self.feed(Heard(node_of(device), message))

    def _tick(self, due: float) -> None:
        if due == self.tick_at:
            self.tick_at = inf
            self.feed(Tick())

    def _perform(self, command: Command) -> None:
        match command:
            case Tell():
                self._tell(command.node, command.message)
            case Record():
                self._note(command.entry)
            case MakePlan():
                self._plan(command)
            case WriteManifest():
                done = ManifestWritten(command.directory)
                self.clock.after(self.costs.manifest_s, lambda: self.feed(done))
            case Announce() | Reply() | SetAside() | Discard() | LookAtRoom() | KeepState():
                pass
            case _:
                assert_never(command)

    def _plan(self, request: MakePlan) -> None:
        takes_s = self.costs.plan_s + self.costs.plan_node_s * len(self.nodes.alive)
        self.clock.after(takes_s, lambda: self._planned(request))

    def _planned(self, request: MakePlan) -> None:
        answer = self.planner.answer(request, precopy=self.costs.precopy)
        if answer.proposal is not None:
            found = answer.proposal
            decided = Decided(self.clock.now, found.reason, found.plan.step_s, found.way, found.actions)
            self.written.decisions.append(decided)
        self.feed(answer)

    def _tell(self, node: str, message: ToWorker) -> None:
        training = self.training
        match message:
            case PreCopy():
                training.precopy.prepare(message, training.machine.counters.step, training.step_s)
            case Deploy():
                job = self._record()
                assert job is not None
                assert job.setup is not None
                training.profile = job.setup.profile  # with what the devices of a stage do for each other
                training.deploy(message)
            case Resume():
                training.resume(message)
            case Report():
                training.report(message)
            case Decide():
                training.decide(message)
            case Flag():
                if training.machine.flags != message.flags:  # else the device before it has told
                    training.machine.flag(message.flags)
            case Measure() | Release() | PrepareData():
                self.clock.after(0.0, lambda: self._answer(node, message))
            case Welcome() | Ack() | Dismiss() | Identify() | StopPreparing():
                # That all are released shows in the record of it; a node that may leave stays until its time.
                pass
            case (
                Refused()
                | Inject()
                | EndStopped()
                | Wake()
                | TellLog()
                | ArtifactHere()
                | ArtifactKept()
                | ArtifactPart()
                | ArtifactTaken()
            ):
                raise AssertionError(f"nobody asked for it: {message}")
            case _:
                assert_never(message)

    def _answer(self, node: str, message: Measure | Release | PrepareData) -> None:
        """What is asked is how training goes: all of this is done at once. The dead say nothing."""
        match message:
            case Measure():
                self.hear(message.device, Measured(message.device, message.job, self.question.profile))
            case Release() if node in self.nodes.alive:
                self.hear(message.device, Emptied(message.device, message.order))
            case PrepareData() if node in self.nodes.alive:
                folders = ("/prepared",) * len(parts_of(message.spec))
                self.feed(Heard(node, PrepareDone(message.job, folders, message.order)))

    def _note(self, entry: msgspec.Struct) -> None:
        """What the core makes durable, as far as it counts here."""
        written = self.written
        match entry:
            case RolledBack():
                written.rollbacks += 1
                self.account.roll_back(self.clock.now, entry.counters.step)
                self.training.release()
            case Released():
                self.training.release()
            case CheckpointWritten():
                written.checkpoints += 1
                self.account.safe(entry.counters.step)
            case LayoutDeployed():
                written.plans += 1
            case IncidentOpened():
                written.losses += 1
            case _:
                pass

    # ------------------------------------------------------------------ what training asks

    def step_s(self) -> float:
        """Seconds of a step as training goes now."""
        job, training = self._record(), self.training
        assert job is not None
        assert job.plan is not None
        assert training.layout is not None
        machine = training.machine
        if machine.detours is None:
            step_s = self.steps.planned_s(job.plan)
        else:
            assert job.setup is not None
            step_s = self.steps.around_s(job.setup, job.plan, training.layout, machine.detours, machine.dead)
        step_s += self.besides.seconds(training.layout, machine.dead)
        return step_s + self.sums.longer_s(training.layout, machine.epoch, training.standing, step_s)

    def besides_s(self) -> float:
        """What of it follows the last pass, besides the update."""
        training = self.training
        assert training.layout is not None
        return self.besides.seconds(training.layout, training.machine.dead) + self.exchange_s()

    def exchange_s(self) -> float:
        """Of that what the planner has of the exchange of gradients."""
        job, training = self._record(), self.training
        assert job is not None
        assert job.setup is not None
        assert training.layout is not None
        return self.steps.exchange_s(job.setup, training.layout, training.machine.dead)

    def best_s(self) -> float:
        """Seconds of a step with the best plan for whoever is alive."""
        return self.oracle.step_s(len(self.nodes.alive))

    @property
    def watched(self) -> bool:
        """Whether the core is to hear of every step from every device: while an incident is open."""
        run = self.machine.core.run
        return run is None or run.incident is not None

    def look_s(self) -> float:
        """For how long the core need not hear of steps that nothing disturbs; 0 while an incident is open."""
        run = self.machine.core.run
        if run is None or self.watched:
            return 0.0
        look_s, job = max(LOOK_S, LOOK_NODE_S * len(self.nodes.alive)), run.job
        due = cadence(job)
        if due is None:
            return look_s
        before = job.checkpoint_counters.step if job.checkpoint else job.start.step
        steps = max(1, before + due.steps - self.training.machine.counters.step)
        return min(look_s, steps * self.training.step_s)

    def committed(self) -> None:
        """Steps were committed."""
        self._point()

    def counted(self) -> None:
        """Another number of nodes is alive."""
        alive = self.written.alive
        if alive and alive[-1][0] == self.clock.now:
            alive.pop()
        alive.append((self.clock.now, len(self.nodes.alive)))

    @property
    def oracle(self) -> Oracle:
        """It has the same job, and the templates of whole pipelines."""
        if self._oracle is None:
            job = self._record()
            assert job is not None
            assert job.setup is not None
            self._oracle = Oracle(job.setup, self.planner.templates("oobleck", job.setup))
        return self._oracle

    # ------------------------------------------------------------------ what is written down

    def _record(self) -> JobRecord | None:
        return next(iter(self.machine.core.state.jobs.values()), None)

    def _book(self) -> None:
        """Where nobody trains and nothing is being brought in, either a plan is awaited or there are too few
        nodes.
        """
        training, account, job = self.training, self.account, self._record()
        if not self.written.plans and job is not None and len(self.nodes.alive) >= self.written.waits[0]:
            self.written.waits = len(self.nodes.alive), job.reason
        if training.machine.phase != "held" or training.deployment is not None:
            return
        waits = job is None or job.state in {"queued", "waiting"}
        unheard = account.what in {"detect", "checkpoint"} and training.layout is not None
        if not unheard:
            account.spend(self.clock.now, "waiting" if waits else "plan")

    def _point(self) -> None:
        points, samples = self.written.points, self.training.machine.counters.step * self._batch
        points.append(Point(self.clock.now, samples, len(self.nodes.alive)))
        if len(points) > 2 * MAX_POINTS:
            del points[1::2]

    @property
    def _batch(self) -> int:
        return self.question.job.train.global_batch

    def _outcome(self) -> Outcome:
        question, account, written = self.question, self.account, self.written
        job = self._record()
        assert job is not None
        ideal, oracle = self._bounds()
        steps = job.counters.step
        return Outcome(
            policy=question.policy,
            costs=question.costs_name,
            trace=question.trace.name,
            seed=question.seed,
            duration_s=question.trace.duration_s,
            samples=steps * self._batch,
            steps=steps,
            ideal_samples=ideal,
            oracle_samples=oracle,
            live_device_s=account.total_ns / NS,
            useful_device_s=account.useful_ns / NS,
            lost_device_s=dict(account.lost_s),
            node_hours=account.total_ns / NS / 3600 / question.devices_per_node,
            losses=written.losses,
            plans=written.plans,
            rollbacks=written.rollbacks,
            steps_lost=job.steps_lost,
            checkpoints=written.checkpoints,
            events=written.events,
            points=tuple(written.points),
            struck_at_s=tuple(written.struck_at),
            decisions=tuple(written.decisions),
        )

    def _bounds(self) -> tuple[float, float]:
        """Samples that the live devices would commit in an ideal world, and with the oracle's plans."""
        max_nodes = self.question.trace.max_nodes
        whole_s = self.oracle.step_s(max_nodes)
        ends = [at for at, _ in self.written.alive[1:]] + [self.question.trace.duration_s]
        ideal = oracle = 0.0
        for (at, count), end in zip(self.written.alive, ends, strict=True):
            ideal += (end - at) * self._batch / whole_s * count / max_nodes
            oracle += (end - at) * self._batch / self.oracle.step_s(count)
        return ideal, oracle


def _endless(question: Question) -> Job:
    """The job under the policy that is asked about, with more steps than there is time for, all of the whole
    global batch, and without evaluations, whose rounds have no cost here.
    """
    spec = question.job
    tolerance = msgspec.structs.replace(spec.fault_tolerance, policy=question.policy)
    train = msgspec.structs.replace(spec.train, steps=ENDLESS, batch_ramp=msgspec.UNSET)
    return msgspec.structs.replace(spec, train=train, fault_tolerance=tolerance, eval=Eval())


def simulate(question: Question, planner: Planner | None = None, progress: Progress | None = None) -> Outcome:
    """The answer to ``question``. ``planner`` remembers what was planned for it and others. Raises
    SimulationError.
    """
    return World(question, planner).run(progress)
