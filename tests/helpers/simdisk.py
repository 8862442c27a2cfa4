"""The disk of a simulated daemon: its journal, and what was not synced when it died.

Owns the commands that wait for it, by the daemon's own rule (``daemon.waiting``). What a command does is the
daemon's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from oobleckd.core.entries import AnyEntry, StepEntry
from oobleckd.core.events import Command, KeepState, Record, Tell
from oobleckd.core.snapshot import decode
from oobleckd.core.state import State
from oobleckd.daemon.waiting import Waiting
from oobleckd.protocol.messages import ToWorker

if TYPE_CHECKING:
    from tests.helpers.world import World

_entries = msgspec.msgpack.Decoder(AnyEntry)


class Disk:
    """``sync_s``: least and most seconds of a sync; None: none, all is durable at once. ``told_ahead``: all
    messages that left before what was recorded in front of them. ``snapshots``: number of entries in each,
    and what it is.
    """

    def __init__(self, world: World, perform: Callable[[Command], None]) -> None:
        self.world, self._perform = world, perform
        self.journal: list[bytes] = []
        self.snapshots: list[tuple[int, bytes]] = []
        self.sync_s: tuple[float, float] | None = None
        self.told_ahead: list[ToWorker] = []
        self.syncing: list[Sequence[Command]] | None = None
        self._waiting = Waiting()

    def entries(self) -> list[AnyEntry]:
        """The journal, as a daemon that starts reads it."""
        return [_entries.decode(entry) for entry in self.journal]

    def start(self) -> tuple[State | None, list[AnyEntry]]:
        """The newest snapshot of what is in the journal, and the entries after it."""
        self.snapshots = [each for each in self.snapshots if each[0] <= len(self.journal)]
        num, data = self.snapshots[-1] if self.snapshots else (0, b"")
        state = decode(data) if num else None
        assert (state is None) == (num == 0)
        return state, self.entries()[num:]

    def steps(self, job: str, first: int, last: int, limit: int) -> list[bytes]:
        """As ``StepStore`` has it."""
        newest: dict[int, bytes] = {}
        for data in self.journal:
            entry = _entries.decode(data)
            if isinstance(entry, StepEntry) and entry.job == job and entry.outcome != "repeated":
                newest[entry.counters.step] = data
        return [newest[step] for step in sorted(newest) if first <= step <= last][:limit]

    def put(self, commands: Sequence[Command]) -> None:
        """Perform ``commands`` in order, each as soon as it may be."""
        for command in self._waiting.put(commands):
            self.told_ahead += [command.message] if isinstance(command, Tell) else []
            self._do(command)
        if self.syncing is None:
            self._sync()

    def flush(self) -> None:
        """All that waits is on the disk now."""
        while self.syncing is not None:
            self._synced(self.syncing)

    def crash(self) -> None:
        """The daemon dies: the journal is what is left, with or without what it was about to sync."""
        if self.syncing is not None and self.world.random.random() < 0.5:
            for record in self.syncing[0]:
                self._do(record)
        self._waiting, self.syncing = Waiting(), None

    def _do(self, command: Command) -> None:
        if isinstance(command, Record):
            self.journal.append(msgspec.msgpack.encode(command.entry))
            self.world.checks.journaled(command.entry)
        elif isinstance(command, KeepState):
            self.snapshots.append((len(self.journal), command.data))
        else:
            self._perform(command)

    def _sync(self) -> None:
        """What waits, at once or after a while."""
        first, *batch = self._waiting.take()
        for command in first:
            self._do(command)
        self.syncing = batch
        if self.sync_s is None or not any(batch):
            self._synced(batch)
        else:
            sync_s = self.world.random.uniform(*self.sync_s)
            self.world.after(sync_s, self.world.daemon.process.call, self._synced, batch)

    def _synced(self, batch: list[Sequence[Command]]) -> None:
        if self.syncing is not batch:
            return  # of a daemon that is dead, or waited for already
        for command in itertools.chain(*batch):
            self._do(command)
        self._waiting.done()
        self.syncing = None
        if self._waiting:
            self._sync()
