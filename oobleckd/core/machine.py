"""The core machine: events in, commands out. No socket, clock, randomness or logging.

``Machine.handle`` takes an event and the time of it, lets the part that it concerns act, and then asks
``steer`` what comes next. Owns that order, and time; what agents say is for ``agents``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import assert_never

from oobleckd.core import (
    agents,
    cards,
    checkpoints,
    inputs,
    lastcopy,
    precopy,
    recovery,
    requests,
    room,
    snapshot,
    steer,
)
from oobleckd.core.apply import apply
from oobleckd.core.config import CoreConfig
from oobleckd.core.context import Core
from oobleckd.core.entries import AnyEntry, NodeOver, Restarted, as_shown
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
from oobleckd.protocol.agentmessages import Dismiss, Heartbeat
from oobleckd.protocol.changes import (
    NodeDismissed,
    NodeLeft,
    NodeLost,
)
from oobleckd.protocol.datamessages import InputsChecked
from oobleckd.protocol.messages import (
    Emptied,
    Held,
    OpTimes,
    PreCopied,
    Progress,
    Ready,
    StepDone,
)


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
                agents.heard(core, event)
            case LinkLost():
                agents.link_lost(core, event.node)
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
                    agents.link_down(core, message)
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
        agents.evict(core, name, f"its links to {node.accusers()} stay down")

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
