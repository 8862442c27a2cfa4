"""Checkpoints as devices write them: parts collected until all buckets are there, then made whole.

Devices write beside training, the state after the same round; this owns the book-keeping, and whether another
one is wanted. One whose writer died before all its parts were told stays incomplete, which is certain once a
newer one is complete.
"""

from __future__ import annotations

import sys

from oobleckd.core import cadence, inputs, room
from oobleckd.core.context import Core
from oobleckd.core.entries import CheckpointWritten, FolderTaken
from oobleckd.core.events import FolderFound, ManifestWritten, SetAside, WriteManifest
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.planner.plan import node_of
from oobleckd.protocol.agentmessages import Ack
from oobleckd.protocol.changes import (
    CheckpointComplete,
    CheckpointDamaged,
    CheckpointFolder,
    CheckpointGivenUp,
    CheckpointIncomplete,
    CheckpointSkipped,
)
from oobleckd.protocol.checkpoint import DAMAGED, manifest_of
from oobleckd.protocol.checkpointmessages import CheckpointFailed, CheckpointPart
from oobleckd.protocol.messages import DeviceFailed
from oobleckd.protocol.parts import Counters
from oobleckd.words import count

STALE_ROUNDS = 50


def told(core: Core, message: CheckpointPart | CheckpointFailed) -> None:
    """Take in that a device has written a part, or cannot."""
    if isinstance(message, CheckpointPart):
        on_part(core, message)
    else:
        room.on_failed(core, message)


def on_part(core: Core, message: CheckpointPart) -> None:
    """Note that one bucket is written; with the last one the checkpoint is complete."""
    job, run = core.state.jobs.get(message.job), core.run
    if job is None or run is None or run.job is not job:
        core.tell(message.device, Ack(message.job, message.counters.round))
        return
    known = job.checkpoint and message.counters.round <= job.checkpoint_counters.round
    # A device tells a step before the parts that follow it: others are of a history that was given up.
    stale = message.counters.round > job.counters.round or message.counters.step > job.counters.step
    if known or stale or message.counters.round <= job.began or room.given_up(run, message):
        ack(core, job, message.device)
        return
    if message.directory in run.completing:
        return  # acknowledged once the checkpoint is on disk
    parts = run.parts.setdefault(message.directory, {})
    if any(part.counters.round > message.counters.round for part in parts.values()):
        return  # told late, of an abandoned try at the same step
    if any(part.counters.round < message.counters.round for part in parts.values()):
        parts.clear()
    parts[message.bucket] = message
    if len(parts) == message.num_buckets:
        manifest = manifest_of(job.spec, [parts[bucket] for bucket in sorted(parts)], job.inputs)
        keep = job.spec.checkpoint.keep
        run.completing.add(message.directory)
        spared = _spared(core, job)
        core.outbox.append(WriteManifest(message.directory, manifest, keep, spared, job.id))


def _spared(core: Core, job: JobRecord) -> tuple[str, ...]:
    """Checkpoints that somebody may roll back to, however many newer ones there are: the job's last one, the
    newest whose text is known to have been the right one, and what other jobs began from, or will.
    """
    # The one that the journal names stays until it names another: the daemon can fall, or the job roll
    # back, between the rename and the journal's entry. So keep = 1 may leave two. (D-checkpoints-010)
    checked = {kept.directory for kept in [kept for kept in job.kept if kept.checked][-1:]}
    begun_from = {
        folder
        for other in core.state.jobs.values()
        if other is not job and not other.final
        for folder in (other.origin, other.source)
    }
    return tuple(sorted({job.checkpoint, *checked, *begun_from} - {"", "init"}))


def on_folder(core: Core, event: FolderFound) -> None:
    """Where a job's checkpoints go from its next plan on is known, or has changed."""
    job = core.state.jobs.get(event.job)
    if job is None or job.final or job.folder == event.folder:
        return
    core.record(FolderTaken(job.id, event.folder, core.now))
    if event.why:
        text = (
            f"{job.id}: {event.why}; from its next plan on its checkpoints go into {event.folder} beside it"
        )
        core.announce(text, CheckpointFolder(job.id, event.folder), (f"job:{job.id}",), level="warn")


def on_manifest(core: Core, event: ManifestWritten) -> None:
    """A checkpoint is complete on disk: only now does it count, and its parts need be kept no longer."""
    run = core.run
    if run is None or event.directory not in run.completing:
        return
    if event.again:
        room.held_up(core, run, run.parts[event.directory], event)
        return
    run.completing.discard(event.directory)
    parts = run.parts.pop(event.directory)
    counters = parts[min(parts)].counters
    if event.error:
        _give_up(core, run, event)
    elif not run.job.checkpoint or counters.round > run.job.checkpoint_counters.round:
        _completed(core, run, event.directory, counters)
    # else: written late, after a newer one; the newer one stays the one to roll back to


def _give_up(core: Core, run: Run, event: ManifestWritten) -> None:
    run.begun = None
    room.lost_files(core, run)
    text = f"{run.job.id}: the checkpoint in {event.directory} cannot be completed: {event.error}"
    said = CheckpointGivenUp(run.job.id, event.directory, event.error)
    core.announce(text, said, (f"job:{run.job.id}",), level="error")


