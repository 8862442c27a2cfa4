"""Copies that are made while training goes on, in a simulated cluster: when targets have caught up, and what
a ``Deploy`` finds of them.

Owns which pre-copy is under way and whether it is complete. How long it takes is the planner's model
(``oobleckd.planner.placement.precopy``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from oobleckd.planner.placement.precopy import caught_up_s, last_update, still_share
from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.profile import Profile
from oobleckd.protocol.messages import Deploy, PreCopied, PreCopy, ToDecideBy
from oobleckd.simulator.clock import VirtualClock


class PreCopyShell(Protocol):
    """What it needs of the world around it."""

    clock: VirtualClock

    def hear(self, device: str, message: ToDecideBy) -> None:
        """Bring a device's message to the core."""


@dataclass(slots=True)
class SimulatedPreCopy:
    """``number`` of the pre-copy under way (0: none is), which began at ``began_at`` in the step after
    ``began_step``; that which is ``complete``; ``gone``: devices that are dead; ``preloads``: device -> since
    when it loads the job.
    """

    world: PreCopyShell
    profile: Profile
    gone: Collection[str]
    number: int = 0
    began_at: float = 0.0
    began_step: int = 0
    complete: int = 0
    preloads: dict[str, float] = field(default_factory=dict)

    def prepare(self, message: PreCopy, step: int, step_s: float) -> None:
        """Sources and targets are told, in the step after ``step``; steps take ``step_s`` by now."""
        if message.preload:
            self.preloads[message.device] = self.world.clock.now
        elif not message.transfers:
            self.number = 0
        elif message.number > self.number:
            self.number, self.began_at, self.began_step = message.number, self.world.clock.now, step
            takes_s = caught_up_s(copy_s(message.transfers, self.profile), step_s, self.profile.state_copies)
            if takes_s < float("inf"):
                self.world.clock.after(takes_s, lambda: self._arrived(message))

    def _arrived(self, message: PreCopy) -> None:
        if self.number != message.number:
            return
        self.complete = message.number
        for target in sorted({copy.target for copy in message.transfers}):
            if target not in self.gone and self.number == message.number:
                self.world.hear(target, PreCopied(target, message.number, 0))

    def copies_s(self, message: Deploy) -> float:
        """Seconds that the copies of a deployment take in its stop: what was not sent before it, and of the
        rest what still has to follow.
        """
        whole_s = copy_s(message.transfers, self.profile)
        still = still_share(self.profile, updated=message.counters.step > self.began_step)
        return whole_s * (1 - (1 - still) * self._sent(message))

    def copied(self, message: Deploy) -> dict[str, tuple[int, int]]:
        """Target -> bytes that it gets in the stop, and that it had before."""
        found: dict[str, int] = {}
        for copy in message.transfers:
            found[copy.target] = found.get(copy.target, 0) + copy.num_bytes
        share = self._sent(message)
        return {target: (count - int(share * count), int(share * count)) for target, count in found.items()}

    def begun_s(self, message: Deploy) -> float:
        """For how long its targets have known of it."""
        return self.world.clock.now - self.began_at if self._is_under_way(message) else 0.0

    def loaded_s(self, message: Deploy, device: str) -> float:
        """For how long ``device`` has loaded the job, or could have."""
        since = self.preloads.get(device)
        preloaded_s = self.world.clock.now - since if since is not None else 0.0
        return max(preloaded_s, self.begun_s(message))

    def _is_under_way(self, message: Deploy) -> bool:
        return message.precopied > 0 and message.precopied == self.number

    def _sent(self, message: Deploy) -> float:
        """How much of the state is there, if not as of the last commit. The link has carried it and all
        updates but the last, in turn.
        """
        if not self._is_under_way(message):
            return 0.0
        if self.complete == self.number:
            return 1.0
        whole_s = copy_s(message.transfers, self.profile)
        updates = max(0, message.counters.step - self.began_step - 1)
        left_s = (1 + updates * last_update(self.profile)) * whole_s - self.begun_s(message)
        return min(1.0, max(0.0, 1 - left_s / whole_s)) if whole_s else 1.0
