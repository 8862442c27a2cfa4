"""What the parts of the machine share: durable state, membership, the active job's run, and the outbox.

Owns how facts, messages and changes leave the machine, and nothing about when. The parts (``jobs``,
``steer``, ``deploy``, ``recovery``, ``steps``, ``requests``) are functions over a ``Core``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec

from oobleckd.core.apply import apply
from oobleckd.core.config import CoreConfig
from oobleckd.core.devicefigures import DevicesTold
from oobleckd.core.entries import AnyEntry, JobStateChanged, as_shown, note
from oobleckd.core.events import Announce, Command, MakePlan, Record, Tell
from oobleckd.core.figures import Figures
from oobleckd.core.membership import Membership
from oobleckd.core.routers import RoutersTold
from oobleckd.core.run import Run
from oobleckd.core.samples import Samples
from oobleckd.core.state import JobRecord, State
from oobleckd.core.states import Trigger, after
from oobleckd.core.usable import Terms, Usable
from oobleckd.planner.plan import node_of
from oobleckd.planner.policy import Setup, Situation
from oobleckd.protocol.changes import AnyPayload, Change, JobMoved, Level
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Deploy, Release, ToWorker
from oobleckd.protocol.parts import JobCause, Peer
from oobleckd.protocol.text import all_visible, visible
from oobleckd.protocol.traits import alike
from oobleckd.words import being


@dataclass(slots=True)
class Core:
    """The machine's whole state. ``now`` is the time of the event at hand, POSIX seconds. ``queue_reason``:
    what jobs of the queue were last told to wait for. ``num_unkept``: entries after the last snapshot.
    """

    config: CoreConfig
    state: State
    members: Membership
    now: float
    started_at: float
    run: Run | None = None
    tickets: int = 0
    orders: int = 0
    joined_at: float = float("-inf")
    queue_reason: str = ""
    num_unkept: int = 0
    samples: Samples = field(default_factory=Samples)
    figures: Figures = field(default_factory=Figures)
    devices_told: DevicesTold = field(default_factory=DevicesTold)
    routers: RoutersTold = field(default_factory=RoutersTold)
    outbox: list[Command] = field(default_factory=list)
    usable: Usable = field(init=False)

    def __post_init__(self) -> None:
        self.usable = Usable(self.members)

    # ------------------------------------------------------------------ what leaves the machine

    def record(self, entry: AnyEntry) -> None:
        """Make a fact durable, and apply it."""
        # One journal and one reducer: a restart, the simulator and property tests then run the code that
        # runs in production. (D-daemon-001)
        entry = as_shown(entry)
        apply(self.state, entry)
        self.num_unkept += 1
        self.outbox.append(Record(entry))

    def tell(self, device_or_node: str, message: ToWorker, *, ahead: bool = False) -> None:
        """Send a message to a device (by way of its agent) or to an agent."""
        if isinstance(message, Deploy | Release):
            self.members.linked_anew(message.device)
        self.outbox.append(Tell(node_of(device_or_node) or device_or_node, message, ahead))

    def release(self, device: str, job: str) -> None:
        """Have a device drop what it holds of ``job``. Until it has, a plan that copies state to it would
        lose that: its node is none to plan with (``candidates``).
        """
        order = self.new_order()
        self.members.releases(device, order)
        self.tell(device, Release(device, job, order))

    def new_order(self) -> str:
        """What names an order that is to be answered, in no other incarnation of the daemon either."""
        self.orders += 1
        return f"{self.config.daemon}.{self.orders}"

    def ask_plan(
        self,
        policy: str,
        setup: Setup,
        situation: Situation | None = None,
        others: tuple[Setup, ...] = (),
        num_nodes: int = 0,
    ) -> int:
        """Ask the planner (``MakePlan``); returns the ticket of the answer."""
        self.tickets += 1
        self.outbox.append(MakePlan(self.tickets, policy, setup, situation, others, num_nodes))
        return self.tickets

    def announce(
        self, text: str, data: AnyPayload, story: Iterable[str] = (), *, level: Level = "info"
    ) -> None:
        """Publish a change, and keep it for ``story``."""
        told, keys = all_visible(data), tuple(map(visible, story))
        change = Change(self.state.seq + 1, self.now, data.kind, level, visible(text), keys, told)
        self.record(note(change))
        self.outbox.append(Announce(change))

    # ------------------------------------------------------------------ small common acts

    def move(self, job: JobRecord, trigger: Trigger, reason: str = "", cause: JobCause = "") -> None:
        """Take a job along the state table; silent where neither state nor reason changes."""
        state = after(job.state, trigger)
        if (state, reason, cause) == (job.state, job.reason, job.cause):
            return
        changed = state != job.state
        self.record(JobStateChanged(job.id, state, reason, self.now, cause))
        if changed:
            text = f"{job.id} {being(state)}" + (f": {reason}" if reason else "")
            level: Level = "error" if state == "failed" else "warn" if state == "done" and reason else "info"
            self.announce(text, JobMoved(job.id, state, reason, cause), (f"job:{job.id}",), level=level)

    def explain(self, job: JobRecord, reason: str, cause: JobCause = "") -> None:
        """Say with a job's state, which stays, why it does not go on ("": it does)."""
        if (reason, cause) != (job.reason, job.cause):
            self.record(JobStateChanged(job.id, job.state, reason, self.now, cause))

    def next_epoch(self) -> int:
        """An epoch above every one in the journal or heard of in a Hello."""
        heard = [device.epoch for node in self.members.nodes.values() for device in node.devices]
        return max(self.state.epoch, *heard, 0) + 1

    def candidates(self, job: JobRecord, without: Collection[str] = ()) -> tuple[str, ...]:
        """The nodes that a plan for ``job`` should use now, in name order, were it not for those ``without``.

        Nodes of the layout stay in it through a short disconnection; ``max_nodes`` prefers them, and where
        devices hold each other's layers those in other zones than the neighbours that they would get. None
        that has notice of its end, and, where state is to be copied, none that has yet to drop what it holds;
        none that is kept out for what it would read, or cannot compile where the job wants that.
        """
        min_devices = job.setup.whole_node if job.setup is not None else 0
        kept_out = self.run.kept_out if self.run is not None and self.run.job is job else ()
        out = (*self.state.drained, *kept_out, *without)
        empty = job.layout is not None
        max_nodes = job.spec.resources.max_nodes
        rings: tuple[tuple[str, ...], ...] = ()
        if max_nodes and job.plan is not None and job.plan.redundant:
            rings = tuple(pipeline.nodes for pipeline in job.plan.pipelines)
        compiles = job.spec.train.compile
        return self.usable.under(Terms(min_devices, max_nodes, job.survivors(), out, empty, rings, compiles))

    def needs(self, name: str) -> bool:
        """Whether a device of the node holds state that counts, or is about to: of the layout in force, or of
        the one being deployed.
        """
        if self.run is None:
            return False
        candidate = self.run.candidate
        deployed = candidate.deploys if candidate is not None else ()
        return name in self.run.job.surviving_nodes() or any(node_of(device) == name for device in deployed)

    def secret(self, epoch: int) -> str:
        """The secret that opens transport links of the layout of ``epoch`` (hex, 256 bits)."""
        key = hashlib.blake2b(self.config.secret.encode(), digest_size=32).digest()
        return hashlib.blake2b(f"transport:{epoch}".encode(), key=key, digest_size=32).hexdigest()

    def peers(self, devices: Iterable[str]) -> dict[str, Peer]:
        """How to reach ``devices``."""
        peers = {}
        for device in devices:
            info = self.members.device(device)
            assert info is not None, f"{device} is in a plan but unknown"
            peers[device] = Peer(info.address, info.local, self.members.nodes[node_of(device)].host)
        return peers

    def checkpoint_dir(self, spec: Job) -> str:
        """Where the folder of a job with ``spec`` lies."""
        named = spec.checkpoint.dir or self.config.checkpoint_dir or f"{self.config.state_dir}/checkpoints"
        return str(PurePosixPath(named))

    def spec_of(self, job: JobRecord) -> Job:
        """The job as devices are told of it, with the folder of its checkpoints."""
        checkpoint = msgspec.structs.replace(job.spec.checkpoint, dir=self.checkpoint_dir(job.spec))
        return msgspec.structs.replace(job.spec, checkpoint=checkpoint)

    def compared(self, spec: Job, devices: Iterable[str]) -> Job:
        """``spec`` for ``devices`` that train together: where these do not come to the same bits, as far as
        is known now, they are not compared.
        """
        known = [info.all_traits for device in devices if (info := self.members.device(device)) is not None]
        if alike(known):
            return spec
        tolerance = msgspec.structs.replace(spec.fault_tolerance, check_every=0)
        return msgspec.structs.replace(spec, fault_tolerance=tolerance)
