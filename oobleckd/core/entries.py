"""The journal: every durable fact as a tagged struct, and the one reducer that applies them.

Live records and the replay after a restart go through the same ``apply``, so the state after a restart is
the state before it. Owns the facts; the living state they build is in ``state``, where they are written in
``daemon.journal``.
"""

from __future__ import annotations

from typing import Literal, assert_never

import msgspec

from oobleckd.core.blame import Dispute
from oobleckd.core.state import LEAST_KEPT, RECENT_STEPS, JobRecord, Kept, State, Step, Written
from oobleckd.core.states import FINAL
from oobleckd.protocol.api import Change, IncidentView, JobState
from oobleckd.protocol.corruption import Odd
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters, FailureCause
from planner.plan import Detours, Layout, Plan, Template
from planner.policy import Setup
from planner.profile import Profile


class Entry(msgspec.Struct, frozen=True, tag=True):
    """Base of everything in the journal. ``at`` is POSIX seconds."""


class JobSubmitted(Entry, frozen=True):
    """A job was queued; its training starts at ``counters`` from ``source`` ("init" or a checkpoint folder)."""

    job: str
    spec: Job
    source: str
    counters: Counters
    at: float


class JobStateChanged(Entry, frozen=True):
    """The job's state in the table, the reason shown with it, and, where it failed, the cause for programs."""

    job: str
    state: JobState
    reason: str
    at: float
    cause: FailureCause = ""


class PauseAsked(Entry, frozen=True):
    """Whether a user wants the job to stand still."""

    job: str
    paused: bool


class ProfileMeasured(Entry, frozen=True):
    """Costs of a model on a kind of device, under the core's own ``key``."""

    key: str
    profile: Profile


class TemplatesMade(Entry, frozen=True):
    """What the policy prepared for the job."""

    job: str
    setup: Setup
    templates: tuple[Template, ...]


class EpochRaised(Entry, frozen=True):
    """``epoch`` may be used from now on. ``dead``: all lost devices of the layout in force."""

    job: str
    epoch: int
    dead: tuple[str, ...]
    why: str
    at: float


class Restarted(Entry, frozen=True):
    """A daemon began anew. One ``epoch`` may have been told of which the journal knows nothing: none up to it is used."""

    epoch: int
    at: float


class LayoutDeployed(Entry, frozen=True):
    """All devices are ready: ``layout`` is in force. ``lives``: device -> the life that holds its layers.

    ``offered``: the nodes that the plan was made for (some may be idle in it).
    """

    job: str
    layout: Layout
    plan: Plan
    counters: Counters
    lives: dict[str, str]
    offered: tuple[str, ...]
    at: float


class Detoured(Entry, frozen=True):
    """The job goes on without its dead: ``detours`` stand beside the routes of the layout in force.

    No plan has been made for those who are left: what the plan in force was offered does not count any more.
    """

    job: str
    epoch: int
    detours: Detours
    at: float


class StepEntry(Entry, frozen=True):
    """A committed round. ``seq`` is that of the change that announced it."""

    job: str
    counters: Counters
    outcome: str
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    ledger: str
    step_s: float
    at: float
    seq: int


class RolledBack(Entry, frozen=True):
    """A layer's last copy is gone, or the policy rolls back: training goes on at ``counters`` from ``source``; later steps do not count."""

    job: str
    source: str
    counters: Counters
    steps_lost: int
    at: float


class Released(Entry, frozen=True):
    """The job's state is in a checkpoint only; no device holds it any more."""

    job: str
    source: str
    at: float


class CheckpointWritten(Entry, frozen=True):
    """A complete checkpoint of ``counters`` lies in ``directory``."""

    job: str
    counters: Counters
    directory: str
    at: float


class InputsFixed(Entry, frozen=True):
    """What the job reads: whoever has another text takes no part. Said again where more of it is known."""

    job: str
    inputs: Inputs
    at: float


