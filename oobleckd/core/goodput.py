"""Where a job's time went, from its journal: every second of every live device is useful, evaluates, or is
lost to one cause.

Owns the book and its rules; ``entries`` calls it with facts, so that a restarted daemon has the same book.
Time is booked when a step is committed. While an incident is open nothing is booked until it is over: then
what took longer than its steps would have is lost to its phases, at most for as long as each took, and the
rest to work that was done again. A step of a plan that is slower for each of its devices than the best one so
far was loses the difference, which is *degraded*; where the batch grows that best one counts as longer by as
much, until steps show better. A step that was skipped is lost as a whole. Bubbles are not
in the journal: the share that devices tell is taken off what is useful (``view``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobState

Cause = Literal["detect", "plan", "reconfigure", "copy", "redone", "skipped", "degraded", "waiting"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_PHASES: tuple[Cause, ...] = ("detect", "plan", "reconfigure", "copy")
_STANDING_STILL = frozenset({"waiting", "paused"})
_RECENT = 20
MAX_STRETCHES = 2000
"""A job that writes no checkpoint would have one for every step."""
_ENOUGH = 5  # steps after which a plan's pace is known


class Stretch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A booked step that a rollback may still take, or several up to it: device-seconds that were useful, and
    those that were degraded or skipped, or evaluated.
    """

    step: int
    useful_s: float
    degraded_s: float
    skipped_s: float
    evaluated_s: float = 0.0


