"""Looks ahead whether there is room for checkpoints, and decides what follows where a disk does not take one.

Owns what people are told, and when another one is begun. Nothing fails while all state is alive: one that
cannot be written is given up (``Discard`` gives its room back), the last good one stays the one to roll back
to, and the next is begun when there is room, else a while later, twice as long each time. The last one of a
job is its result: its devices keep it in memory and try again by themselves
(``oobleckd.worker.checkpointing.writer``).
"""

from __future__ import annotations

from collections.abc import Mapping

from oobleckd.core.context import Core
from oobleckd.core.events import Discard, LookAtRoom, ManifestWritten, RoomSeen
from oobleckd.core.incident import size_of
from oobleckd.core.run import Run, Trouble, WriteRefusal
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import CheckpointRoom, Level
from oobleckd.protocol.checkpointmessages import CheckpointFailed, CheckpointPart
from oobleckd.protocol.jobviews import TroubleView
from oobleckd.protocol.parts import JobCause
from oobleckd.words import count, noun

LOOK_EVERY_S = 2.0
"""While there is no room, or the disk refuses."""
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 300.0
_FILE_BYTES = (
    8192  # what a file takes besides its tensors: its head, its entry in the manifest, the rest of a block
)
_AHEAD_STEPS = 3  # so many steps before one is due by its step devices are told that there is no room
_WAYS_OUT = "make room there, or remove old checkpoints (checkpoint.keep says how many stay)"


def folder(core: Core, job: JobRecord) -> str:
    """Where the checkpoints of ``job`` lie."""
    return f"{core.checkpoint_dir(job.spec)}/{job.folder or job.id}"


def needed(job: JobRecord) -> tuple[int, int]:
    """Bytes and files of a checkpoint; (0, 0) while the model is not known."""
    if job.setup is None:
        return 0, 0
    profile = job.setup.profile
    num_files = len(profile.buckets or profile.layers) + 2
    num_bytes = profile.copied_bytes
    return num_bytes + num_files * _FILE_BYTES, num_files


def refuses(core: Core, run: Run) -> bool:
    """Whether none is to be begun now."""
    return run.trouble.short or core.now < run.trouble.retry_at


def full(core: Core, run: Run) -> bool:
    """Whether devices, which begin one after every so many steps by themselves, are to be told not to."""
    every = run.job.spec.checkpoint.every
    if every in {0, "auto"} or not refuses(core, run):
        return False
    return -run.job.counters.step % int(every) <= _AHEAD_STEPS


def given_up(run: Run, part: CheckpointPart) -> bool:
    """Whether ``part`` is of a try that was given up: told late, and its file is removed."""
    return run.trouble.spoiled.get(part.directory, -1) >= part.counters.round


# ---------------------------------------------------------------------- what is seen


def look(core: Core, run: Run) -> None:
    """See how much room there is: after every checkpoint for the next one, and again and again while there is
    too little.
    """
    job, trouble = run.job, run.trouble
    if job.setup is None or job.layout is None:
        return
    again = bool(trouble.text or trouble.short) and core.now >= trouble.looked_at + LOOK_EVERY_S
    stuck = (
        trouble.looking and core.now < trouble.looked_at + LAST_RETRY_S
    )  # by a file system that does not answer
    if stuck or not (again or trouble.looked_for != job.checkpoint):
        return
    trouble.looking, trouble.looked_at, trouble.looked_for = True, core.now, job.checkpoint
    core.outbox.append(LookAtRoom(job.id, folder(core, job)))


def deadline(core: Core, run: Run) -> float | None:
    """When to look again if nothing else happens; None while all is well."""
    return core.now + LOOK_EVERY_S if run.trouble.text or run.trouble.short else None


def on_room(core: Core, event: RoomSeen) -> None:
    """Note how much room there is, and say so where that is news."""
    run = core.run
    if run is None or run.job.id != event.job:
        return
    trouble, (num_bytes, num_files) = run.trouble, needed(run.job)
    trouble.looking, trouble.free_bytes, trouble.needed_bytes = False, event.free_bytes, num_bytes
    few_files = 0 <= event.free_files < num_files
    was_short, trouble.short = trouble.short, 0 <= event.free_bytes < num_bytes or few_files
    if run.begun is not None or run.completing:
        trouble.short = False  # what is being written takes of it
    elif trouble.short and not was_short:
        what = (
            f"{count(num_files, 'file')}, and {event.free_files}"
            if few_files
            else _of(num_bytes, event.free_bytes)
        )
        # No older checkpoint is removed for it: a person can lower checkpoint.keep or make room; what was
        # pruned in a hurry is gone. (D-checkpoints-017)
        text = (
            f"no room for the next checkpoint in {folder(core, run.job)}: it takes {what} are free; none "
            "is begun until there is"
        )
        _say(core, run, f"{text}. {_stays(run.job)}; {_WAYS_OUT}", "warn")
    elif was_short and not trouble.short:
        _room_again(core, run)


def _room_again(core: Core, run: Run) -> None:
    trouble = run.trouble
    _say(core, run, f"there is room for checkpoints again: {size_of(trouble.free_bytes)} are free", "info")
    trouble.retry_at, trouble.said = core.now, set()
    _owe(run)


def _owe(run: Run) -> None:
    """The next boundary is good for one."""
    if run.want_checkpoint < 0 and (run.job.spec.checkpoint.every != 0 or run.trouble.tries):
        run.want_checkpoint = run.job.counters.step


# ---------------------------------------------------------------------- what went wrong


