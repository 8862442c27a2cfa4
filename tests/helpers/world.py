"""A simulated cluster on a virtual clock: the real machine and policy, virtual agents and devices.

Everything random comes from one seed and every event from one heap, so a failing run repeats exactly. The
world checks while it runs: the machine's invariants after every event, one outcome of every round on all
devices, no copy of stale state, no checkpoint with mixed contents.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oobleckd.core import invariants, view
from oobleckd.core.config import Config
from oobleckd.core.entries import AnyEntry
from oobleckd.core.events import (
    Announce,
    Asked,
    Command,
    Event,
    Heard,
    LinkLost,
    MakePlan,
    ManifestWritten,
    Planned,
    Record,
    Reply,
    Tell,
    Tick,
    WriteManifest,
)
from oobleckd.core.machine import Machine
from oobleckd.daemon.waiting import Waiting
from oobleckd.protocol.api import AnyRequest, Change, Response, Submit
from oobleckd.protocol.codec import decode_from_worker, decode_to_worker, encode
from oobleckd.protocol.job import Checkpoint, FaultTolerance, Job, PolicyName, Resources, Schedule, Train
from oobleckd.protocol.messages import (
    PROTOCOL,
    Ack,
    Beat,
    CheckpointPart,
    DeviceLost,
    Goodbye,
    Held,
    Hello,
    LinkDown,
    Progress,
    Ready,
    StepDone,
    ToWorker,
    Welcome,
)
from oobleckd.protocol.parts import Counters
from planner import policies
from planner.plan import Layout, Template, device_name
from planner.policy import PlanError
from planner.profile import LayerCost, Profile
from tests.helpers.simdevice import SimDevice
from tests.helpers.simpasses import loss_of
from tests.helpers.simstore import State, trail_of

_entries = msgspec.msgpack.Decoder(AnyEntry)
_prepared: dict[bytes, tuple[Template, ...]] = {}


def profile(num_layers: int, state_bytes: int = 100) -> Profile:
    """Equal layers; the first and the last share a tied weight."""
    layer = LayerCost("layer", 0.001, 0.002, state_bytes // 4, state_bytes, 1, 1)
    buckets = (*((n,) for n in range(num_layers)), (0, num_layers - 1))
    return Profile("sim", "cpu", (layer,) * num_layers, buckets=buckets)


def make_job(
    name: str = "job",
    *,
    steps: int = 20,
    f: int = 1,
    every: int = 0,
    memory: int = 0,
    max_nodes: int = 0,
    min_pipeline_nodes: int = 1,
    policy: PolicyName = "oobleck",
    schedule: Schedule | None = None,
) -> Job:
    return Job(
        name=name,
        train=Train(steps=steps, global_batch=8, micro_batch=1, sequence=8),
        fault_tolerance=FaultTolerance(f=f, policy=policy),
        resources=Resources(device_memory=memory, max_nodes=max_nodes, min_pipeline_nodes=min_pipeline_nodes),
        checkpoint=Checkpoint(every=every),
        schedule=schedule or Schedule(),
    )


@dataclass
class SimNode:
    """An agent and its devices. A new life is a new object."""

    world: World
    name: str
    life: int
    devices: dict[str, SimDevice] = field(default_factory=dict)
    alive: bool = True
    connected: bool = False
    ready: bool = True
    link: int = 0
    kept: list[StepDone | CheckpointPart] = field(default_factory=list)
    last: dict[str, Ready | Held | Progress] = field(default_factory=dict)
    lives: tuple[str, ...] = ()  # those of the last Welcome: what comes for others is dropped
    zone: str = ""

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.life}"

    def start(self, num_devices: int) -> None:
        for index in range(num_devices):
            name = device_name(self.name, index)
            self.devices[name] = SimDevice(self.world, self, name)
        self.world.after(self.world.random.uniform(0, 0.01), self.connect)
        self.beat()

    def connect(self) -> None:
        if not self.alive or self.world.machine is None:
            return
        self.connected, self.lives = True, ()
        self.link += 1
        self.world.links[self.name] = (self, self.link)
        self.hello()
        for message in [*self.kept, *self.last.values()]:
            self.to_daemon(message)

    def hello(self) -> None:
        infos = tuple(device.known for device in self.devices.values() if device.alive)
        ready = self.ready and len(infos) == len(self.devices)
        self.to_daemon(Hello(PROTOCOL, self.name, self.incarnation, "host", ready, infos, zone=self.zone))

    def beat(self) -> None:
        if self.alive:
            self.to_daemon(Beat(self.incarnation))
            self.world.after(self.world.config.beat_s + self.world.lateness_s(), self.beat)

    def from_device(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, StepDone | CheckpointPart):
            self.kept.append(message)
        elif isinstance(message, Ready | Held | Progress):
            self.last[message.device] = message
        self.to_daemon(message)

    def to_daemon(self, message: Any) -> None:
        if self.connected:
            self.world.send_daemon(self, message)

    def from_daemon(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, Ack):
            self.kept = [kept for kept in self.kept if not _covered(kept, message)]
        elif isinstance(message, Welcome):
            self.lives = message.lives
        else:
            device = self.devices.get(message.device)
            if device is not None and device.alive and device.life in self.lives:
                device.control(message)

    def disconnect(self) -> None:
        """The link to the daemon breaks; the agent comes back after a while."""
        if self.connected:
            self.connected = False
            self.world.links.pop(self.name, None)
            self.world.after(self.world.random.uniform(0.05, 0.3), self.connect)


def _covered(kept: StepDone | CheckpointPart, ack: Ack) -> bool:
    return kept.job == ack.job and kept.counters.round <= ack.round


class World:
    """The cluster. ``seed`` decides everything that is left open."""

    def __init__(
        self,
        seed: int = 0,
        num_nodes: int = 4,
        *,
        num_layers: int = 6,
        num_devices: int = 1,
        overflows: tuple[int, ...] = (),
        nans: tuple[int, ...] = (),
        clips: tuple[int, ...] = (),
        codec: bool = False,
        zones: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.now, self.codec = seed, 0.0, codec
        self.zones = zones or {}
        self.num_layers, self.num_devices, self.num_micro_batches = num_layers, num_devices, 8
        self.profile = profile(num_layers)
        self.buckets = self.profile.buckets
        self.layer_s, self.overflows, self.nans, self.clips = 0.002, overflows, nans, clips
        self.clip_norm = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.config = Config(daemon="d0", state_dir="state", allow_injection=True, **config)
        self.journal: list[bytes] = []
        self.machine: Machine | None = Machine(self.config)
        self.daemon_life = 0
        self.tick_at: float | None = None
        self.nodes: dict[str, SimNode] = {}
        self.links: dict[str, tuple[SimNode, int]] = {}
        self.lives = itertools.count(1)
        self.fifo: dict[tuple[int, int], float] = {}
        self.last_copy_lost = False
        self.replies: list[Response] = []
        self.changes: list[Change] = []
        self.last_seq = 0
        self.partial: dict[str, dict[int, State]] = {}
        self.complete: dict[str, dict[int, State]] = {}
        self.outcomes: dict[tuple[str, int], tuple[Counters, str, tuple[int, int]]] = {}
        self.early = self.taken_back = 0  # updates before all votes were in, and those in vain
        self.fired: list[tuple[str, str]] = []
        self.strikes: Callable[[SimDevice, str, int], bool] = lambda _device, _point, _round: False
        self.on_strike: Callable[[str, int], None] = lambda name, _index: self.kill(name)
        self.history = 0
        self.plan_s = (0.002, 0.03)
        self.sync_s: tuple[float, float] | None = (
            None  # of the daemon's disk; what it has not synced dies with it
        )
        self.waiting = Waiting()
        self.told_ahead: list[ToWorker] = []
        self.syncing: list[Sequence[Command]] | None = None
        self.lateness_s: Callable[[], float] = lambda: 0.0  # of a beat: agents that get no processor
        self.after(0.0, self._feed, 0, Tick())
        for number in range(1, num_nodes + 1):
            self.add(f"n{number:02d}")

    # ------------------------------------------------------------------ time

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (self.now + seconds, next(self.order), act, args))

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        self.after(max(0.0, when - self.now), act, *args)

    def step(self) -> None:
        when, _, act, args = heapq.heappop(self.heap)
        assert when >= self.now
        self.now = when
        act(*args)

    def run(self, until: Callable[[], bool] | None = None, *, limit_s: float = 60.0) -> None:
        """Until ``until`` says so; fails if that takes more than ``limit_s`` virtual seconds."""
        end = self.now + limit_s
        while until is None or not until():
            if self.now > end or not self.heap:
                if until is None:
                    return
                raise AssertionError(f"stuck at {self.now:.3f}: {self.describe()}")
            self.step()

    def run_for(self, seconds: float) -> None:
        self.run(limit_s=seconds)

    # ------------------------------------------------------------------ nodes

    def add(self, name: str) -> None:
        """A node starts, or starts again."""
        node = self.nodes[name] = SimNode(self, name, next(self.lives), zone=self.zones.get(name, ""))
        node.start(self.num_devices)

    def device(self, name: str) -> SimDevice | None:
        node = self.nodes.get(name.rpartition("/")[0])
        return node.devices.get(name) if node and node.alive else None

    def live(self) -> list[str]:
        return [name for name, node in sorted(self.nodes.items()) if node.alive and node.ready]

    def kill(self, name: str, *, silent: bool = False) -> None:
        """SIGKILL of agent and devices; ``silent``: the host is gone, so that nobody's link closes."""
        node = self.nodes[name]
        was_connected = node.connected
        node.alive = node.connected = False
        for device in node.devices.values():
            device.alive = False
        self._note_lost_copies()
        if silent:
            return
        if was_connected:
            self.after(self.random.uniform(0.001, 0.03), self._closed, node, node.link)
        for lost in node.devices:
            self._break_links_to(lost)

    def _break_links_to(self, lost: str) -> None:
        """The peers of a dead device see its sockets close."""
        for peer in self.nodes.values():
            for device in peer.devices.values():
                if device.alive and {lost, device.name} <= device.layout.holdings.keys():
                    self.after(self.random.uniform(0.001, 0.1), self._link_down, device, lost, device.layout)

    @staticmethod
    def _link_down(device: SimDevice, lost: str, layout: Layout) -> None:
        if device.layout is layout and lost not in device.dead:  # else the link was closed before it broke
            device.tell(LinkDown(device.name, lost, "closed"))

    def kill_device(self, name: str, restart_s: float = 0.5, *, index: int = 0) -> None:
        """SIGKILL of a device process without a spare: its agent starts the node's devices anew."""
        node = self.nodes[name]
        if not node.alive or not node.ready:
            return
        old, victim = node.incarnation, device_name(name, index)
        for device in node.devices.values():
            device.alive = False
        self._note_lost_copies()
        node.ready, node.last = False, {}
        node.to_daemon(DeviceLost(old, victim, "signal 9"))
        node.life = next(self.lives)
        node.hello()
        self.after(restart_s, self._devices_up, node, node.life)

    def _devices_up(self, node: SimNode, life: int) -> None:
        if node.alive and node.life == life:
            node.ready = True
            node.devices = {name: SimDevice(self, node, name) for name in node.devices}
            node.hello()

    def spare_takes_place(self, name: str, index: int = 0, up_s: float = 0.05, *, heard: bool = True) -> None:
        """SIGKILL of a device process whose place the node's spare takes; ``heard``: the agent's link is up."""
        node, victim = self.nodes[name], device_name(name, index)
        if not (node.alive and node.ready and node.devices[victim].alive):
            return
        node.devices[victim].alive = False
        self._note_lost_copies()
        self._break_links_to(victim)
        node.last.pop(victim, None)
        if heard:
            node.to_daemon(DeviceLost(node.incarnation, victim, "signal 9", spare=True))
        self.after(up_s, self._spare_up, node, node.life, victim)

    def _spare_up(self, node: SimNode, life: int, name: str) -> None:
        if node.alive and node.life == life:
            node.devices[name] = SimDevice(self, node, name)
            node.hello()

    def struck(self, device: SimDevice, point: str) -> None:
        """``device`` has reached a fault point at which it was to die."""
        self.fired.append((device.name, point))
        self.on_strike(device.node.name, int(device.name.rpartition("/")[2]))

    def leave(self, name: str) -> None:
        """SIGTERM: an orderly goodbye."""
        node = self.nodes[name]
        node.to_daemon(Goodbye(node.incarnation, "SIGTERM"))
        node.alive = node.connected = False
        for device in node.devices.values():
            device.alive = False

    def _note_lost_copies(self) -> None:
        """Only where this finds a layer without a copy may the job go back."""
        held = {
            layer
            for node in self.nodes.values()
            for d in node.devices.values()
            if d.alive
            for layer in d.held_layers
        }
        self.last_copy_lost |= held != set(range(self.num_layers))

    # ------------------------------------------------------------------ messages

    def send(self, source: SimDevice, target: SimDevice, *letter: Any) -> None:
        """Between devices: in order per pair; lost with either life, unless it was on its way already."""
        when = self.now + self.random.uniform(0.0002, 0.003)
        pair = (id(source), id(target))
        when = self.fifo[pair] = max(when, self.fifo.get(pair, 0.0))
        self.at(when, self._arrive, target, letter)

    @staticmethod
    def _arrive(target: SimDevice, letter: tuple[Any, ...]) -> None:
        if target.alive:
            target.letter(*letter)

    def send_daemon(self, node: SimNode, message: Any) -> None:
        when = self.now + self.random.uniform(0.0001, 0.002)
        pair = (id(node), -1)
        when = self.fifo[pair] = max(when, self.fifo.get(pair, 0.0))
        if self.codec:
            message = decode_from_worker(encode(message))
        self.at(when, self._at_daemon, self.daemon_life, node, node.link, message)

    def _at_daemon(self, life: int, node: SimNode, link: int, message: Any) -> None:
        # What a dead agent had sent still arrives; what was sent over a link that broke does not.
        if link == node.link and (node.connected or not node.alive):
            self._feed(life, Heard(node.name, message))

    def _closed(self, node: SimNode, link: int) -> None:
        if self.links.get(node.name) == (node, link):
            del self.links[node.name]
            self._feed(self.daemon_life, LinkLost(node.name))

    def break_link(self, name: str) -> None:
        """The connection of a live agent breaks for a moment."""
        node = self.nodes[name]
        if node.alive and node.connected:
            node.disconnect()
            self._feed(self.daemon_life, LinkLost(name))

    # ------------------------------------------------------------------ the daemon

    def _feed(self, life: int, event: Event) -> None:
        if self.machine is None or life != self.daemon_life:
            return
        commands = self.machine.handle(event, self.now)
        invariants.check(self.machine.core)
        for command in self.waiting.put(commands):
            self.told_ahead += [command.message] if isinstance(command, Tell) else []
            self._perform(command)
        if self.syncing is None:
            self._sync()
        self._schedule_tick()

    def _sync(self) -> None:
        """The disk takes what waits, at once or after a while."""
        first, *batch = self.waiting.take()
        for command in first:
            self._perform(command)
        self.syncing = batch
        if self.sync_s is None or not any(batch):
            self._synced(batch)
        else:
            self.after(self.random.uniform(*self.sync_s), self._synced, batch)

    def _synced(self, batch: list[Sequence[Command]]) -> None:
        if self.syncing is not batch:
            return  # of a daemon that is dead, or waited for already
        for command in itertools.chain(*batch):
            self._perform(command)
        self.waiting.done()
        self.syncing = None
        if self.waiting:
            self._sync()

    def _schedule_tick(self) -> None:
        assert self.machine is not None
        due = self.machine.next_deadline()
        if due is not None and (self.tick_at is None or due < self.tick_at):
            self.tick_at = max(due, self.now + 1e-6)
            self.at(self.tick_at, self._tick, self.daemon_life, self.tick_at)

    def _tick(self, life: int, due: float) -> None:
        if self.tick_at == due:
            self.tick_at = None
        self._feed(life, Tick())

    def _perform(self, command: Command) -> None:
        match command:
            case Record():
                self.journal.append(msgspec.msgpack.encode(command.entry))
            case Tell():
                self._tell(command)
            case Reply():
                self.replies.append(command.response)
            case Announce():
                assert command.change.seq == self.last_seq + 1
                self.last_seq = command.change.seq
                self.changes.append(command.change)
            case MakePlan():
                self.after(self.random.uniform(*self.plan_s), self._plan, self.daemon_life, command)
            case WriteManifest():
                states = self.partial[command.directory]
                mixed = {state[::2] for state in states.values()}
                assert len(mixed) == 1, f"a checkpoint of mixed states: {mixed}"
                assert len(command.manifest["buckets"]) == len(self.buckets)
                self.complete[command.directory.removesuffix(".partial")] = dict(states)
                self.after(
                    self.random.uniform(*self.plan_s), self._manifest_written, self.daemon_life, command
                )

    def _tell(self, command: Tell) -> None:
        node, link = self.links.get(command.node, (None, 0))
        if node is None:
            return
        message = decode_to_worker(encode(command.message)) if self.codec else command.message
        when = self.now + self.random.uniform(0.0001, 0.002)
        pair = (-1, id(node))
        when = self.fifo[pair] = max(when, self.fifo.get(pair, 0.0))
        self.at(when, self._at_agent, node, link, message)

    @staticmethod
    def _at_agent(node: SimNode, link: int, message: Any) -> None:
        if node.link == link and node.connected:
            node.from_daemon(message)

    def _manifest_written(self, life: int, command: WriteManifest) -> None:
        self._feed(life, ManifestWritten(command.directory))

    def _plan(self, life: int, command: MakePlan) -> None:
        try:
            if command.situation is None:
                found = Planned(command.ticket, self._templates(command))
            else:
                proposal = policies.adapt(
                    command.policy, command.setup, self._templates(command), command.situation
                )
                found = Planned(command.ticket, proposal=proposal)
        except PlanError as error:
            found = Planned(command.ticket, error=error.problem, hint=error.hint)
        self._feed(life, found)

    def _templates(self, command: MakePlan) -> tuple[Template, ...]:
        """Templates are made once for a set-up, as the process pool does, and here for all worlds."""
        key = msgspec.json.encode((command.policy, command.setup))
        if key not in _prepared:
            _prepared[key] = policies.prepare(command.policy, command.setup)
        return _prepared[key]

    def stop_daemon(self) -> None:
        """kill -9: nothing is said; the journal is what is left, with or without what it was about to sync."""
        if self.syncing is not None and self.random.random() < 0.5:
            for record in self.syncing[0]:
                self._perform(record)
        self.machine, self.waiting, self.syncing = None, Waiting(), None
        self.daemon_life += 1
        self.tick_at = None
        for node in self.nodes.values():
            node.connected = False
        self.links = {}

    def start_daemon(self) -> None:
        entries = [_entries.decode(entry) for entry in self.journal]
        self.config = msgspec.structs.replace(self.config, daemon=f"d{self.daemon_life}")
        self.machine = Machine.restore(entries, self.now, self.config)
        invariants.check(self.machine.core)
        history = self.machine.core.state.history
        self.changes += [
            change for change in history if change.seq > self.last_seq
        ]  # on disk, but not announced
        self.last_seq = self.machine.core.state.seq
        self._schedule_tick()
        for node in self.nodes.values():
            if node.alive:
                self.after(self.random.uniform(0.001, 0.5), node.connect)

    def restart_daemon(self, down_s: float = 0.3) -> None:
        if self.machine is not None:
            self.stop_daemon()
            self.after(down_s, self.start_daemon)

    # ------------------------------------------------------------------ users

    def ask(self, request: AnyRequest) -> Response:
        """Ask and get the answer (the daemon must be up)."""
        before = len(self.replies)
        self._feed(self.daemon_life, Asked(1, request))
        while self.syncing is not None:
            self._synced(self.syncing)
        assert len(self.replies) == before + 1
        return self.replies[-1]

    def submit(self, job: Job | None = None, **spec: Any) -> str:
        job = job or make_job(**spec)
        self.clip_norm = job.optimizer.clip_norm
        response = self.ask(Submit(job, who="tester"))
        return getattr(response, "id", "")

    # ------------------------------------------------------------------ training state outside the devices

    def write(self, directory: str, bucket: int, state: State) -> None:
        self.partial.setdefault(directory, {})[bucket] = state

    def begin_history(self, epoch: int) -> None:
        """State comes from outside the devices: a history begins, whose rounds only it must agree on."""
        self.outcomes = self.outcomes if epoch == self.history else {}
        self.history = epoch

    def committed(
        self, device: SimDevice, counters: Counters, outcome: str, weights: tuple[int, int]
    ) -> None:
        """Every device commits a round with the same outcome, counters and weights after it."""
        here = (counters, outcome, weights)
        seen = self.outcomes.setdefault((device.job, counters.round), here)
        assert seen == here, f"{device.name}: {here}, others {seen}"

    def norm(self, bucket: int, step: int) -> float:
        """The squared norm of a bucket's gradient: in a step of ``clips`` that of one bucket must be clipped."""
        return 1e6 if step in self.clips and self._odd_one(step, bucket) else 1e-4 * (1 + bucket)

    def is_nan(self, step: int, bucket: int, micro_batch: int) -> bool:
        """In a step of ``nans`` one micro-batch has a NaN, in one bucket: only its holders see it."""
        return step in self.nans and self._odd_one(step, bucket, micro_batch)

    def overflows_at(self, step: int, bucket: int, micro_batch: int, squeezes: int) -> bool:
        """The same in a step of ``overflows``, until its scale was squeezed once more than by the steps before."""
        if step not in self.overflows or not self._odd_one(step, bucket, micro_batch):
            return False
        return squeezes <= sum(self._odd_one(before, bucket) for before in self.overflows if before < step)

    def _odd_one(self, step: int, bucket: int, micro_batch: int | None = None) -> bool:
        here = bucket == step % len(self.buckets)
        return here and micro_batch in {None, step % self.num_micro_batches}

    # ------------------------------------------------------------------ looking

    def job(self, job_id: str = "job-1"):
        assert self.machine is not None
        return self.machine.core.state.jobs[job_id]

    def view(self, job_id: str = "job-1"):
        assert self.machine is not None
        return view.job_view(self.machine.core, self.job(job_id))

    def node(self, name: str):
        assert self.machine is not None
        return next(node for node in view.node_views(self.machine.core) if node.name == name)

    def incidents(self):
        assert self.machine is not None
        return view.incident_views(self.machine.core)

    def state(self, job_id: str = "job-1") -> str:
        return "daemon down" if self.machine is None else self.job(job_id).state

    def until_state(self, *states: str, job_id: str = "job-1", limit_s: float = 60.0) -> None:
        self.run(lambda: self.state(job_id) in states, limit_s=limit_s)

    def until_step(self, step: int, job_id: str = "job-1", limit_s: float = 60.0) -> None:
        self.run(lambda: self.machine is not None and self.job(job_id).counters.step >= step, limit_s=limit_s)

    def check_done(self, job_id: str = "job-1") -> None:
        """The job is done, every step is recorded once, with the loss of a run without failures."""
        job = self.job(job_id)
        assert job.state == "done", (job.state, job.reason)
        assert [step.step for step in job.steps] == list(range(job.spec.train.steps))
        assert self.last_copy_lost or job.steps_lost == 0
        assert not any(incident.open for incident in self.incidents())
        for step in job.steps:
            losses = [loss_of(step.step, mb) for mb in range(self.num_micro_batches)]
            assert step.loss == sum(losses) / len(losses)
        wanted = (job.spec.train.steps - len(self.nans), trail_of(job.spec.train.steps, self))
        assert {state[::2] for state in self.complete[job.checkpoint].values()} == {wanted}

    def describe(self) -> str:
        """Where everything stands, for a failing test."""
        if self.machine is None or self.machine.core.run is None:
            return f"seed {self.seed}: no run"
        run = self.machine.core.run
        lines = [
            f"seed {self.seed}: {run.job.state} ({run.job.reason}) phase {run.phase} epoch {run.job.epoch}"
        ]
        lines += [
            f"dead {run.job.dead} held {sorted(run.held)} answers {sorted(run.answers)} asked {run.asked}"
        ]
        for node in self.nodes.values():
            for device in node.devices.values():
                lines.append(
                    f"{device.name} alive={device.alive} conn={node.connected} job={device.job!r} "
                    f"layout={device.layout.epoch} epoch={device.commit.epoch}/{device.commit.answered} "
                    f"{device.counters} holding={device.holding} deployment={device.deployment is not None} "
                    f"{device.at()}"
                )
        lines += [change.text for change in list(self.changes)[-12:]]
        return "\n".join(lines)
