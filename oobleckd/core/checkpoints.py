"""Checkpoints as devices write them: parts collected until all buckets are there, then made whole.

Devices write on their own, after the same round; this owns only the book-keeping. A checkpoint whose
writer died before its part was told is abandoned at the next boundary.
"""

from __future__ import annotations

import sys

import msgspec

from oobleckd.core.context import Core
from oobleckd.core.entries import CheckpointWritten
from oobleckd.core.events import ManifestWritten, WriteManifest
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.messages import Ack, CheckpointPart
from oobleckd.protocol.parts import Counters
from planner.plan import node_of

STALE_ROUNDS = 50


def on_part(core: Core, message: CheckpointPart) -> None:
    """One bucket is written; with the last one the checkpoint is complete."""
    job, run = core.state.jobs.get(message.job), core.run
    if job is None or run is None or run.job is not job:
        core.tell(message.device, Ack(message.job, message.counters.round))
        return
    known = job.checkpoint and message.counters.round <= job.checkpoint_counters.round
    # A device tells a step before the parts that follow it: others are of a history that was given up.
    stale = message.counters.round > job.counters.round or message.counters.step > job.counters.step
    if known or stale:
        ack(core, job, message.device)
        return
    if message.directory in run.completing:
        return  # acknowledged once the checkpoint is on disk
    parts = run.parts.setdefault(message.directory, {})
    if any(part.counters.round < message.counters.round for part in parts.values()):
        parts.clear()  # an abandoned try at the same step
    parts[message.bucket] = message
    if len(parts) == message.num_buckets:
        manifest = manifest_of(job.spec, [parts[bucket] for bucket in sorted(parts)])
        keep = job.spec.checkpoint.keep
        run.completing.add(message.directory)
        core.outbox.append(WriteManifest(message.directory, msgspec.to_builtins(manifest), keep))


def on_manifest(core: Core, event: ManifestWritten) -> None:
    """A checkpoint is complete on disk: only now does it count, and its parts need be kept no longer."""
    run = core.run
    if run is None or event.directory not in run.completing:
        return
    run.completing.discard(event.directory)
    parts = run.parts.pop(event.directory)
    counters = parts[min(parts)].counters
    if event.error:
        _give_up(core, run, event)
    elif not run.job.checkpoint or counters.round > run.job.checkpoint_counters.round:
        _completed(core, run, event.directory, counters)
    # else: written late, after a newer one; the newer one stays the way back


def _give_up(core: Core, run: Run, event: ManifestWritten) -> None:
    text = f"{run.job.id}: the checkpoint in {event.directory} cannot be completed: {event.error}"
    core.announce("checkpoint", text, (f"job:{run.job.id}",), level="error", job=run.job.id)


def _completed(core: Core, run: Run, directory: str, counters: Counters) -> None:
    job = run.job
    final = directory.removesuffix(".partial")
    core.record(CheckpointWritten(job.id, counters, final, core.now))
    run.parts = {
        where: others
        for where, others in run.parts.items()
        if where in run.completing or others[min(others)].counters.round > counters.round
    }
    if counters.step >= run.want_checkpoint:
        run.want_checkpoint = -1
    text = f"{job.id}: checkpoint of step {counters.step} in {final}"
    core.announce("checkpoint", text, (f"job:{job.id}",), job=job.id, step=counters.step, directory=final)
    for node in sorted({node_of(device) for device in job.survivors()}):
        ack(core, job, node)


def first_incomplete(run: Run) -> int:
    """The round of the oldest checkpoint still being written; very large when there is none.

    One that nobody completes does not hold back acknowledgements for ever.
    """
    rounds = [parts[min(parts)].counters.round for parts in run.parts.values()]
    fresh = [round_ for round_ in rounds if round_ > run.job.counters.round - STALE_ROUNDS]
    return min(fresh, default=sys.maxsize)


def abandon_incomplete(core: Core, run: Run) -> None:
    """All devices hold, so every part that will ever be told has been."""
    incomplete = {where: parts for where, parts in run.parts.items() if where not in run.completing}
    for directory, parts in sorted(incomplete.items()):
        del run.parts[directory]
        part = parts[min(parts)]
        text = (
            f"{run.job.id}: the checkpoint of step {part.counters.step} in {directory} stays incomplete: "
            f"{len(parts)} of {part.num_buckets} parts were written"
        )
        core.announce("checkpoint", text, (f"job:{run.job.id}",), level="warn", job=run.job.id)


def ack(core: Core, job: JobRecord, device_or_node: str) -> None:
    """Tell an agent up to which round it need keep neither steps nor parts."""
    upto = job.counters.round - 1
    if core.run is not None and core.run.job is job:
        upto = min(upto, first_incomplete(core.run) - 1)
    core.tell(node_of(device_or_node) or device_or_node, Ack(job.id, upto))
