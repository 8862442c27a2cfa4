"""The past as facts: what a moment of it looked like, and what came until the next one. Pure.

The daemon's ``Past`` is a snapshot and the changes after it; ``Walk`` goes along it, so that live data, a
time of day and a file end in the same fold and the same screens. Does not load anything (``replay``).
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleckd.console.facts import ChangesHeard, Fetched, PastHistory, Rewound, Watched
from oobleckd.console.model import shown_job
from oobleckd.protocol.watch import Past, SampledSteps, ScheduleView


@dataclass(slots=True)
class Walk:
    """A place ``at`` in a ``past``. ``told``: how many changes came by then, ``schedule``: the index of the
    newest one.
    """

    past: Past
    at: float
    told: int = 0
    schedule: int = -1

    def holds(self, at: float) -> bool:
        """Whether this past says what was at ``at``."""
        return self.past.snapshot.at <= at <= self.past.until

    def begin(self, at: float, playing: bool) -> Rewound:
        """The picture of ``at``, from the snapshot on."""
        self.told, self.schedule, self.at = 0, -1, self.past.snapshot.at
        # Snapshot and changes go through the fold that live data go through: the screens at a time cannot
        # differ from what they showed then. (D-console-004)
        return self._go(at, playing, (*_start(self.past), *self._schedules(at)))

    def onward(self, at: float, playing: bool) -> Rewound:
        """What came since the moment shown, up to ``at``."""
        if at < self.at:
            return self.begin(at, playing)
        return self._go(at, playing, ())

    def seen(self, at: float) -> ScheduleView | None:
        """The newest schedule by ``at`` that was not told yet."""
        known = [i for i, schedule in enumerate(self.past.schedules) if schedule.at <= at]
        if not known or known[-1] == self.schedule:
            return None
        self.schedule = known[-1]
        return self.past.schedules[self.schedule]

    def _go(
        self, at: float, playing: bool, start: tuple[Fetched | PastHistory | ChangesHeard | Watched, ...]
    ) -> Rewound:
        changes = self.past.changes
        first = last = self.told
        while last < len(changes) and changes[last].at <= at:
            last += 1
        self.told, self.at = last, at
        sampled = tuple(schedule.at for schedule in self.past.schedules)
        return Rewound(at, self.past.begins, self.past.until, playing, start, changes[first:last], sampled)

    def _schedules(self, at: float) -> tuple[Watched, ...]:
        found = self.seen(at)
        if found is None:
            return ()
        steps = tuple(schedule.step for schedule in self.past.schedules if schedule.measured)
        return (Watched(at, schedules=SampledSteps(found.job, steps), schedule=found),)


def _start(past: Past) -> tuple[Fetched | PastHistory | ChangesHeard | Watched, ...]:
    """The snapshot, as if it had been fetched, and what is known of the time before it."""
    shot = past.snapshot
    job = shown_job(shot.jobs)
    return (
        Fetched(shot.at, shot.status, shot.jobs, shot.nodes, shot.pipelines, shot.templates, shot.incidents),
        *((PastHistory(shot.at, job.id, past.steps),) if job is not None and past.steps else ()),
        *(ChangesHeard(shot.at, change) for change in past.before),
        Watched(shot.at, layers=shot.layers),
    )
