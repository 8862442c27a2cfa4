"""A simulated cluster on a virtual clock: the real machine and policy, virtual agents and devices.

Everything random comes from one seed and every event from one heap, so a failing run repeats exactly. Owns
time, the nodes and their ends, and what is asked and looked at; its parts are ``simdaemon``, ``simdisk``,
``simnet``, ``simagent``, ``simdevice`` and ``simchecks``.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from oobleckd.core import view
from oobleckd.core.config import CoreConfig
from oobleckd.core.events import Asked, Tick
from oobleckd.core.machine import Machine
from oobleckd.planner.plan import Layout, device_name, node_of
from oobleckd.protocol.agentmessages import (
    DeviceAwake,
    DeviceLost,
    DeviceStopped,
    EndStopped,
    Goodbye,
    Wake,
)
from oobleckd.protocol.batchramp import sizes_of
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import LinkDown
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.requests import AnyRequest, Response, Submit
from tests.helpers.simagent import SimNode, Sleeper
from tests.helpers.simchecks import Checks
from tests.helpers.simdaemon import Daemon
from tests.helpers.simdevice import SimDevice
from tests.helpers.simjobs import make_job, profile
from tests.helpers.simnet import Network
from tests.helpers.simprepare import SimFolders
from tests.helpers.simstore import State
from tests.helpers.simtext import Texts

Told = TypeVar("Told")


SNAPSHOT_EVERY = 64
"""So few entries that nearly every restart begins with a snapshot."""


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
        spikes: tuple[int, ...] = (),
        clips: tuple[int, ...] = (),
        codec: bool = False,
        zones: dict[str, str] | None = None,
        rounds_apart: dict[str, str] | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        **config: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.now = seed, 0.0
        self.zones = zones or {}
        self.num_layers, self.num_devices, self.num_micro_batches = num_layers, num_devices, 8
        self.sizes = sizes_of(self.num_micro_batches, 1)  # of the steps of its jobs
        self.profile = profile(num_layers)
        self.buckets = self.profile.buckets
        self.layer_s, self.overflows, self.nans, self.clips = 0.002, overflows, nans, clips
        self.passed_over = (*nans, *spikes)  # steps that make no update
        self.clip_norm = 0.0
        self.num_slices = 1 + seed % 3  # of every bucket
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.nodes: dict[str, SimNode] = {}
        self.numbers = itertools.count(1)
        self.partial: dict[str, dict[int, State]] = {}
        self.complete: dict[str, dict[int, State]] = {}
        self.damaged: dict[str, int] = {}  # checkpoint -> the bucket whose file is not what was written
        self.disk_full = False  # of the checkpoints
        self.held = False  # stopped processes, by what SIGCONT does not end
        self.texts = Texts(self)
        self.folders = SimFolders(self)
        self.early = self.taken_back = 0  # updates before all votes were in, and those in vain
        self.folder_notes: tuple[FolderNote, ...] = ()
        self.fired: list[tuple[str, str]] = []
        # Device whose arithmetic comes to other norms -> what it says of that.
        self.rounds_apart = rounds_apart or {}
        self.canaries: dict[str, str] = {}  # device -> what it says of the next job that it begins
        self.says_apart: dict[str, str] = {}  # device whose arithmetic is the same -> what it says of that
        self.strikes: Callable[[SimDevice, str, int], bool] = lambda _device, _point, _round: False
        self.on_strike: Callable[[str, int], None] = lambda name, _index: self.kill(name)
        self.lateness_s: Callable[[], float] = lambda: 0.0  # of a heartbeat: agents that get no processor
        config |= {"allow_injection": True, "snapshot_every": snapshot_every}
        self.daemon = Daemon(self, CoreConfig(daemon="d0", state_dir="state", **config))
        self.network = Network(self, codec=codec)
        self.checks = Checks(self)
        self.after(0.0, self.daemon.feed, 0, Tick())
        for number in range(1, num_nodes + 1):
            self.add(f"n{number:02d}")

    @property
    def config(self) -> CoreConfig:
        return self.daemon.config

    # ------------------------------------------------------------------ time

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, act, *args)

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """What is due at the same time happens in the order in which it was asked for."""
        heapq.heappush(self.heap, (max(when, self.now), next(self.order), act, args))

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
        node = self.nodes[name] = SimNode(self, name, next(self.numbers), zone=self.zones.get(name, ""))
        node.start(self.num_devices)

    def device(self, name: str) -> SimDevice | None:
        node = self.nodes.get(name.rpartition("/")[0])
        return node.devices.get(name) if node and node.alive else None

    def devices(self) -> Iterator[SimDevice]:
        """All that live."""
        return (device for node in self.nodes.values() for device in node.devices.values() if device.alive)

    def live(self) -> list[str]:
        return [name for name, node in sorted(self.nodes.items()) if node.alive and node.ready]

    def kill(self, name: str, *, silent: bool = False) -> None:
        """SIGKILL of agent and devices; ``silent``: the host is gone, so that nobody's link closes."""
        node = self.nodes[name]
        node.alive = node.connected = False
        for device in node.devices.values():
            device.alive = False
        self.checks.note_lost_copies()
        if silent:
            return
        self.network.close(node)
        for lost in node.devices:
            self._break_links_to(lost)

    def _break_links_to(self, lost: str) -> None:
        """The peers of a dead device see its sockets close."""
        for device in self.devices():
            if {lost, device.name} <= device.layout.holdings.keys():
                closed_s = self.network.until_closed_s(node_of(lost), device.node.name)
                device.after(closed_s, self._link_down, device, lost, device.layout)

    @staticmethod
    def _link_down(device: SimDevice, lost: str, layout: Layout) -> None:
        if device.layout is layout and lost not in device.dead:  # else the link was closed before it broke
            device.tell(LinkDown(device.name, lost, "closed"))

    def kill_device(
        self, name: str, restart_s: float = 0.5, *, index: int = 0, death: Death | None = None
    ) -> None:
        """SIGKILL of a device process without a spare (or it dies of ``death``): its agent starts the node's
        devices anew.
        """
        node, victim = self.nodes[name], device_name(name, index)
        if not node.alive or not node.ready:
            return
        for device in node.devices.values():
            device.alive = False
        self.checks.note_lost_copies()
        for lost in node.devices:
            self._break_links_to(lost)
        node.ready = False
        node.agent.call(self._renew, node, victim, restart_s, death)

    def _renew(self, node: SimNode, victim: str, restart_s: float, death: Death | None) -> None:
        node.to_daemon(DeviceLost(node.incarnation, victim, str(death or "signal 9"), death=death))
        node.number = next(self.numbers)
        for name in node.devices:
            node.outbox.forget(name)
        node.hello()
        self.after(restart_s, node.agent.call, self._devices_up, node, node.number)

    def _devices_up(self, node: SimNode, number: int) -> None:
        if node.alive and node.number == number:
            node.ready = True
            node.devices = {name: SimDevice(self, node, name) for name in node.devices}
            node.hello()

    def stop_device(self, name: str) -> None:
        """SIGSTOP of the device processes of a node: its agent sees it after a second, and says so until they
        go on.
        """
        node = self.nodes[name]
        node.host.stop()
        for device in list(node.devices.values()):
            self.after(1.0, node.agent.call, self._say_stopped, node, device, self.now)

    def _say_stopped(self, node: SimNode, device: SimDevice, since: float) -> None:
        if not (node.alive and device.alive):
            return
        if node.host.asleep:
            stopped_s = self.now - since
            node.to_daemon(
                DeviceStopped(node.incarnation, device.name, device.incarnation, "stopped", stopped_s)
            )
            self.after(1.0, node.agent.call, self._say_stopped, node, device, since)
        else:
            node.to_daemon(DeviceAwake(node.incarnation, device.name, device.incarnation, self.now - since))

    def wake_device(self, node: SimNode, message: Wake) -> None:
        """Its agent sends SIGCONT, which takes where nothing holds the process."""
        device = node.devices.get(message.device)
        if device is not None and device.incarnation == message.incarnation and not self.held:
            node.host.go_on()

    def end_device(self, node: SimNode, message: EndStopped) -> None:
        """Its agent ends it, without a spare."""
        device = node.devices.get(message.device)
        if (
            device is not None
            and device.alive
            and device.incarnation == message.incarnation
            and node.host.asleep
        ):
            node.host = Sleeper()
            self.kill_device(node.name, index=int(device.name.rpartition("/")[2]))

    def spare_takes_place(
        self, name: str, index: int = 0, up_s: float = 0.05, *, heard: bool = True, death: Death | None = None
    ) -> None:
        """SIGKILL of a device process (or it dies of ``death``) whose place the node's spare takes;
        ``heard``: the agent's link is up.
        """
        node, victim = self.nodes[name], device_name(name, index)
        if not (node.alive and node.ready and node.devices[victim].alive):
            return
        node.devices[victim].alive = False
        self.checks.note_lost_copies()
        self._break_links_to(victim)
        node.agent.call(self._replace, node, victim, up_s, heard, death)

    def _replace(self, node: SimNode, victim: str, up_s: float, heard: bool, death: Death | None) -> None:
        if heard:
            node.to_daemon(DeviceLost(node.incarnation, victim, str(death or "signal 9"), True, death))
        node.outbox.forget(victim)
        self.after(up_s, node.agent.call, self._spare_up, node, node.number, victim)

    def _spare_up(self, node: SimNode, number: int, name: str) -> None:
        if node.alive and node.number == number and not node.devices[name].alive:
            node.devices[name] = SimDevice(self, node, name)
            node.hello()

    def struck(self, device: SimDevice, point: str) -> None:
        """``device`` has reached a fault point at which it was to die."""
        self.fired.append((device.name, point))
        self.on_strike(device.node.name, int(device.name.rpartition("/")[2]))

    def leave(self, name: str, reason: str = "SIGTERM") -> None:
        """An orderly goodbye, now."""
        node = self.nodes[name]
        node.to_daemon(Goodbye(node.incarnation, reason))
        node.alive = node.connected = False
        for device in node.devices.values():
            device.alive = False
        self.checks.note_lost_copies()
        self.network.close(node)

    # ------------------------------------------------------------------ users

    def ask(self, request: AnyRequest) -> Response:
        """Ask and get the answer (the daemon must be up)."""
        replies = self.daemon.replies
        before = len(replies)
        self.daemon.feed(self.daemon.incarnation, Asked(1, request))
        self.daemon.disk.flush()
        assert len(replies) == before + 1
        return replies[-1]

    def submit(self, job: Job | None = None, **spec: Any) -> str:
        job = job or make_job(**spec)
        self.clip_norm, self.sizes = job.optimizer.clip_norm, job.batch_sizes
        response = self.ask(Submit(job, who="tester"))
        return getattr(response, "id", "")

    # ------------------------------------------------------------------ training state outside the devices

    def write(self, directory: str, bucket: int, state: State) -> None:
        self.partial.setdefault(directory, {})[bucket] = state

    def discard(self, directory: str) -> None:
        """The daemon gives back the room of what nobody will complete."""
        for partial in [
            name for name in self.partial if name == directory or name.startswith(f"{directory}/")
        ]:
            del self.partial[partial]

    def norm(self, bucket: int, step: int) -> float:
        """The squared norm of a bucket's gradient: in a step of ``clips`` that of one bucket must
        be clipped.
        """
        return 1e6 if step in self.clips and self._odd_one(step, bucket) else 1e-4 * (1 + bucket)

    def is_nan(self, step: int, bucket: int, micro_batch: int) -> bool:
        """In a step of ``nans`` one micro-batch has a NaN, in one bucket: only its holders see it."""
        return step in self.nans and self._odd_one(step, bucket, micro_batch)

    def overflows_at(self, step: int, bucket: int, micro_batch: int, squeezes: int) -> bool:
        """The same in a step of ``overflows``, until its scale was squeezed once more than by the steps
        before.
        """
        if step not in self.overflows or not self._odd_one(step, bucket, micro_batch):
            return False
        return squeezes <= sum(self._odd_one(before, bucket) for before in self.overflows if before < step)

    def _odd_one(self, step: int, bucket: int, micro_batch: int | None = None) -> bool:
        here = bucket == step % len(self.buckets)
        return here and micro_batch in {None, step % self.sizes.micro_batches(step)}

    # ------------------------------------------------------------------ looking

    @property
    def machine(self) -> Machine | None:
        """The daemon's; None while it is down."""
        return self.daemon.machine

    def job(self, job_id: str = "job-1"):
        assert self.machine is not None
        return self.machine.core.state.jobs[job_id]

    def view(self, job_id: str = "job-1"):
        assert self.machine is not None
        return view.job_view(self.machine.core, self.job(job_id))

    def node(self, name: str):
        assert self.machine is not None
        return next(node for node in view.node_views(self.machine.core) if node.name == name)

    def told(self, kind: type[Told]) -> list[Told]:
        """What people and programs were told of this ``kind``, in fields."""
        return [change.data for change in self.daemon.changes if isinstance(change.data, kind)]

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
        """Every step is recorded once, and nothing differs from a run without failures."""
        self.daemon.disk.flush()  # a job may be over before its last entries are in the journal
        self.checks.done(job_id)

    def describe(self) -> str:
        return self.checks.describe()
