"""Holds back what the core said, in order, until the disk has what must be durable first.

Owns the durability rule: a ``Record`` is on disk before anything that the core said after it leaves the
process. There are two exceptions. A plan is asked for at once, as that tells nobody anything. And a ``Tell``
that the core marks ``ahead`` leaves at once where nobody waits to be told anything, be it another such one:
so a daemon that dies meanwhile has said one thing at most that its journal does not know (docs/recovery.md,
"The daemon is away"). Pure; ``loop`` performs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oobleckd.core.events import Command, KeepState, MakePlan, Record, Tell

OnDisk = Record | KeepState


@dataclass(frozen=True, slots=True)
class Told:
    """Stands where a ``Tell`` was that has left ahead of the records before it."""


class Waiting:
    """Commands in order. What ``take`` gave is still awaited until ``done``."""

    def __init__(self) -> None:
        self._queue: list[Command | Told] = []
        self._under_way: list[Command | Told] = []

    def __bool__(self) -> bool:
        """Whether there is something to ``take``."""
        return bool(self._queue)

    def put(self, commands: Iterable[Command]) -> list[MakePlan | Tell]:
        """Take ``commands`` in; those of them that are to be performed now, in order."""
        now: list[MakePlan | Tell] = []
        # One such word at most: a restarted daemon leaves out one generation, so no more than one may have
        # been told that the journal does not know. (D-recovery-015)
        silent = not any(isinstance(one, Tell | Told) for one in (*self._under_way, *self._queue))
        for command in commands:
            if isinstance(command, MakePlan):
                now.append(command)
            elif isinstance(command, Tell) and command.ahead and silent:
                now.append(command)
                self._queue.append(Told())
            else:
                silent &= not isinstance(command, Tell)
                self._queue.append(command)
        return now

    def take(self) -> tuple[Sequence[Command], Sequence[OnDisk], Sequence[Command]]:
        """All that waits: what may leave now, what must be on disk before the rest, and the rest. Not before
        the last one is ``done``. A snapshot goes to the disk between the same records.
        """
        assert not self._under_way, "one at a time"
        self._under_way, self._queue = self._queue, []
        commands = [command for command in self._under_way if not isinstance(command, Told)]
        first = next((i for i, one in enumerate(commands) if isinstance(one, OnDisk)), len(commands))
        on_disk = [command for command in commands if isinstance(command, OnDisk)]
        return commands[:first], on_disk, [one for one in commands[first:] if not isinstance(one, OnDisk)]

    def done(self) -> None:
        """Note that what was taken is on disk and has left."""
        self._under_way = []
