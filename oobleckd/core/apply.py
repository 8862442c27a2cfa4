"""The one reducer of the journal: what each fact changes in the living state.

Live records and the replay after a restart go through the same ``apply``, so the state after a restart is the
state before it. Owns no fact (``entries``) and no field of the state (``state``).
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from oobleckd.core import cadence
from oobleckd.core.blame import Dispute
from oobleckd.core.entries import (
    AnyEntry,
    CheckpointChecked,
    CheckpointWritten,
    CorruptionFound,
    CorruptionSettled,
    DataPrepared,
    Detoured,
    DeviceDied,
    EpochRaised,
    Evaluated,
    FolderNoted,
    FolderTaken,
    IncidentClosed,
    IncidentOpened,
    InputsFixed,
    JobDeleted,
    JobStateChanged,
    JobSubmitted,
    KindTrained,
    LayoutDeployed,
    NodeDrained,
    NodeForgotten,
    NodeJoined,
    NodeOver,
    Noted,
    PauseAsked,
    ProfileMeasured,
    RecordsLost,
    Released,
    Restarted,
    RolledBack,
    StepEntry,
    TemplatesMade,
)
from oobleckd.core.state import (
    KEPT_DISPUTES,
    KEPT_INCIDENTS,
    KEPT_LOST_RECORDS,
    KEPT_PROFILES,
    KEPT_ROLLBACKS,
    KEPT_WHOLE,
    MIN_KEPT,
    RECENT_DEATHS,
    RECENT_STEPS,
    Expected,
    JobRecord,
    KeptCheckpoint,
    State,
    Step,
    Written,
)
from oobleckd.core.states import FINAL
from oobleckd.protocol.api import LostRecords
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobparts import with_folders
from oobleckd.protocol.parts import SPIKES, Counters
from oobleckd.protocol.spikes import counters_after


def apply(state: State, entry: AnyEntry) -> None:
    """Change ``state`` by one fact."""
    match entry:
        case JobSubmitted() | JobDeleted():
            _list(state, entry)
        case ProfileMeasured():
            state.profiles[entry.key] = entry.profile
            if len(state.profiles) > KEPT_PROFILES:
                del state.profiles[next(iter(state.profiles))]
        case NodeDrained() | NodeJoined() | NodeOver() | NodeForgotten():
            _node(state, entry)
        case RecordsLost():
            state.lost_records.append(LostRecords(entry.at, entry.what, entry.kept_as))
            del state.lost_records[:-KEPT_LOST_RECORDS]
        case IncidentOpened() | IncidentClosed():
            _incident(state, entry)
        case Noted():
            state.seq = max(state.seq, entry.seq)
            state.history.append(entry)
        case EpochRaised():
            state.epoch = max(state.epoch, entry.epoch)
            state.jobs[entry.job].epoch = entry.epoch
            _lost(state.jobs[entry.job], entry)
        case Restarted():
            state.epoch = max(state.epoch, entry.epoch)
        case StepEntry() | Evaluated():
            state.seq = max(state.seq, entry.seq)
            _round(state.jobs[entry.job], entry)
        case LayoutDeployed() | Detoured() | RolledBack() | Released() | CheckpointWritten():
            _train(state, entry)
        case _:
            _apply_to_job(state.jobs[entry.job], entry)


def _list(state: State, entry: JobSubmitted | JobDeleted) -> None:
    if isinstance(entry, JobDeleted):
        state.jobs[entry.job].deleted = True
        return
    state.jobs[entry.job] = JobRecord(
        entry.job,
        entry.spec if entry.knows_on_nan else _going_on(entry.spec),
        entry.at,
        entry.source,
        entry.counters,
        entry.counters,
        origin=entry.source,
        folder=entry.folder,
    )


def _going_on(spec: Job) -> Job:
    return msgspec.structs.replace(spec, train=msgspec.structs.replace(spec.train, on_nan="skip"))


_OfTraining = LayoutDeployed | Detoured | RolledBack | Released | CheckpointWritten
_OfJob = (
    JobStateChanged
    | PauseAsked
    | DataPrepared
    | FolderTaken
    | TemplatesMade
    | FolderNoted
    | KindTrained
    | DeviceDied
    | InputsFixed
    | CheckpointChecked
    | CorruptionFound
    | CorruptionSettled
)


def _node(state: State, entry: NodeDrained | NodeJoined | NodeOver | NodeForgotten) -> None:
    name = entry.node
    match entry:
        case NodeDrained(undo=True):
            _let_back(state, name)
        case NodeDrained():
            state.drained[name], state.drain_causes[name] = entry.reason, entry.code
        case NodeJoined():
            state.nodes[name] = Expected(entry.host, entry.zone, entry.at)
        case NodeOver(left=False) if name in state.nodes:
            state.nodes[name] = msgspec.structs.replace(
                state.nodes[name], lost=entry.cause, at=entry.at, code=entry.code
            )
        case NodeOver():
            state.nodes.pop(name, None)
        case NodeForgotten():
            state.nodes.pop(name, None)
            _let_back(state, name)
        case _:
            assert_never(entry)


def _let_back(state: State, node: str) -> None:
    """Nobody keeps the node out of plans."""
    state.drained.pop(node, None)
    state.drain_causes.pop(node, None)


def _incident(state: State, entry: IncidentOpened | IncidentClosed) -> None:
    view = entry.incident
    job = state.jobs.get(view.job)
    if view.id not in state.incidents:
        state.num_incidents += 1
        if job is not None:
            job.num_incidents += 1
    state.incidents[view.id] = view
    if len(state.incidents) > KEPT_INCIDENTS:
        del state.incidents[next(iter(state.incidents))]
    if job is None:
        return
    if isinstance(entry, IncidentOpened):
        job.book.opened()
    else:
        job.book.closed(view, job.counters.step - 1)


def _shelve(state: State) -> None:
    """With the first layout of a job less is kept of those that were over before: all is on disk that was
    told before a device was told to train another one.
    """
    over = [job for job in state.jobs.values() if job.final]
    for place, job in enumerate(reversed(over)):
        job.shelve(whole=place < KEPT_WHOLE)


def _lost(job: JobRecord, entry: EpochRaised) -> None:
    """Who was given up may be back in the same incarnation: it reads for the job no more all the same."""
    job.dead = entry.dead
    job.readers = {
        device: incarnation for device, incarnation in job.readers.items() if device not in entry.dead
    }
    if job.layout is not None:
        job.book.devices(entry.at, len(job.survivors()))


def _apply_to_job(job: JobRecord, entry: _OfJob) -> None:
    match entry:
        case JobStateChanged():
            job.state, job.reason, job.cause = entry.state, entry.reason, entry.cause
            job.book.state(entry.at, entry.state)
            if entry.state in FINAL:
                job.finished_at = entry.at
        case PauseAsked():
            job.paused, job.ending = entry.paused, entry.ending
        case DataPrepared():
            job.spec = with_folders(job.spec, entry.folders)
        case FolderTaken():
            job.folder = entry.folder
        case TemplatesMade():
            job.setup, job.templates = entry.setup, entry.templates
        case FolderNoted():
            job.notes = entry.notes
        case KindTrained():
            job.kinds.append(entry.traits)
        case DeviceDied():
            job.deaths = [*job.deaths, entry.died][-RECENT_DEATHS:]
        case InputsFixed() | CheckpointChecked():
            _inputs(job, entry)
        case CorruptionFound() | CorruptionSettled():
            _dispute(job, entry)
        case _:
            assert_never(entry)


def _train(state: State, entry: _OfTraining) -> None:
    job = state.jobs[entry.job]
    match entry:
        case LayoutDeployed():
            if job.deployed_at is None:
                _shelve(state)
            job.layout, job.plan, job.incarnations, job.readers = (
                entry.layout,
                entry.plan,
                entry.incarnations,
                entry.incarnations,
            )
            job.dead, job.settled, job.detours = (), (), None
            if entry.made is not None:
                job.setup, job.templates = entry.made.setup, entry.made.templates
            job.offered, job.counters = entry.offered, entry.counters
            job.deployed_at = entry.at if job.deployed_at is None else job.deployed_at
            job.book.deployed(entry.at, len(entry.layout.holdings))
        case Detoured():
            job.settled, job.detours, job.offered = job.dead, entry.detours, ()
            job.book.rerouted()
        case RolledBack():
            job.undeploy(entry.source)
            job.counters = entry.counters
            job.steps_lost += entry.steps_lost
            sizes, step = job.spec.batch_sizes, entry.counters.step
            job.samples_lost += sizes.before(step + entry.steps_lost) - sizes.before(step)
            job.fence, job.began = job.epoch, entry.counters.round
            job.rolled_back_at = [*job.rolled_back_at, entry.at][-KEPT_ROLLBACKS:]
            cadence.roll_back(job, entry.counters.step)
            job.steps = [step for step in job.steps if step.step < entry.counters.step]
            _rollback(job, entry.counters.step)
            job.evaluations.rolled_back(entry.counters)
            job.book.rolled_back(entry.at, entry.counters.step)
        case Released():
            job.undeploy(entry.source)
        case CheckpointWritten():
            job.checkpoint, job.checkpoint_counters = entry.directory, entry.counters
            newest = job.step_before(entry.counters.step)
            _keep(job, KeptCheckpoint(entry.directory, entry.counters, newest=newest))
            job.book.safe(entry.counters.step)
            _written(job, entry)
        case _:
            assert_never(entry)


def _keep(job: JobRecord, new: KeptCheckpoint) -> None:
    """The newest are on the disk, and the newest of which it is known that its text was right; that from
    which the job goes on is known.
    """
    older, kept = job.kept, [*job.kept, new][-max(MIN_KEPT, job.spec.checkpoint.keep) :]
    checked = [each for each in older if each.checked][-1:]
    base = [each for each in older if each.directory == job.source and not each.checked]
    job.kept = [*(each for each in (*checked, *base) if each not in kept), *kept]


def _inputs(job: JobRecord, entry: InputsFixed | CheckpointChecked) -> None:
    if isinstance(entry, CheckpointChecked):
        upto = entry.counters.round
    else:  # nothing is known of what was read before, by an older version
        upto = -1 if job.inputs else job.counters.round
        job.inputs = entry.inputs
    job.kept = [
        msgspec.structs.replace(kept, checked=kept.checked or kept.counters.round <= upto)
        for kept in job.kept
    ]


def _dispute(job: JobRecord, entry: CorruptionFound | CorruptionSettled) -> None:
    if isinstance(entry, CorruptionSettled):
        job.disputes = tuple(each for each in job.disputes if each.step != entry.step)
    elif entry.named:
        blamed = frozenset(entry.named)
        job.disputes = tuple(each for each in job.disputes if not blamed & each.devices())
    else:
        job.disputes = (*job.disputes, Dispute(entry.step, entry.odds))[-KEPT_DISPUTES:]


def _rollback(job: JobRecord, step: int) -> None:
    """Of checkpoints only those count whose state the history that goes on comes from."""
    job.kept = [kept for kept in job.kept if kept.counters.step <= step]
    newest = job.kept[-1] if job.kept else KeptCheckpoint("", Counters())
    job.checkpoint, job.checkpoint_counters = newest.directory, newest.counters
    if not job.steps and newest.newest is not None and newest.counters.step == step:
        job.steps = [newest.newest]  # it is older than those in memory


def _written(job: JobRecord, entry: CheckpointWritten) -> None:
    """Between which steps a checkpoint was written, and for how long: what it cost shows in these."""
    index = job.index_of(entry.counters.step - 1)
    if entry.counters.step > job.start.step and index < len(job.steps):
        took_s = max(0.0, entry.at - job.steps[index].at)
        job.written = [*job.written[-RECENT_STEPS:], Written(entry.counters.step, job.counters.step, took_s)]
        cadence.measure(job)


def _round(job: JobRecord, entry: StepEntry | Evaluated) -> None:
    if isinstance(entry, StepEntry):
        _step(job, entry)
        return
    job.counters = entry.counters.after("evaluated")
    job.evaluations.add(entry)
    job.book.evaluated(entry.at, entry.counters.step - 1)


def _step(job: JobRecord, entry: StepEntry) -> None:
    was = entry.counters
    job.keep_loss(was.round, entry.loss)
    job.counters = counters_after(job.spec, was, entry.outcome, entry.why, entry.loss)
    if job.book.sized(job.spec.batch_sizes.size(was.step)):
        job.step_s.clear()  # what steps take of late is of steps of this size
    job.step_s.append(entry.step_s)
    job.num_skipped += entry.outcome == "skipped"
    job.num_spiked += entry.why in SPIKES
    if entry.outcome != "repeated":
        job.book.step(entry.at, was.step, skipped=entry.outcome == "skipped")
        job.keep(step_of(entry))
        if job.measuring:
            cadence.measure(job)


def step_of(entry: StepEntry) -> Step:
    """The step that ``entry`` is of."""
    return Step(
        entry.counters.step,
        entry.loss,
        entry.grad_norm,
        entry.lr,
        entry.samples,
        entry.ledger,
        entry.outcome,
        entry.epoch,
        entry.at,
        entry.step_s,
        entry.why,
        entry.routers,
    )