@dataclass(slots=True)
class Book:
    """Device-seconds of a job. ``num_devices`` live now; ``evaluated_s`` and ``lost_s`` by cause.

    Since the last booking: ``elapsed_s`` and ``devices_s``, of them ``idle_s`` and ``idle_devices_s``
    standing still, and ``steps`` committed, ``skipped`` of them without an update, and ``evaluations``:
    rounds that evaluated, which take ``evaluation_s``. ``recent``: seconds of
    undisturbed steps of the present layout; ``best_device_s``: device-seconds of a step with the best layout
    so far, ``best_s`` the fewest seconds, measured at ``best_at``. ``changed``: the layout did since the last
    booking. ``stretches``: since the last checkpoint, of a job that is not over. ``batch``: sequences of the
    steps that the paces are of.
    """

    num_devices: int = 0
    now: float = 0.0
    idle: bool = False
    incident: bool = False
    changed: bool = False
    elapsed_s: float = 0.0
    devices_s: float = 0.0
    idle_s: float = 0.0
    idle_devices_s: float = 0.0
    steps: int = 0
    skipped: int = 0
    total_s: float = 0.0
    useful_s: float = 0.0
    lost_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    recent: deque[float] = field(default_factory=deque)
    pace_s: float = 0.0
    best_s: float = 0.0
    best_at: float = 0.0
    best_device_s: float = 0.0
    stretches: list[Stretch] = field(default_factory=list)
    evaluated_s: float = 0.0
    evaluations: int = 0
    evaluation_s: float = 0.0
    batch: int = 0

    def __post_init__(self) -> None:
        self.recent = deque(self.recent, maxlen=_RECENT)

    def until(self, at: float) -> None:
        """Time has passed; clocks of two incarnations of a daemon may differ, and it never runs backwards
        here.
        """
        passed_s = max(0.0, at - self.now) if self.num_devices else 0.0
        self.now = max(at, self.now)
        devices_s = passed_s * self.num_devices
        self.elapsed_s += passed_s
        self.devices_s += devices_s
        self.total_s += devices_s
        if self.idle:
            self.idle_s += passed_s
            self.idle_devices_s += devices_s

    def devices(self, at: float, num_devices: int) -> None:
        """Book ``num_devices`` live devices from ``at`` on."""
        self.until(at)
        self.num_devices = num_devices

    def deployed(self, at: float, num_devices: int) -> None:
        """Another layout is in force."""
        self.devices(at, num_devices)
        self.rerouted()

    def rerouted(self) -> None:
        """Note that steps take another time from now on."""
        self.changed = True
        self.recent.clear()

    def sized(self, batch: int) -> bool:
        """Note that the step to be booked has ``batch`` sequences; whether that is another number than the
        one before it had.
        """
        was, self.batch = self.batch, batch
        if was in {0, batch}:
            return False
        # A larger batch takes at most as much longer as it is larger, since bubbles do not grow: so nothing
        # is lost to a best that nobody reached. Of a smaller one, after a rollback, that says nothing.
        self.recent.clear()
        self.pace_s *= batch / was
        more = batch / was if batch > was else 0.0
        self.best_s, self.best_device_s = self.best_s * more, self.best_device_s * more
        return True

    def state(self, at: float, state: JobState) -> None:
        """The job's state changed; a job that is over stops the clock."""
        self.until(at)
        self.idle = state in _STANDING_STILL
        if state in {"done", "failed", "cancelled"}:
            self._book({}, -1)
            self.num_devices = 0
            self.stretches = []

    def step(self, at: float, step: int, *, skipped: bool = False) -> None:
        """A step is committed; ``skipped``: it made no update."""
        self.until(at)
        self.steps += 1
        self.skipped += skipped
        if self.incident:
            return
        if not (self.changed or self.idle_s) and self.elapsed_s > 0:
            self._keep_pace(self.elapsed_s)
        self._book({}, step)

    def evaluated(self, at: float, step: int) -> None:
        """A round that evaluates is committed, behind ``step``."""
        self.until(at)
        self.evaluations += 1
        if self.incident:
            return
        # Of the newest such round alone: the last one of an evaluation may be shorter, and all that hangs on
        # it is what a loss in the middle of one took. (D-watching-019)
        if not (self.changed or self.idle_s) and self.elapsed_s > 0:
            self.evaluation_s = self.elapsed_s
        self._book({}, step)

    def opened(self) -> None:
        """An incident has begun."""
        self.incident = True

    def closed(self, view: IncidentView, step: int) -> None:
        """Book the incident, which is over at ``step``."""
        self.until(view.at + view.total_s)
        self.incident = False
        self._book(phases_of(view), step)

    def safe(self, step: int) -> None:
        """A checkpoint after ``step`` steps is complete: no rollback goes behind it."""
        self.stretches = [each for each in self.stretches if each.step >= step]

    def rolled_back(self, at: float, step: int) -> None:
        """Back to the state after ``step`` steps: what was booked of later ones is to be done again."""
        self.until(at)
        while self.stretches and self.stretches[-1].step >= step:
            gone = self.stretches.pop()
            self.useful_s -= gone.useful_s
            self.lost_s["degraded"] -= gone.degraded_s
            self.lost_s["skipped"] -= gone.skipped_s
            self.evaluated_s -= gone.evaluated_s
            self.lost_s["redone"] += gone.useful_s + gone.degraded_s + gone.skipped_s + gone.evaluated_s
        self.steps = self.skipped = self.evaluations = 0

    def _keep_pace(self, step_s: float) -> None:
        self.recent.append(step_s)
        # Measured paces, from the journal's facts: a modelled one would book what the model does not know
        # as lost. (D-watching-005)
        self.pace_s = statistics.median(self.recent)
        if len(self.recent) >= _ENOUGH:
            device_s = self.pace_s * self.num_devices
            if not self.best_s or self.pace_s < self.best_s:
                self.best_s, self.best_at = self.pace_s, self.now
            self.best_device_s = min(self.best_device_s or device_s, device_s)

    def _book(self, phases: Mapping[Cause, float], step: int) -> None:
        """Book what has gathered since the last booking."""
        split, evaluated_s = self.split(phases)
        useful_s = self.devices_s - sum(split.values()) - evaluated_s
        for cause, lost_s in split.items():
            self.lost_s[cause] += lost_s
        self.useful_s += useful_s
        self.evaluated_s += evaluated_s
        if self.steps or self.evaluations:
            self.stretches.append(Stretch(step, useful_s, split["degraded"], split["skipped"], evaluated_s))
            if len(self.stretches) > MAX_STRETCHES:
                self._join()
        self.elapsed_s = self.devices_s = self.idle_s = self.idle_devices_s = 0.0
        self.steps, self.skipped, self.evaluations, self.changed = 0, 0, 0, False

    def _join(self) -> None:
        """Make one of the older half: a rollback takes all or none of them."""
        half = MAX_STRETCHES // 2
        old, self.stretches = self.stretches[:half], self.stretches[half:]
        seconds = [(each.useful_s, each.degraded_s, each.skipped_s, each.evaluated_s) for each in old]
        self.stretches.insert(0, Stretch(old[-1].step, *map(math.fsum, zip(*seconds, strict=True))))

    def split(self, phases: Mapping[Cause, float]) -> tuple[dict[Cause, float], float]:
        """Device-seconds lost of what has gathered, by cause, and those that evaluated; the rest is useful.
        ``phases``: seconds of an incident's, if there was one.
        """
        lost = dict.fromkeys(CAUSES, 0.0)
        lost["waiting"] = self.idle_devices_s
        active_s = self.elapsed_s - self.idle_s
        if active_s <= 0:
            return lost, 0.0
        devices = (self.devices_s - self.idle_devices_s) / active_s
        disturbed = bool(phases) or self.incident or self.changed
        normal_s = self.steps * self.pace_s + self.evaluations * self.evaluation_s
        over_s = max(0.0, active_s - normal_s) if disturbed and self.pace_s else 0.0
        rest_s = over_s
        for cause in _PHASES:
            part_s = min(rest_s, phases.get(cause, 0.0))
            lost[cause] += part_s * devices
            rest_s -= part_s
        lost["redone" if phases or self.incident else "reconfigure"] += rest_s * devices
        worked_s = (active_s - over_s) * devices
        evaluated_s = worked_s * self._share_evaluating(normal_s)
        stepped_s = worked_s - evaluated_s
        lost["skipped"] += stepped_s * self.skipped / self.steps if self.steps else 0.0
        lost["degraded"] += (stepped_s - lost["skipped"]) * self._slower()
        return lost, evaluated_s

    def _share_evaluating(self, normal_s: float) -> float:
        """Of the work that has gathered, which takes ``normal_s`` seconds as a rule."""
        if not (self.steps and self.evaluations):
            return 1.0 if self.evaluations else 0.0
        return self.evaluations * self.evaluation_s / normal_s if normal_s else 0.0

    def _slower(self) -> float:
        """The share by which a step now takes more device-seconds than with the best layout so far."""
        device_s = self.pace_s * self.num_devices
        if not device_s or not self.best_device_s or len(self.recent) < _ENOUGH:
            return 0.0
        return max(0.0, 1 - self.best_device_s / device_s)

    @property
    def of_fault_free(self) -> float:
        """Throughput now as a share of the best so far, both measured (1 where too little is known)."""
        if not self.best_s or not self.pace_s:
            return 1.0
        return min(1.0, self.best_s / self.pace_s)


def phases_of(view: IncidentView) -> dict[Cause, float]:
    """Seconds of an incident by what may be lost to them."""
    found: dict[Cause, float] = {}
    for phase in view.phases:
        if phase.phase != "resume":
            found[phase.phase] = found.get(phase.phase, 0.0) + max(0.0, phase.duration_s)
    return found