def _completed(core: Core, run: Run, directory: str, counters: Counters) -> None:
    job = run.job
    final = directory.removesuffix(".partial")
    core.record(CheckpointWritten(job.id, counters, final, core.now))
    inputs.note_checks(core, run)
    if run.begun is not None and run.begun.round <= counters.round:
        run.begun = None
    _abandon_older(core, run, counters)
    room.written(core, run)
    if counters.step >= run.want_checkpoint:
        run.want_checkpoint = -1
    text = f"{job.id}: checkpoint of step {counters.step} in {final}"
    core.announce(text, CheckpointComplete(job.id, counters.step, final), (f"job:{job.id}",))
    for node in sorted(job.surviving_nodes()):
        ack(core, job, node)


def first_incomplete(run: Run) -> int:
    """The round of the oldest checkpoint still being written; very large when there is none.

    One that nobody completes does not hold back acknowledgements for ever.
    """
    rounds = [parts[min(parts)].counters.round for parts in run.parts.values()]
    rounds += [run.begun.round] if run.begun is not None else []
    fresh = [round_ for round_ in rounds if round_ > run.job.counters.round - STALE_ROUNDS]
    return min(fresh, default=sys.maxsize)


def _abandon_older(core: Core, run: Run, counters: Counters) -> None:
    """A checkpoint of ``counters`` is complete: what is not, of a step before it, never will be."""
    for directory, parts in sorted(run.parts.items()):
        part = parts[min(parts)]
        if directory in run.completing or part.counters.round > counters.round:
            continue
        del run.parts[directory]
        text = (
            f"{run.job.id}: the checkpoint of step {part.counters.step} in {directory} stays incomplete: "
            f"{len(parts)} of {count(part.num_buckets, 'part')} were written"
        )
        said = CheckpointIncomplete(run.job.id, part.counters.step, directory, len(parts), part.num_buckets)
        core.announce(text, said, (f"job:{run.job.id}",), level="warn")


def wanted(core: Core, run: Run) -> bool:
    """Whether one is to be begun at the next boundary: none is under way, the disk is not known to refuse,
    and somebody asked or it is time.
    """
    return (
        run.begun is None
        and not room.refuses(core, run)
        and (run.want_checkpoint >= 0 or cadence.due(run.job))
    )


def begun(run: Run, counters: Counters) -> None:
    """Note that the devices begin to write the state of the boundary ``counters``."""
    run.begun = counters


def skipped(core: Core, run: Run, counters: Counters) -> None:
    """One was due at the boundary ``counters``, and the one before is still being written: said once for each
    of these.
    """
    if run.begun is None or run.skipped_for == run.begun.step:
        return
    run.skipped_for = run.begun.step
    text = (
        f"{run.job.id}: no checkpoint of step {counters.step}: that of step {run.begun.step} is still being "
        "written "
        "(checkpoint.every is shorter than that takes)"
    )
    said = CheckpointSkipped(run.job.id, counters.step, run.begun.step)
    core.announce(text, said, (f"job:{run.job.id}",), level="warn")


def saving(run: Run) -> bool:
    """Whether the state of the present boundary is on its way to the disk."""
    return bool(run.completing) or (run.begun is not None and run.begun.round == run.job.counters.round)


def saved(job: JobRecord) -> bool:
    """Whether the state of the present boundary is in a checkpoint."""
    return bool(job.checkpoint) and job.checkpoint_counters.step == job.counters.step


def damaged(core: Core, job: JobRecord, message: DeviceFailed) -> KeptCheckpoint | None:
    """What a device was to load is not what was written: it is named, set aside, and the one to roll back to
    instead is returned. None, and nothing is done, where there is none: of the last one even what is left may
    be worth something under its name.
    """
    directory, step = message.damaged, job.counters.step
    whole = [kept for kept in job.kept if kept.directory != directory]
    if not whole and job.origin in {directory, "init"}:
        return None
    # Renamed, so that no count of those that are kept has it, and kept for whoever tests the disk.
    # (D-checkpoints-011)
    core.outbox.append(SetAside(directory))
    text = (
        f"{job.id}: the checkpoint of step {step} is damaged and not used again: {message.device}: "
        f"{message.error}; "
        f"what is left of it is kept as {directory}{DAMAGED}"
    )
    story = (f"job:{job.id}", f"node:{node_of(message.device)}")
    core.announce(text, CheckpointDamaged(job.id, step, directory, message.device), story, level="error")
    return whole[-1] if whole else KeptCheckpoint(job.origin, job.start)


def ack(core: Core, job: JobRecord, device_or_node: str) -> None:
    """Tell an agent up to which round it need keep neither steps nor parts."""
    upto = job.counters.round - 1
    if core.run is not None and core.run.job is job:
        upto = min(upto, first_incomplete(core.run) - 1)
    core.tell(node_of(device_or_node) or device_or_node, Ack(job.id, upto))
