"""Op times that devices told of, in memory: how some of the last steps ran.

Owns which are kept, within bounds, and the rate at which they are told. Not durable, and nothing is decided
by them. What a device told stays packed until somebody looks (``schedules``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import Detours, Layout, Plan
from oobleckd.protocol.messages import OpTimes
from oobleckd.protocol.parts import Counters

MAX_STEPS = 64
"""Of a job."""
MAX_BYTES = 32 * 2**20
"""Of all jobs."""
MESSAGE_BYTES = 400
"""Of a message, besides its ops."""
MIN_S = 1.0
"""Steps are told so far apart, but at least every ``MAX_APART``-th."""
MESSAGES_PER_S = 2000
"""Further apart where there are more devices: each tells by itself."""
MAX_APART = 10


def every(job: JobRecord, planned_s: float, num_devices: int) -> int:
    """Of how many rounds one is told: as the job's steps take lately, else as ``planned_s``, by so many
    devices.
    """
    ordered = sorted(job.step_s)
    step_s = ordered[len(ordered) // 2] if ordered else planned_s
    min_s = max(MIN_S, num_devices / MESSAGES_PER_S)
    if step_s * MAX_APART <= min_s:
        return MAX_APART
    # The daemon says of which rounds op times are told: devices that chose by their own clocks would tell
    # of different ones, and none could be seen whole. (D-watching-001)
    return max(1, math.ceil(min_s / step_s))


@dataclass(slots=True)
class Sample:
    """A round: what ran it, and what devices ``told`` of it so far. ``gone``: devices of the layout that were
    lost by then. ``waited``: as ``schedules.share_waited`` had it when so many had told.
    """

    job: str
    counters: Counters
    epoch: int
    layout: Layout
    plan: Plan
    detours: Detours | None
    gone: tuple[str, ...]
    at: float
    repaired: bool = False
    told: dict[str, OpTimes] = field(default_factory=dict)
    waited: tuple[int, float] = (-1, 0.0)

    @property
    def num_bytes(self) -> int:
        """What it takes, nearly all of which is ops."""
        return sum(map(_bytes, self.told.values()))

    @property
    def complete(self) -> bool:
        """Whether all live devices have told."""
        return len(self.told) + len(self.gone) >= len(self.layout.holdings)


@dataclass(slots=True)
class Samples:
    """``by_job``: job -> round -> its sample, oldest first."""

    by_job: dict[str, dict[int, Sample]] = field(default_factory=dict)
    num_bytes: int = 0

    def of(self, job: str) -> tuple[Sample, ...]:
        """Those of ``job``, oldest first."""
        rounds = self.by_job.get(job, {})
        return tuple(rounds[round_] for round_ in sorted(rounds))

    def step(self, job: str, step: int) -> Sample | None:
        """The last round of ``step``, numbered from 1, that is known; of 0 the newest step that all have told
        of, or the newest.
        """
        found = [each for each in self.of(job) if step in {0, each.counters.step + 1}]
        if not step:
            found = [each for each in found if each.complete] or found
        return found[-1] if found else None

    def add(self, message: OpTimes, new: Sample) -> None:
        """``message`` of the round that ``new`` names, which counts if it is the first one of it."""
        rounds = self.by_job.setdefault(message.job, {})
        sample = rounds.setdefault(message.counters.round, new)
        before = sample.told.get(message.device)
        self.num_bytes += _bytes(message) - (_bytes(before) if before is not None else 0)
        # Packed until somebody looks: thousands of devices tell and few look, so the loop passes bytes on.
        # (D-watching-002)
        sample.told[message.device] = message
        sample.repaired = sample.repaired or message.repaired
        while len(rounds) > MAX_STEPS:
            self._drop(message.job)
        while self.num_bytes > MAX_BYTES and len(self.by_job) + len(rounds) > 2:
            self._drop(next(iter(self.by_job)))

    def _drop(self, job: str) -> None:
        """The oldest of ``job``."""
        rounds = self.by_job[job]
        self.num_bytes -= rounds.pop(min(rounds)).num_bytes
        if not rounds:
            del self.by_job[job]


def _bytes(message: OpTimes) -> int:
    return MESSAGE_BYTES + len(message.ops)