class CheckpointChecked(Entry, frozen=True):
    """All who read for the checkpoint of ``counters``, and for those before it, have found afterwards that their text was the right one."""

    job: str
    counters: Counters
    at: float


class IncidentOpened(Entry, frozen=True):
    """A recovery began."""

    incident: IncidentView


class IncidentClosed(Entry, frozen=True):
    """A recovery is over."""

    incident: IncidentView


class NodeDrained(Entry, frozen=True):
    """A node is (``undo``: no longer) kept out of plans."""

    node: str
    reason: str
    undo: bool
    at: float


class CorruptionFound(Entry, frozen=True):
    """Bits were wrong at the boundary before ``step``: holders did not agree (``odds``); these devices are to blame, or nobody could tell."""

    job: str
    step: int
    odds: tuple[Odd, ...]
    named: tuple[str, ...]
    at: float


class CorruptionSettled(Entry, frozen=True):
    """``step`` was computed again: these devices had been wrong, or (none) all who had disagreed."""

    job: str
    step: int
    named: tuple[str, ...]
    at: float


class Noted(Entry, frozen=True):
    """A change that was announced, for ``story`` and for sequence numbers that go on after a restart.

    ``data``: key -> JSON, as bytes, since the raw JSON of a ``Change`` fits into no other encoding.
    """

    seq: int
    at: float
    kind: str
    level: Literal["debug", "info", "warn", "error"]
    text: str
    story: tuple[str, ...]
    data: dict[str, bytes]


def note(change: Change) -> Noted:
    """The entry of an announced change."""
    data = {key: bytes(raw) for key, raw in change.data.items()}
    return Noted(change.seq, change.at, change.kind, change.level, change.text, change.story, data)


AnyEntry = (
    JobSubmitted
    | JobStateChanged
    | PauseAsked
    | ProfileMeasured
    | TemplatesMade
    | EpochRaised
    | Restarted
    | LayoutDeployed
    | Detoured
    | StepEntry
    | RolledBack
    | Released
    | CheckpointWritten
    | InputsFixed
    | CheckpointChecked
    | IncidentOpened
    | IncidentClosed
    | NodeDrained
    | CorruptionFound
    | CorruptionSettled
    | Noted
)


def apply(state: State, entry: AnyEntry) -> None:
    """Change ``state`` by one fact."""
    match entry:
        case JobSubmitted():
            state.jobs[entry.job] = JobRecord(
                entry.job,
                entry.spec,
                entry.at,
                entry.source,
                entry.counters,
                entry.counters,
                origin=entry.source,
            )
        case ProfileMeasured():
            state.profiles[entry.key] = entry.profile
        case NodeDrained():
            if entry.undo:
                state.drained.pop(entry.node, None)
            else:
                state.drained[entry.node] = entry.reason
        case IncidentOpened() | IncidentClosed():
            state.incidents[entry.incident.id] = entry.incident
            _incident(state, entry)
        case Noted():
            state.seq = max(state.seq, entry.seq)
            data = {key: msgspec.Raw(raw) for key, raw in entry.data.items()}
            change = Change(entry.seq, entry.at, entry.kind, entry.level, entry.text, entry.story, data)
            state.history.append(change)
        case EpochRaised():
            state.epoch = max(state.epoch, entry.epoch)
            state.jobs[entry.job].epoch = entry.epoch
            _lost(state.jobs[entry.job], entry)
        case Restarted():
            state.epoch = max(state.epoch, entry.epoch)
        case StepEntry():
            state.seq = max(state.seq, entry.seq)
            _step(state.jobs[entry.job], entry)
        case _:
            _apply_to_job(state.jobs[entry.job], entry)


_OfJob = (
    JobStateChanged
    | PauseAsked
    | TemplatesMade
    | LayoutDeployed
    | Detoured
    | RolledBack
    | Released
    | CheckpointWritten
    | InputsFixed
    | CheckpointChecked
    | CorruptionFound
    | CorruptionSettled
)


