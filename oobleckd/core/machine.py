"""The core machine: events in, commands out. No socket, clock, randomness or logging.

``Machine.handle`` takes an event and the time of it, lets the part that it concerns act, and then asks
``steer`` what comes next. Owns that order, the reaction to what agents say of themselves, and time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import assert_never

import msgspec

from oobleckd.core import (
    cards,
    checkpoints,
    deaths,
    devicefigures,
    inputs,
    jobs,
    lastcopy,
    precopy,
    preparing,
    reading,
    recovery,
    requests,
    room,
    snapshot,
    steer,
    steps,
)
from oobleckd.core.apply import apply
from oobleckd.core.config import CoreConfig
from oobleckd.core.context import Core
from oobleckd.core.entries import AnyEntry, NodeDrained, NodeJoined, NodeOver, Restarted, as_shown
from oobleckd.core.events import (
    Asked,
    Command,
    Decisive,
    Event,
    FiguresHeard,
    FolderFound,
    Heard,
    KeepState,
    LinkLost,
    ManifestWritten,
    Planned,
    RoomSeen,
    Tell,
    Tick,
)
from oobleckd.core.membership import ROUNDING_S, Membership
from oobleckd.core.run import Run
from oobleckd.core.state import State
from oobleckd.planner.plan import node_of
from oobleckd.protocol import versions
from oobleckd.protocol.changes import (
    DeploymentRetried,
    DeviceReplaced,
    LinkClosed,
    NodeDismissed,
    NodeEnding,
    NodeHere,
    NodeLeft,
    NodeLost,
    NodeRevived,
    SpareReady,
)
from oobleckd.protocol.messages import (
    PROTOCOL,
    CheckpointFailed,
    CheckpointPart,
    Corrupted,
    DeviceAwake,
    DeviceFailed,
    DeviceLost,
    DeviceStopped,
    Dismiss,
    Emptied,
    Goodbye,
    Heartbeat,
    Held,
    Hello,
    Identified,
    InputsChanged,
    InputsChecked,
    InputsMoved,
    LinkDown,
    Measured,
    OpTimes,
    PreCopied,
    PrepareDone,
    PrepareFailed,
    Preparing,
    Progress,
    Ready,
    Refused,
    StepDone,
    Welcome,
)
from oobleckd.protocol.text import all_visible
from oobleckd.words import seconds

_HEARTBEAT_OF_NODE_S = (
    1e-4  # 10,000 nodes send heartbeats once a second, which is a third of a core (docs/decisions.md)
)
OfJob = (
    Measured
    | PreCopied
    | Emptied
    | Ready
    | Progress
    | Held
    | StepDone
    | OpTimes
    | CheckpointPart
    | CheckpointFailed
    | DeviceFailed
    | Corrupted
)

_IN_WORDS = (
    Hello
    | DeviceLost
    | DeviceStopped
    | LinkDown
    | DeviceFailed
    | Identified
    | InputsChanged
    | PrepareFailed
    | Goodbye
)
"""Messages with words for people, or of the machine, that views and later sentences have from memory."""


class Machine:
    """The daemon's brain. ``core`` is open to ``view`` and ``invariants``, which only read.

    ``grace_until``: nobody is given up before, after a restart; later by what this process slept through.
    ``silent_until``: until then nobody is said to be lost of whom nothing was heard since.
    """

    def __init__(self, config: CoreConfig, now: float = 0.0) -> None:
        members = Membership(config.lease_s, config.link_grace_s, config.heartbeat_s)
        self.core = Core(config, State(), members, now, now)
        self.grace_until: float | None = None
        self.silent_until: float | None = None
        self.due: float | None = None

    @classmethod
    def restore(
        cls,
        entries: Iterable[AnyEntry],
        now: float,
        config: CoreConfig,
        *,
        state: State | None = None,
        forgotten: bool = False,
    ) -> Machine:
        """The machine after a restart of the daemon: state from the journal, nobody dead for a grace.
        ``entries``: those after ``state``, which is the machine's from now on; all where there is none.
        ``forgotten``: entries at the journal's end are lost, so what workers hold may be anything that came
        after.
        """
        machine = cls(config, now)
        core = machine.core
        core.state = state or core.state
        for entry in entries:
            apply(core.state, as_shown(entry))  # an older version may have written what others said as it was
            core.num_unkept += 1
        for job in core.state.jobs.values():
            if not job.final and job.state != "queued":
                core.run = recovery.adrift(core, job, forgotten=forgotten)
                if core.run.phase == "adrift":
                    machine.grace_until = now + config.grace_s
                    # One generation is left out: the daemon before may have told it to somebody ahead of
                    # its journal. (D-recovery-015)
                    core.record(Restarted(core.state.epoch + 1, now))
        if config.snapshot_every:
            snapshot.shape()  # takes some tens of milliseconds, which the loop has not
        machine.silent_until = now + config.grace_s if core.state.nodes else None
        machine.due = machine._next_deadline()
        return machine

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in an event of time ``now`` (POSIX seconds, never decreasing); what is to be done,
        in order.
        """
        core = self.core
        if self._only_heartbeats(event, now):
            return []
        if isinstance(event, FiguresHeard):
            core.now = now
            cards.heard(core, event.node, event.message)
            return self._taken()
        slept_s = core.members.attend(now, self.due)
        # The grace runs while the daemon is awake: one that stood still before its agents were back gave up
        # all of them at its own tick. (D-detection-005)
        if self.grace_until is not None:
            self.grace_until += slept_s
        core.now = now
        self._take_in(event)
        core.members.expire(core.now, partial(lastcopy.spared, core))
        if core.members.obituaries or not self._is_routine(event):
            self._settle()
        self.due = self._next_deadline()
        return self._taken()

    def _take_in(self, event: Decisive) -> None:
        core = self.core
        match event:
            case Heard():
                self._heard(event)
            case LinkLost():
                self._link_lost(event.node)
            case Asked():
                requests.on_asked(core, event)
            case Planned():
                steer.on_planned(core, event)
            case ManifestWritten():
                checkpoints.on_manifest(core, event)
            case FolderFound():
                checkpoints.on_folder(core, event)
            case RoomSeen():
                room.on_room(core, event)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _taken(self) -> list[Command]:
        """What is to be done by now, in order."""
        self._keep_state()
        commands, self.core.outbox = self.core.outbox, []
        return commands

    def _keep_state(self) -> None:
        """Where it is time for one, a snapshot behind what was recorded."""
        core, every = self.core, self.core.config.snapshot_every
        if every and core.num_unkept >= every:
            core.num_unkept = 0
            core.outbox.append(KeepState(snapshot.encode(core.state)))

    def next_deadline(self) -> float | None:
        """When to send a ``Tick`` if nothing else happens before; None when there is nothing to wait for."""
        return self.due

    def _next_deadline(self) -> float | None:
        core = self.core
        due = [self.grace_until, core.members.deadline(core.now)]
        if self.silent_until is not None and core.now < self.silent_until:
            due.append(self.silent_until)
        if core.now < core.joined_at + core.config.batch_s:
            due.append(core.joined_at + core.config.batch_s)
        if core.run is not None:
            due += [room.deadline(core, core.run), lastcopy.deadline(core, core.run)]
        if core.members.nodes or self.grace_until is not None:
            due.append(core.now + core.config.look_s)
        return min((at for at in due if at is not None), default=None)

    def _only_heartbeats(self, event: Event, now: float) -> bool:
        """Take in a heartbeat that comes in time and leads to nothing, which are nearly all events where
        nodes are many: what was due stays due.
        """
        if self.due is None or now >= self.due or not isinstance(event, Heard):
            return False
        core, message = self.core, event.message
        if not isinstance(message, Heartbeat) or not core.members.goes_on(
            event.node, message.incarnation, now
        ):
            return False
        core.now = now
        self.due = min(self.due, core.members.look_at + core.members.asleep_s)
        return True

    # ------------------------------------------------------------------ after every event

    def _is_routine(self, event: Event) -> bool:
        """Whether it was a heartbeat, or a word of one device while others are still to say theirs, and
        changed nothing but a lease.

        Of these there are thousands a second on thousands of nodes, and looking at all nodes takes
        milliseconds.
        """
        # After a loss on 10,000 nodes 30,000 such words come, and each had the core look at 10,000 nodes.
        # What is decided is the same. (D-daemon-007)
        if not isinstance(event, Heard) or not all(isinstance(command, Tell) for command in self.core.outbox):
            return False
        match event.message:
            case Heartbeat() | StepDone() | OpTimes():
                return True
            case Emptied():
                return bool(
                    self.core.members.owing
                )  # at a job's end all say so at once: they are looked at with the last
            case Progress() | Ready() | InputsChecked():
                return (
                    not self.core.outbox
                )  # the last one leads to a decision, to a new layout, or to the end
            case Held() | PreCopied():
                run = self.core.run
                return run is not None and not self._is_last(run, event.message)
            case _:
                return False

    def _is_last(self, run: Run, message: Held | PreCopied) -> bool:
        """Whether with ``message`` all devices have said theirs."""
        if isinstance(message, PreCopied):
            return precopy.is_complete(run)
        return len(run.held) >= len(run.job.survivors())

    def _settle(self) -> None:
        core = self.core
        # In this order each finds what the one before it made: an eviction is an obituary, a death may end
        # a wait or a device's part in the layout, and only then is it known what comes next, and after that
        # who may leave.
        self._evict()
        self._announce_deaths()
        run = core.run
        if run is not None and run.phase == "adrift":
            grace_over = self.grace_until is None or core.now >= self.grace_until - ROUNDING_S
            if grace_over and lastcopy.awaited(core, run):
                self.grace_until = core.now + core.config.batch_s
            elif grace_over or not (run.forgotten or recovery.awaited(core, run)):
                self.grace_until = None
                recovery.look_again(core, run)
                broken, run.broken = run.broken, []
                for message in broken:
                    self._link_down(message)
        if run is not None:
            lastcopy.look(core, run)
            recovery.check_lives(core, run)
        inputs.ask_again(core)
        steer.steer(core)
        self._dismiss()

    def _evict(self) -> None:
        core = self.core
        if core.run is None or core.run.phase == "adrift" or not core.members.at_odds:
            return
        live = core.run.job.surviving_nodes()
        name = core.members.quarrel(live, core.now)
        if not name:
            return
        node = core.members.nodes[name]
        self._evict_node(name, f"its links to {node.accusers()} stay down")

    def _evict_node(self, name: str, cause: str) -> None:
        core = self.core
        core.record(NodeDrained(name, f"evicted: {cause}", undo=False, at=core.now, cause="evicted"))
        core.members.evict(name, cause, core.now, "links-down")
        self._drop_state(name)

    def _dismiss(self) -> None:
        """Nodes that have notice of their end may leave as soon as nothing of them is needed."""
        core = self.core
        for name in sorted(core.members.leaving):
            node = core.members.nodes[name]
            if not node.alive:
                core.members.leaving.discard(name)
            # Only the daemon knows whether a layout, or one that is being deployed, has a device of the
            # node; until then its agent works on as ever. (D-service-006)
            elif node.connected and not node.dismissed and not self._needed(name):
                node.dismissed = True
                core.tell(name, Dismiss())
                text = f"{name} may leave: nothing of it is needed"
                core.announce(text, NodeDismissed(name), (f"node:{name}",))

    def _needed(self, name: str) -> bool:
        return self.core.needs(name) or inputs.vouches(self.core, name)

    def _announce_deaths(self) -> None:
        core = self.core
        names, core.members.obituaries = core.members.obituaries, []
        for name in names:
            node = core.members.nodes[name]
            if not node.alive:
                # Who said that it would be ended is not expected back, as if it had left.
                left = node.left or bool(node.notice)
                core.record(NodeOver(name, node.cause, left, core.now, node.code))
            if node.left:
                said_left = NodeLeft(name, node.cause, node.code)
                core.announce(f"{name} {node.cause}", said_left, (f"node:{name}",))
            else:
                said = NodeLost(name, node.cause, node.code)
                core.announce(f"{name} lost: {node.cause}", said, (f"node:{name}",), level="warn")

    # ------------------------------------------------------------------ agents

    def _heard(self, event: Heard) -> None:
        core, node = self.core, event.node
        core.members.heard(node, core.now)
        heard = event.message
        if isinstance(heard, _IN_WORDS):
            heard = all_visible(heard)
        match heard:
            case Hello() as message:
                self._hello(message)
            case Heartbeat() as message:
                if core.members.heartbeat(node, message.incarnation, core.now):
                    self._revived(node)
            case DeviceLost() as message:
                self._device_lost(node, message)
            case DeviceStopped() as message:
                lastcopy.on_stopped(core, node, message)
            case DeviceAwake() as message:
                lastcopy.on_awake(core, node, message)
            case LinkDown() as message:
                self._link_down(message)
            case Goodbye() as message:
                core.members.goodbye(node, message, core.now)
            case Identified() | InputsChecked() | InputsChanged() | InputsMoved() as message:
                reading.heard(core, message)
            case Preparing() | PrepareDone() | PrepareFailed() as message:
                preparing.heard(core, node, message)
            case _:
                self._heard_of_job(heard)

    def _heard_of_job(self, message: OfJob) -> None:
        core = self.core
        match message:
            case Measured():
                reading.on_measured(core, message)
            case PreCopied():
                precopy.on_precopied(core, message)
            case Emptied():
                core.members.emptied(message.device, message.order)
            case Ready():
                reading.on_ready(core, message)
            case Progress():
                recovery.on_progress(core, message)
            case Held():
                steps.on_held(core, message)
            case StepDone():
                steps.on_step_done(core, message)
            case OpTimes():
                steps.on_op_times(core, message)
            case CheckpointPart() | CheckpointFailed():
                checkpoints.told(core, message)
            case DeviceFailed():
                self._device_failed(message)
            case Corrupted():
                recovery.on_corrupted(core, message)
            case _:
                assert_never(message)

    def _hello(self, message: Hello) -> None:
        core = self.core
        protocol = versions.spoken(message.protocol, message.oldest)
        if protocol is None:
            theirs, ours = (
                versions.words(message.protocol, message.oldest),
                versions.words(PROTOCOL, versions.OLDEST),
            )
            reason = f"the daemon speaks protocol {ours} and this worker {theirs}"
            hint = "install the same version of oobleckd on both"
            core.tell(message.node, Refused(reason, hint, "other-protocol"))
            return
        before = core.members.nodes.get(message.node)
        known = before is not None and before.incarnation == message.incarnation
        noticed = before.notice if before is not None and known else ""
        was_counted = before is not None and known and (before.ready or before.mending)
        had_spare = before is not None and known and before.spare is not None and before.spare.ready
        change = core.members.hello(message, core.now)
        config, incarnations = core.config, tuple(info.incarnation for info in message.devices)
        heartbeat_s = max(config.heartbeat_s, len(core.members.nodes) * _HEARTBEAT_OF_NODE_S)
        figures_s = devicefigures.every(config.figures_s, len(core.members.nodes))
        welcome = Welcome(protocol, config.daemon, heartbeat_s, config.lease_s, incarnations)
        more = {"figures_s": figures_s, "artifacts": config.artifacts}
        core.tell(message.node, msgspec.structs.replace(welcome, **more))
        if message.ready and not was_counted:
            core.joined_at = core.now
        self._expect(message.node)
        if change == "new":
            inputs.begin_anew(core, message.node)
        if change != "same":
            text = f"{message.node} is {'here' if change == 'new' else 'back'} on {message.host}"
            here = NodeHere(message.node, message.host, back=change != "new")
            core.announce(text, here, (f"node:{message.node}",))
        if message.notice is not None and message.notice.reason != noticed:
            text = f"{message.node} is to end in {seconds(message.notice.left_s)}: {message.notice.reason}"
            ending = NodeEnding(message.node, message.notice.reason, message.notice.left_s)
            core.announce(text, ending, (f"node:{message.node}",), level="warn")
        if change != "same":
            preparing.remind(core, message.node, new=change == "new")
        if message.spare is not None and message.spare.ready and not had_spare:
            text = f"{message.node} has a spare ready"
            core.announce(text, SpareReady(message.node), (f"node:{message.node}",))
        for info in message.devices:
            if core.run is not None:
                recovery.remind(core, core.run, info.device, back=change != "same")
            elif info.job or (change == "back" and core.members.owes(info.device)):
                core.release(info.device, info.job)

    def _expect(self, name: str) -> None:
        """It is here: where it should be known that it was, if the daemon is started anew."""
        core, node = self.core, self.core.members.nodes[name]
        known = core.state.nodes.get(name)
        if known is None or known.lost or (known.host, known.zone) != (node.host, node.zone):
            # Nodes that should be here are those that joined and did not leave in order, and not those with
            # a key: keys are made for nodes that may never be bought. (D-daemon-018)
            core.record(NodeJoined(name, node.host, node.zone, core.now))

    def _device_lost(self, name: str, message: DeviceLost) -> None:
        core, device = self.core, message.device
        known = core.members.living_node(name, message.incarnation)
        measuring = core.run.measuring if core.run is not None else ""
        if core.members.device_lost(name, message, core.now):
            if core.run is not None and measuring == device:
                core.run.measuring = ""  # the answer died with it
            text = f"{device} lost: {message.evidence}; the spare of {name} takes its place"
            said = DeviceReplaced(name, device, message.evidence)
            core.announce(text, said, (f"node:{name}",), level="warn")
        if known:
            deaths.died(core, message, measuring)

    def _link_lost(self, name: str) -> None:
        core = self.core
        core.members.link_lost(name, core.now)
        if name in core.members.nodes:
            core.announce(f"the link to {name} closed", LinkClosed(name), (f"node:{name}",), level="warn")

    def _link_down(self, message: LinkDown) -> None:
        """Believed only of links between two incarnations that are in the layout, or in the one being
        deployed.
        """
        core, run = self.core, self.core.run
        if run is None:
            return
        if run.phase == "adrift":
            # After a restart the ends of a broken link may not have said Hello: it is looked at after that,
            # since agents keep it until the device is deployed anew. (D-detection-004)
            run.broken.append(message)  # its ends may not have said Hello yet
            return
        job, survivors = run.job, run.job.survivors()
        ends = (message.device, message.peer)
        if all(end in survivors and core.members.living(end, job.incarnations[end]) for end in ends):
            core.members.link_down(message, core.now)
        elif run.candidate is not None and all(end in run.candidate.incarnations for end in ends):
            # What was on its way is lost, and nobody would miss it: its target waits.
            self._stumble(run, next(end for end in ends if end not in survivors), message)

    def _stumble(self, run: Run, joining: str, message: LinkDown) -> None:
        """A link of a device that only joins broke: once more with new links, then without its node."""
        core = self.core
        if joining in run.stumbled:
            ends = f"{message.device} and {message.peer}"
            self._evict_node(node_of(joining), f"the link between {ends} breaks whenever it joins")
            return
        run.stumbled.add(joining)
        why = f"{message.device} lost its link to {message.peer} during a deployment: {message.why}"
        node = node_of(joining)
        peer = message.peer if joining == message.device else message.device
        said = DeploymentRetried(node, joining, peer, run.job.id, message.why)
        core.announce(f"{why}; once more", said, (f"node:{node}",), level="warn")
        recovery.restart_deployment(core, run, joining, why)

    def _device_failed(self, message: DeviceFailed) -> None:
        core = self.core
        if message.damaged:
            recovery.on_damaged(core, message)
            return
        if message.unread:
            reading.on_unread(core, message)
            return
        job = core.state.jobs.get(message.job) or (core.run.job if core.run else None)
        node = core.members.nodes.get(node_of(message.device))
        if job is not None and not job.final and node is not None and node.alive:
            cause = message.cause or "device-refused"
            jobs.fail(core, job, f"{message.device}: {message.error}", message.hint, cause)

    def _revived(self, name: str) -> None:
        """An incarnation that was declared over is heard again: it joins as a fresh one, unless nobody has
        acted on its end yet.
        """
        core = self.core
        core.joined_at = core.now
        self._expect(name)
        if core.run is not None and core.run.phase == "adrift":
            core.announce(f"{name} is back", NodeRevived(name, fresh=False), (f"node:{name}",))
            return
        text = f"{name} is back after it was declared lost; it drops what it holds and joins anew"
        core.announce(text, NodeRevived(name, fresh=True), (f"node:{name}",))
        self._drop_state(name)

    def _drop_state(self, name: str) -> None:
        """What the devices of an incarnation that was declared over hold is of no use any more."""
        core = self.core
        if core.run is not None:
            for device in core.members.nodes[name].devices:
                core.release(device.device, core.run.job.id)
