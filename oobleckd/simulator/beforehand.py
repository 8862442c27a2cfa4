"""Copies that are made while training goes on, in a simulated cluster: when targets have caught up, and what a ``Deploy`` finds of them.

Owns which preparation is under way and whether it is complete. How long it takes is the planner's model (``planner.beforehand``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from oobleckd.protocol.messages import Deploy, FromWorker, Prepare, Prepared
from oobleckd.simulator.clock import Clock
from planner.beforehand import caught_up_s
from planner.profile import Profile
from planner.transfer import copy_s


class Shell(Protocol):
    """What it needs of the world around it."""

    clock: Clock

    def hear(self, device: str, message: FromWorker) -> None:
        """Bring a device's message to the core."""


@dataclass(slots=True)
class Beforehand:
    """``number`` of the preparation under way (0: none is), of that which is ``complete``; ``gone``: devices that are dead."""

    world: Shell
    profile: Profile
    gone: Collection[str]
    number: int = 0
    complete: int = 0

    def prepare(self, message: Prepare, step_s: float) -> None:
        """Sources and targets are told; steps take ``step_s`` by now."""
        if not message.transfers:
            self.number = 0
        elif message.number > self.number:
            self.number = message.number
            takes_s = caught_up_s(copy_s(message.transfers, self.profile), step_s)
            if takes_s < float("inf"):
                self.world.clock.after(takes_s, lambda: self._arrived(message))

    def _arrived(self, message: Prepare) -> None:
        if self.number != message.number:
            return
        self.complete = message.number
        for target in sorted({copy.target for copy in message.transfers}):
            if target not in self.gone and self.number == message.number:
                self.world.hear(target, Prepared(target, message.number, 0))

    def copies_s(self, message: Deploy) -> float:
        """Seconds that the copies of a deployment take in its stop."""
        return 0.0 if self.has(message) else copy_s(message.transfers, self.profile)

    def copied(self, message: Deploy) -> dict[str, tuple[int, int]]:
        """Target -> bytes that it gets in the stop, and that it had before."""
        found: dict[str, int] = {}
        for copy in message.transfers:
            found[copy.target] = found.get(copy.target, 0) + copy.num_bytes
        has = self.has(message)
        return {target: (0, count) if has else (count, 0) for target, count in found.items()}

    def has(self, message: Deploy) -> bool:
        """Whether all that it needs was copied beforehand."""
        return message.prepared > 0 and message.prepared == self.complete