def _incident(state: State, entry: IncidentOpened | IncidentClosed) -> None:
    job = state.jobs.get(entry.incident.job)
    if job is None:
        return
    if isinstance(entry, IncidentOpened):
        job.book.opened()
    else:
        job.book.closed(entry.incident, job.counters.step - 1)


def _lost(job: JobRecord, entry: EpochRaised) -> None:
    """Who was given up may be back in the same life: it reads for the job no more all the same."""
    job.dead = entry.dead
    job.readers = {device: life for device, life in job.readers.items() if device not in entry.dead}
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
            job.paused = entry.paused
        case TemplatesMade():
            job.setup, job.templates = entry.setup, entry.templates
        case LayoutDeployed():
            job.layout, job.plan, job.lives, job.readers = entry.layout, entry.plan, entry.lives, entry.lives
            job.dead, job.settled, job.detours = (), (), None
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
            job.fence, job.began = job.epoch, entry.counters.round
            job.rolled_back_at.append(entry.at)
            job.written = [each for each in job.written if each.until <= entry.counters.step]
            job.steps = [step for step in job.steps if step.step < entry.counters.step]
            _way_back(job, entry.counters.step)
            job.book.rolled_back(entry.at, entry.counters.step)
        case Released():
            job.undeploy(entry.source)
        case CheckpointWritten():
            job.checkpoint, job.checkpoint_counters = entry.directory, entry.counters
            _keep(job, Kept(entry.directory, entry.counters))
            job.book.safe(entry.counters.step)
            _written(job, entry)
        case InputsFixed() | CheckpointChecked():
            _of_inputs(job, entry)
        case CorruptionFound() | CorruptionSettled():
            _dispute(job, entry)
        case _:
            assert_never(entry)


def _keep(job: JobRecord, new: Kept) -> None:
    """The newest are on the disk, and the newest of which it is known that its text was right; that from which the job goes on is known."""
    older, kept = job.kept, [*job.kept, new][-max(LEAST_KEPT, job.spec.checkpoint.keep) :]
    checked = [each for each in older if each.checked][-1:]
    base = [each for each in older if each.directory == job.source and not each.checked]
    job.kept = [*(each for each in (*checked, *base) if each not in kept), *kept]


def _of_inputs(job: JobRecord, entry: InputsFixed | CheckpointChecked) -> None:
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
        job.disputes = (*job.disputes, Dispute(entry.step, entry.odds))


def _way_back(job: JobRecord, step: int) -> None:
    """Of checkpoints only those count whose state the history that goes on comes from."""
    job.kept = [kept for kept in job.kept if kept.counters.step <= step]
    newest = job.kept[-1] if job.kept else Kept("", Counters())
    job.checkpoint, job.checkpoint_counters = newest.directory, newest.counters


def _written(job: JobRecord, entry: CheckpointWritten) -> None:
    """Between which steps a checkpoint was written, and for how long: what it cost shows in these."""
    index = job.index_of(entry.counters.step - 1)
    if entry.counters.step > job.start.step and index < len(job.steps):
        took_s = max(0.0, entry.at - job.steps[index].at)
        job.written = [*job.written[-RECENT_STEPS:], Written(entry.counters.step, job.counters.step, took_s)]


def _step(job: JobRecord, entry: StepEntry) -> None:
    was = entry.counters
    repeated, applied = entry.outcome == "repeated", entry.outcome == "applied"
    job.losses[was.round] = entry.loss
    job.counters = Counters(was.round + 1, was.step + (not repeated), was.applied + applied)
    job.step_s.append(entry.step_s)
    if not repeated:
        job.book.step(entry.at, was.step)
        job.steps.append(
            Step(
                was.step,
                entry.loss,
                entry.grad_norm,
                entry.lr,
                entry.samples,
                entry.ledger,
                entry.outcome,
                entry.epoch,
                entry.at,
                entry.step_s,
            )
        )
