"""What is kept for replay, and when: snapshots, all changes between, and some steps op by op.

Owns the rhythm and what a snapshot is; the file is ``past``'s. Snapshots are made on the event loop, from
views that nobody changes, and encoded and written in the store's thread, which lays out steps op by op, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable

from oobleckd.core import view, watching
from oobleckd.core.context import Core
from oobleckd.core.samples import Sample
from oobleckd.daemon.past import PastBatch, PastStore
from oobleckd.protocol.api import Status
from oobleckd.protocol.changes import Change
from oobleckd.protocol.watch import Snapshot

SNAPSHOT_EVERY_S = 30.0
FLUSH_EVERY_S = 1.0
SOON_S = 2.0
"""After something that no change says in full, such as a node that is lost, there is another snapshot by
then.
"""
NODES_A_S = 100
"""Later where there are more nodes than that many for each second: their snapshots are large."""
_SAID_IN_FULL = frozenset({"step", "daemon"})
_MAX_REPAIRED = 4  # repaired rounds, of those between two flushes
_FEW_CHANGES = 2000  # more are written at once
_log = logging.getLogger(__name__)


class Recorder:
    """``start`` after the service's parts live; ``add`` hears every change."""

    def __init__(
        self, store: PastStore, core: Core, status: Callable[[], Status], now: Callable[[], float]
    ) -> None:
        self.store = store
        self._core, self._status, self._now = core, status, now
        self._changes: list[Change] = []
        self._shown: dict[str, int] = {}  # job -> the last round that was written op by op
        self._stale = False  # something happened that the last snapshot has not, and no change says in full
        self._taken_at = self._shown_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to record, on the running event loop."""
        self.store.start()
        self._guarded(self._snapshot)
        self._task = asyncio.create_task(self._run(), name="recorder")

    async def close(self) -> None:
        """A last snapshot, and the end of the thread."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._guarded(self._snapshot)
        await asyncio.to_thread(self.store.close)

    def add(self, change: Change) -> None:
        """A change was published."""
        self._changes.append(change)
        self._stale = self._stale or change.kind not in _SAID_IN_FULL
        if len(self._changes) >= _FEW_CHANGES:
            self._guarded(self._flush)

    async def reach(self) -> None:
        """Until all up to now is on disk, for who reads it next."""
        self._flush()
        await asyncio.wrap_future(self.store.reached())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            self._guarded(self.tick)

    def tick(self) -> None:
        """A snapshot if it is time for one, else what has gathered."""
        soon_s = max(SOON_S, len(self._core.members.nodes) / NODES_A_S)
        due_s = min(soon_s, SNAPSHOT_EVERY_S) if self._stale else SNAPSHOT_EVERY_S
        if self._now() >= self._taken_at + due_s:
            self._snapshot()
        else:
            self._flush()

    @staticmethod
    def _guarded(act: Callable[[], None]) -> None:
        """Run it, and log what goes wrong: replay must not stop training."""
        try:
            act()
        except Exception:  # noqa: BLE001 - the recorder's boundary
            _log.exception("replay: something is not recorded")

    def _flush(self) -> None:
        """What has gathered, in front of what comes."""
        changes, self._changes = self._changes, []
        samples = self._repaired()
        if changes or samples:
            self.store.put(PastBatch(changes=changes, samples=samples))

    def _snapshot(self) -> None:
        self._flush()
        now, self._stale = self._now(), False
        regular = now >= self._shown_at + SNAPSHOT_EVERY_S
        newest = self._newest() if regular else []
        self._taken_at, self._shown_at = now, now if regular else self._shown_at
        self.store.put(PastBatch(snapshot=snapshot(self._core, self._status(), now), samples=newest))

    def _repaired(self) -> list[Sample]:
        """Rounds that made up for a loss, of which all survivors have told."""
        found = [
            sample
            for job in self._core.samples.by_job
            for sample in self._core.samples.of(job)
            if sample.repaired and sample.complete and sample.counters.round > self._shown.get(job, -1)
        ]
        return [self._written(sample) for sample in found[-_MAX_REPAIRED:]]

    def _newest(self) -> list[Sample]:
        """The newest step of each job that trains, unless it is written already."""
        found = []
        for job in self._core.samples.by_job:
            sample = self._core.samples.step(job, 0)
            if sample is not None and sample.counters.round > self._shown.get(job, -1):
                found.append(self._written(sample))
        return found

    def _written(self, sample: Sample) -> Sample:
        """As it is now: others may yet tell of it."""
        self._shown[sample.job] = sample.counters.round
        return dataclasses.replace(sample, told=dict(sample.told))


def snapshot(core: Core, status: Status, at: float) -> Snapshot:
    """Everything that is listed, at ``at``."""
    job = core.run.job if core.run is not None else None
    return Snapshot(
        at=at,
        seq=core.state.seq,
        status=status,
        jobs=tuple(view.job_views(core)),
        nodes=tuple(view.node_views(core)),
        pipelines=tuple(view.pipeline_views(job)) if job is not None else (),
        templates=tuple(view.template_views(job)) if job is not None else (),
        incidents=tuple(view.incident_views(core)),
        layers=tuple(watching.layer_views(job)) if job is not None else (),
    )
