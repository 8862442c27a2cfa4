"""The daemon of a simulated world: the real machine and policies, and what its loop does with their commands.

Owns the daemon's incarnations, its clock and ticks, and the answers of its planner. Its clock is one that
`daemon.clock` makes: it never goes back in an incarnation, but may be off by any time, and by another one in
the next incarnation. Where the process is stopped, or gets no processor, all that it should have heard comes
at once and late. The machine's invariants are asserted after every event. When a command may be performed is
the disk's, how it gets to an agent the network's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from oobleckd.core import invariants, view
from oobleckd.core.config import CoreConfig
from oobleckd.core.events import (
    Announce,
    Command,
    Discard,
    Event,
    LookAtRoom,
    MakePlan,
    ManifestWritten,
    Planned,
    Reply,
    RoomSeen,
    SetAside,
    Tell,
    Tick,
    WriteManifest,
)
from oobleckd.core.invariants import PastState
from oobleckd.core.machine import Machine
from oobleckd.core.snapshot import encode
from oobleckd.planner import policies
from oobleckd.planner.plan import Template
from oobleckd.planner.policies.stagesize import chosen
from oobleckd.planner.policy import PlanError, Proposal, Situation
from oobleckd.protocol.changes import Change
from oobleckd.protocol.requests import Response
from tests.helpers.simagent import Sleeper
from tests.helpers.simdisk import Disk

if TYPE_CHECKING:
    from tests.helpers.world import World

_prepared: dict[bytes, tuple[Template, ...]] = {}
_first_plans: dict[bytes, Proposal] = {}  # of jobs that nobody holds anything of


class Daemon:
    """One daemon after the other; ``machine`` is None while there is none.

    ``plan_s``: how long its planner thinks. ``process`` can be stopped. ``skew_s``: by how much the clock is
    off in this incarnation.
    """

    def __init__(self, world: World, config: CoreConfig) -> None:
        self.world, self.config = world, config
        self.machine: Machine | None = Machine(config)
        self.incarnation, self.skew_s = 0, 0.0
        self.process, self.past = Sleeper(), PastState()
        self.disk = Disk(world, self._perform)
        self.plan_s = (0.002, 0.03)
        self.replies: list[Response] = []
        self.changes: list[Change] = []
        self.last_seq = 0
        self._tick_at: float | None = None

    @property
    def up(self) -> bool:
        """Whether it would answer now."""
        return self.machine is not None and not self.process.asleep

    @property
    def now(self) -> float:
        """What its clock shows."""
        return self.world.now + self.skew_s

    def feed(self, incarnation: int, event: Event) -> None:
        """Something happened to the daemon of ``incarnation``."""
        self.process.call(self._handle, incarnation, event)

    def feed_now(self, event: Event) -> None:
        """The same, from inside its process."""
        self._handle(self.incarnation, event)

    def _handle(self, incarnation: int, event: Event) -> None:
        if self.machine is None or incarnation != self.incarnation:
            return
        commands = self.machine.handle(event, self.now)
        self._check()
        self.disk.put(commands)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        assert self.machine is not None
        due = self.machine.next_deadline()
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = max(due, self.now + 1e-6)
            self.world.at(self._tick_at - self.skew_s, self._tick, self.incarnation, self._tick_at)

    def _tick(self, incarnation: int, due: float) -> None:
        if self._tick_at == due:
            self._tick_at = None
        self.feed(incarnation, Tick())

    def _check(self) -> None:
        assert self.machine is not None
        invariants.check(self.machine.core)
        self.past.check(self.machine.core)

    # ------------------------------------------------------------------ commands

    def _perform(self, command: Command) -> None:
        match command:
            case Tell():
                self.world.checks.told(command)
                self.world.network.tell(command)
            case Reply():
                self.replies.append(command.response)
            case Announce():
                assert command.change.seq == self.last_seq + 1
                self.last_seq = command.change.seq
                self.changes.append(command.change)
            case MakePlan():
                self.world.after(
                    self.world.random.uniform(*self.plan_s), self.plan, self.incarnation, command
                )
            case WriteManifest():
                self._write_manifest(command)
            case SetAside():
                self._set_aside(command.directory)
            case Discard():
                self.world.discard(command.directory)
            case LookAtRoom():
                free = 0 if self.world.disk_full else 2**40
                seen = RoomSeen(command.job, free, free)
                self.world.after(
                    self.plan_s[0], self.feed, self.incarnation, seen
                )  # without a dice: seeds stay what they are

    def _write_manifest(self, command: WriteManifest) -> None:
        if self.world.disk_full:
            full = ManifestWritten(command.directory, "No space left on device", again=True, errno="ENOSPC")
            self.world.after(self.plan_s[0], self.feed, self.incarnation, full)  # as a thread says it
            self.world.after(1.0, self._again, self.incarnation, command)
            return
        states = self.world.partial.get(command.directory)
        if states is None:  # thrown away meanwhile
            gone = ManifestWritten(command.directory, "it has no manifest")
            self.world.after(self.plan_s[0], self.feed, self.incarnation, gone)
            return
        mixed = {state[::2] for state in states.values()}
        assert len(mixed) == 1, f"a checkpoint of mixed states: {mixed}"
        assert len(command.manifest.buckets) == len(self.world.buckets)
        final = command.directory.removesuffix(".partial")
        self.world.complete[final] = dict(states)
        del self.world.partial[command.directory]
        self.world.damaged.pop(final, None)
        done = ManifestWritten(command.directory)
        self.world.after(self.world.random.uniform(*self.plan_s), self.feed, self.incarnation, done)

    def _again(self, incarnation: int, command: WriteManifest) -> None:
        if incarnation == self.incarnation and command.directory in self.world.partial:
            self.process.call(self._write_manifest, command)

    def _set_aside(self, directory: str) -> None:
        assert directory in self.world.damaged or self.world.texts.written, f"{directory} is whole"
        self.world.complete.pop(directory, None)
        self.world.checks.distrusted = True

    def plan(self, incarnation: int, command: MakePlan) -> None:
        """The planner's answer."""
        try:
            if command.others:
                setups = (command.setup, *command.others)
                setup = setups[chosen(command.policy, setups, command.num_nodes)]
                made = self._templates(msgspec.structs.replace(command, setup=setup))
                found = Planned(command.ticket, made, setup=setup)
            elif command.situation is None:
                found = Planned(command.ticket, self._templates(command))
            else:
                found = Planned(command.ticket, proposal=self._proposal(command, command.situation))
        except PlanError as error:
            found = Planned(command.ticket, error=error.problem, hint=error.hint)
        self.feed(incarnation, found)

    def _proposal(self, command: MakePlan, situation: Situation) -> Proposal:
        """First plans are the same in many worlds, and take as long as any."""
        key = b"" if situation.holdings else msgspec.json.encode((command.policy, command.setup, situation))
        if key in _first_plans:
            return _first_plans[key]
        found = policies.deployable(command.policy, command.setup, self._templates(command), situation)
        assert not found.invalid, found.invalid
        if key:
            _first_plans[key] = found
        return found

    def _templates(self, command: MakePlan) -> tuple[Template, ...]:
        """Templates are made once for a set-up, as the process pool does, and here for all worlds."""
        key = msgspec.json.encode((command.policy, command.setup))
        if key not in _prepared:
            _prepared[key] = policies.prepare(command.policy, command.setup)
        return _prepared[key]

    # ------------------------------------------------------------------ incarnations

    def stop(self) -> None:
        """kill -9: nothing is said; the journal is what is left."""
        self.disk.crash()
        self.machine, self.process, self._tick_at = None, Sleeper(), None
        self.incarnation += 1
        self.world.network.hang_up()

    def start(self, *, forgotten: bool = False) -> None:
        """The next incarnation, from the journal, whose end may be ``forgotten``; agents come back one by
        one.
        """
        self.config = msgspec.structs.replace(self.config, daemon=f"d{self.incarnation}")
        state, entries = self.disk.start()
        self.machine = Machine.restore(entries, self.now, self.config, state=state, forgotten=forgotten)
        whole = Machine.restore(self.disk.entries(), self.now, self.config, forgotten=forgotten)
        assert encode(self.machine.core.state) == encode(whole.core.state), "a snapshot that is another state"
        self.past = PastState()
        self._check()
        history = view.changes(self.machine.core)
        self.changes += [
            change for change in history if change.seq > self.last_seq
        ]  # on disk, but not announced
        self.last_seq = self.machine.core.state.seq
        self._schedule_tick()
        for node in self.world.nodes.values():
            if node.alive:
                self.world.after(self.world.random.uniform(0.001, 0.5), node.connect)

    def restart(self, down_s: float = 0.3, skew_s: float | None = None) -> None:
        """kill -9, and up again after a while, perhaps with another clock; nothing if it is down already."""
        if self.machine is not None:
            self.stop()
            self.skew_s = self.skew_s if skew_s is None else skew_s
            self.world.after(down_s, self.start)
