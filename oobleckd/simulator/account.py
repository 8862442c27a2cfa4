"""Where the time went: every second of every live device is useful, or lost to one cause. It adds up exactly.

Owns the book, in whole nanoseconds of devices. What time is spent on is said when it begins (``spend``), but
for the time of a round: whether that is useful is known when the round is committed (``commit``) or given up
(``roll_back``). Useful is a second in which training makes as much progress as the best plan for the devices
that are alive would; a slower plan loses the difference, which is *degraded*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Whole nanoseconds of devices add up exactly, and a test can say so. (D-simulator-005)
NS = 1_000_000_000

Cause = Literal["detect", "plan", "reconfigure", "copy", "checkpoint", "redone", "degraded", "waiting"]
CAUSES: tuple[Cause, ...] = (
    "detect", "plan", "reconfigure", "copy", "checkpoint", "redone", "degraded", "waiting",
)  # fmt: skip
What = Literal["round", "detect", "plan", "reconfigure", "copy", "checkpoint", "waiting"]


@dataclass(slots=True)
class Tally:
    """Device-nanoseconds and nanoseconds of something that is not booked yet."""

    devices_ns: int = 0
    elapsed_ns: int = 0

    def add(self, devices_ns: int, elapsed_ns: int) -> None:
        """Add device-nanoseconds and nanoseconds."""
        self.devices_ns += devices_ns
        self.elapsed_ns += elapsed_ns


@dataclass(slots=True)
class BookedStretch:
    """Committed steps that a rollback may still take: up to ``step``, with what they were booked as."""

    step: int
    useful_ns: int
    degraded_ns: int


@dataclass(slots=True)
class Account:
    """``num_devices`` are alive now. ``lost_ns`` by cause; ``total_ns`` is always useful and lost and what is
    open together.

    ``open``: what the round under way has taken so far, by what was going on. ``stretches``: what a rollback
    may take, oldest first.
    """

    num_devices: int = 0
    what: What = "waiting"
    now_ns: int = 0
    total_ns: int = 0
    useful_ns: int = 0
    lost_ns: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    open: dict[What, Tally] = field(default_factory=dict)
    stretches: list[BookedStretch] = field(default_factory=list)

    def until(self, now: float) -> None:
        """Time has passed."""
        now_ns = round(now * NS)
        elapsed_ns = now_ns - self.now_ns
        assert elapsed_ns >= 0, "time does not run backwards"
        self.now_ns = now_ns
        devices_ns = elapsed_ns * self.num_devices
        self.total_ns += devices_ns
        if self.what == "round" or (self.open and self.what in {"detect", "plan"}):
            self.open.setdefault(self.what, Tally()).add(devices_ns, elapsed_ns)
        else:
            self.lost_ns[self.what] += devices_ns

    def alive(self, now: float, num_devices: int) -> None:
        """Book ``num_devices`` live devices from ``now`` on."""
        self.until(now)
        self.num_devices = num_devices

    def spend(self, now: float, what: What) -> None:
        """From now on time is spent on ``what``; while a round is open *detect* and *plan* belong to it."""
        self.until(now)
        self.what = what

    def commit(
        self, now: float, step: int, normal_s: float, best_s: float, checkpoint_s: float = 0.0
    ) -> None:
        """The open round is committed, up to ``step``; with undisturbed ones before it, in one go.

        ``normal_s``: what they take undisturbed, ``best_s`` with the best plan for the devices that are
        alive. What they took longer is lost: to the checkpoint in them first, then to finding out about a
        loss and deciding, and the rest to work that was done again.
        """
        self.until(now)
        # Useful is what the best plan for the live devices would make of a second: against the whole
        # cluster's pace a smaller one with fewer bubbles would have a negative loss. (D-simulator-004)
        left_ns = sum(tally.devices_ns for tally in self.open.values())
        elapsed_ns = sum(tally.elapsed_ns for tally in self.open.values())
        took = {what: tally.elapsed_ns for what, tally in self.open.items()}
        self.open = {}
        over_ns = max(0, elapsed_ns - round(normal_s * NS))
        extra: dict[Cause, int] = {}
        limits: tuple[tuple[Cause, int], ...] = (
            ("checkpoint", round(checkpoint_s * NS)),
            ("detect", took.get("detect", 0)),
            ("plan", took.get("plan", 0)),
            ("redone", over_ns),
        )
        for cause, max_ns in limits:
            extra[cause] = min(over_ns - sum(extra.values()), max_ns)
        for cause, part_ns in extra.items():
            share_ns = min(
                left_ns, part_ns * self.num_devices
            )  # it was longer at its end, when the dead no longer counted
            self.lost_ns[cause] += share_ns
            left_ns -= share_ns
        useful_ns = left_ns if best_s >= normal_s else int(left_ns * (best_s / normal_s))
        self.useful_ns += useful_ns
        self.lost_ns["degraded"] += left_ns - useful_ns
        self.stretches.append(BookedStretch(step, useful_ns, left_ns - useful_ns))

    def safe(self, step: int) -> None:
        """No rollback goes behind ``step``."""
        self.stretches = [stretch for stretch in self.stretches if stretch.step > step]

    def abandon(self, now: float) -> None:
        """The open round will not be committed: what was done of it is to be done again."""
        self.until(now)
        for what, tally in self.open.items():
            cause: Cause = "redone" if what == "round" else what
            self.lost_ns[cause] += tally.devices_ns
        self.open = {}

    def roll_back(self, now: float, step: int) -> None:
        """Back to ``step``: what was committed after it is to be done again, and so is the open round."""
        self.abandon(now)
        while self.stretches and self.stretches[-1].step > step:
            gone = self.stretches.pop()
            self.useful_ns -= gone.useful_ns
            self.lost_ns["degraded"] -= gone.degraded_ns
            self.lost_ns["redone"] += gone.useful_ns + gone.degraded_ns

    def close(self, now: float) -> None:
        """The run is over; an open round counts by nobody, as at a loss of all."""
        self.abandon(now)
        assert self.useful_ns + sum(self.lost_ns.values()) == self.total_ns, "it adds up"

    @property
    def lost_s(self) -> Mapping[Cause, float]:
        """Device-seconds by cause."""
        return {cause: lost_ns / NS for cause, lost_ns in self.lost_ns.items()}