def on_failed(core: Core, message: CheckpointFailed) -> None:
    """A device cannot write its share."""
    run = core.run
    if run is None or run.job.id != message.job or message.directory in run.completing:
        return
    job, round_ = run.job, message.counters.round
    known = bool(job.checkpoint) and round_ <= job.checkpoint_counters.round
    if known or round_ <= job.began or run.trouble.spoiled.get(message.directory, -1) >= round_:
        return
    if not message.last:
        run.parts.pop(message.directory, None)
        run.trouble.spoiled[message.directory] = round_
        if run.begun is not None and run.begun.round <= round_:
            run.begun = None
        core.outbox.append(Discard(message.directory))
    what = f"{message.device} cannot write the checkpoint of step {message.counters.step}: {message.error}"
    size = (
        f" (its share takes {_of(message.needed_bytes, message.free_bytes)} are free)"
        if message.free_bytes >= 0
        else ""
    )
    node = node_of(message.device)
    cause = _cause(node, message, message.counters.step if message.last else -1)
    _failed(core, run, round_, f"{what}{size}", cause, last=message.last)


def held_up(core: Core, run: Run, parts: Mapping[int, CheckpointPart], event: ManifestWritten) -> None:
    """All parts are there, and the disk does not take the manifest: tried again, as often as it takes."""
    counters = parts[min(parts)].counters
    last = run.job.spec.eval_rounds.finished(counters)
    what = f"the checkpoint of step {counters.step} waits for its manifest: {event.error}"
    cause = _cause("", event, counters.step if last else -1)
    _failed(core, run, counters.round, what, cause, last=last, again=True)


def _cause(node: str, refused: CheckpointFailed | ManifestWritten, step: int) -> WriteRefusal:
    return WriteRefusal(node, step, refused.errno, "" if refused.errno else refused.error)


def lost_files(core: Core, run: Run) -> None:
    """One is not whole any more: files of it are gone. If it was the last one it is written anew,
    in a while.
    """
    run.trouble.retry_at = core.now + LOOK_EVERY_S
    run.trouble.rewrite = run.job.spec.eval_rounds.finished(run.job.counters)


def rewrites(core: Core, run: Run) -> bool:
    """Whether the last one is to be written anew, now; said once."""
    due = run.trouble.rewrite and core.now >= run.trouble.retry_at
    run.trouble.rewrite &= not due
    return due


def written(core: Core, run: Run) -> None:
    """A checkpoint is complete: all is well, as far as is known."""
    if run.trouble.text:
        _explain(core, run.job, "")
        text = (
            f"checkpoints can be written again, after {run.trouble.tries} "
            f"{noun(run.trouble.tries, 'try')} in vain"
        )
        _say(core, run, text, "info")
    run.trouble = Trouble(spoiled=run.trouble.spoiled)


def view(run: Run) -> TroubleView | None:
    """For people and programs; None where all is well."""
    trouble = run.trouble
    if not (trouble.text or trouble.short):
        return None
    text = (
        trouble.text
        or f"no room: a checkpoint takes {_of(trouble.needed_bytes, trouble.free_bytes)} are free"
    )
    return TroubleView(text, trouble.since, trouble.tries, trouble.needed_bytes, trouble.free_bytes)


def refusal(core: Core, job: JobRecord) -> tuple[str, str]:
    """Why it makes no sense to ask for one now, and what does; empty if it does."""
    found = (
        view(core.run) if core.run is not None and core.run.job is job and core.run.trouble.short else None
    )
    return (found.text, f"{_WAYS_OUT}: one is written as soon as there is room") if found else ("", "")


def _failed(
    core: Core, run: Run, round_: int, what: str, cause: WriteRefusal, *, last: bool, again: bool = False
) -> None:
    trouble = run.trouble
    trouble.since = trouble.since if trouble.text else core.now
    if round_ != trouble.round:
        trouble.tries, trouble.round = trouble.tries + 1, round_
        pause_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** (trouble.tries - 1))
        trouble.retry_at = core.now + pause_s
    trouble.text = what
    if last:
        then = "the job holds all of its state, tries again and is done when it is written"
        reason = f"waits to write its last checkpoint: {what}; {_WAYS_OUT}"
        _explain(core, run.job, reason, "checkpoint-unwritten")
    else:
        then = f"the job goes on and tries again. {_stays(run.job)}" if not again else "it is tried again"
    if cause not in trouble.said:
        trouble.said.add(cause)
        _say(core, run, f"{what}; {then}; {_WAYS_OUT}", "error", cause.node, cause.errno)


def _explain(core: Core, job: JobRecord, reason: str, cause: JobCause = "") -> None:
    if not job.final and job.spec.eval_rounds.finished(job.counters):
        core.explain(job, reason, cause)


def _stays(job: JobRecord) -> str:
    if job.checkpoint:
        return f"The checkpoint of step {job.checkpoint_counters.step} stays the one to roll back to"
    return "There is no checkpoint yet to roll back to"


def _of(needed_bytes: int, free_bytes: int) -> str:
    return f"{size_of(needed_bytes)}, and {size_of(free_bytes)}"


def _say(core: Core, run: Run, text: str, level: Level, node: str = "", errno: str = "") -> None:
    job, trouble = run.job, run.trouble
    story = (f"job:{job.id}", *((f"node:{node}",) if node else ()))
    said = CheckpointRoom(job.id, trouble.needed_bytes, trouble.free_bytes, errno)
    core.announce(f"{job.id}: {text}", said, story, level=level)
