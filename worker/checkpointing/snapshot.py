"""Makes a device's share of a checkpoint, and the ledger of samples of a committed step.

Owns what the share is and the copy of it, so that training can go on; when it is written, and in which
thread, is ``writer``'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oobleckd.host.checkpoint import room
from oobleckd.host.folder import FolderMark
from oobleckd.planner.plan import Layout
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.models import Bucket
from oobleckd.worker.state import bucket_files
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.host_copy import Hosted
from oobleckd.worker.state.store import Store


def ledger_digest(corpus: Corpus, step: int, losses: Mapping[int, float]) -> tuple[int, str]:
    """How many samples the step's sums hold, and a digest of which ones.

    ``losses`` has one entry per micro-batch that the head's ledger counted.
    """
    digest, count = hashlib.blake2b(digest_size=16), 0
    for micro_batch in sorted(losses):
        samples = corpus.sample_ids(step, micro_batch)
        count += len(samples)
        digest.update(repr((micro_batch, samples)).encode())
    return count, digest.hexdigest()


def checkpoint_dir(job: Job, folder: str, counters: Counters) -> Path:
    """Where the parts of a checkpoint are collected until the daemon completes it."""
    return Path(job.checkpoint.dir) / folder / f"{bucket_files.step_name(counters.step)}.partial"


def writer_of(bucket: int, uses: Collection[int], layout: Layout, live: Collection[str]) -> str:
    """The one device that writes ``bucket``: holders take turns, so that the work spreads. Of shards those
    whose group has all.
    """
    unable = layout.unable(layout.holdings.keys() - set(live))
    holders = sorted({device for use in uses for device in layout.holders(use)} - unable)
    return holders[bucket % len(holders)]


@dataclass(frozen=True, slots=True)
class Due:
    """At a boundary: whether a checkpoint of it ``begins``, or one by the clock of ``checkpoint.every`` is
    ``skipped``.
    """

    begins: bool = False
    skipped: bool = False


def due_after(job: Job, vote: Vote, was: Counters, following: Counters, *, at_end: bool = True) -> Due:
    """What the round that ``was`` begin leads to, committed with ``vote``; ``following`` begin the next one.
    ``at_end``: one of the state after the last step, in any case. The same on every device: whoever still
    writes the last one has said so in its vote.

    After a skipped step the weights are still those before it, so one by the clock waits for the next update.
    None is begun where too many in a row were skipped: the one before them stays the last. The last of all
    waits for the evaluation behind the last step, and none by the clock comes before it.
    """
    rounds = job.eval_rounds
    # The weights are most likely those that diverged, and the newest checkpoint is what --resume takes.
    # (D-training-003)
    if job.stopped_by(following):
        return Due()
    fixed = following.applied > was.applied and _by_the_clock(job, following.step, waited=was.skipped_in_row)
    # A flag in the votes: if each device skipped by itself, two checkpoints on a slow disk could both stay
    # incomplete for ever. (D-checkpoints-003)
    free = vote.flags.hold or not vote.flags.writing
    # One folder for the last step, and it is the result: an evaluation changes none of it.
    # (D-checkpoints-020)
    last = at_end and rounds.finished(following)
    # No older checkpoint is removed for one that does not fit: checkpoint.keep says how many there are to
    # roll back to. (D-checkpoints-017)
    clock = fixed and not vote.flags.full and (last or following.step < rounds.steps)
    return Due(last or (free and (clock or vote.flags.checkpoint)), clock and not free and not last)


def _by_the_clock(job: Job, step: int, *, waited: int) -> bool:
    """Whether a checkpoint is due after ``step`` steps, or was in the ``waited`` steps before it."""
    # A fixed number of steps is the devices' own clock: it must be hit exactly, also while the daemon is
    # away. 'auto' is the core's. (D-checkpoints-004)
    every = job.checkpoint.every
    return every not in {0, "auto"} and step % int(every) <= waited


@dataclass(frozen=True, slots=True)
class Share:
    """What one device writes of a checkpoint: the states of ``buckets`` as they were at the boundary
    ``counters``.

    ``source``: copies of them, and training goes on while these are written (``of_shards``: put together of
    these); else the store's own. ``journal``: whose mark the folder above must have ("": anybody's).
    ``last``: after the job's last step, so it is the result.
    """

    device: str
    job_id: str
    directory: Path
    counters: Counters
    corpus: str
    num_buckets: int
    buckets: Mapping[int, Bucket]
    source: Hosted | Mapping[int, BucketState]
    journal: str = ""
    last: bool = False
    of_shards: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of the files in bytes, without their headers."""
        return sum(state.num_bytes for state in self.states.values())

    @property
    def copied(self) -> bool:
        """Whether the states are copies."""
        return self.of_shards or isinstance(self.source, Hosted)

    @property
    def states(self) -> Mapping[int, BucketState]:
        """By bucket; waits until copies are there."""
        return self.source.states() if isinstance(self.source, Hosted) else self.source


def take_share(
    device: str,
    job_id: str,
    job: Job,
    store: Store,
    layout: Layout,
    live: Collection[str],
    counters: Counters,
    corpus: str,
    *,
    copied: bool,
    folder: str = "",
    journal: str = "",
    whole: Callable[[int], BucketState] | None = None,
) -> Share:
    """The share of ``device``: the buckets that fall to it, as they are now. ``whole``: where ``store`` has
    shards, puts a bucket together.
    """
    buckets = store.spec.buckets
    own = [index for index in store.buckets if writer_of(index, buckets[index].uses, layout, live) == device]
    source: Hosted | Mapping[int, BucketState]
    if store.memory is not None:
        assert whole is not None
        source = {index: whole(index).copied(Tensor.cpu) for index in own}
    else:
        source = Hosted(store, own) if copied else {index: store.buckets[index] for index in own}
    return Share(
        device,
        job_id,
        checkpoint_dir(job, folder or job_id, counters),
        counters,
        corpus,
        len(buckets),
        {index: buckets[index] for index in own},
        source,
        journal,
        job.eval_rounds.finished(counters),
        of_shards=store.memory is not None,
    )


def pinned(tensor: Tensor) -> Tensor:
    """``tensor`` where an accelerator reads it at full speed, if there is one."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def write_share(
    share: Share, halfway: Callable[[], object], done: Collection[int] = ()
) -> Iterator[CheckpointPart]:
    """Write it but for the buckets ``done``, one part a bucket; a part is durable when it comes. ``halfway``
    is called in the middle of every file.

    Raises CannotWrite when the disk refuses, or somebody removed the folder; and before anything is written
    where there is no room for all of it, or the folder is another journal's.
    """
    left = {index: state for index, state in share.states.items() if index not in done}
    if share.journal and left:
        bucket_files.enter_folder(share.directory.parent, FolderMark(share.journal, share.job_id))
    _check_room(share, left)
    for index, state in left.items():
        written = bucket_files.write_bucket(share.directory, share.buckets[index], state, halfway)
        if written is None:
            raise bucket_files.CannotWrite(share.directory, "somebody removed the folder", "ENOENT")
        yield CheckpointPart(
            share.device,
            share.job_id,
            share.counters,
            str(share.directory),
            index,
            share.num_buckets,
            *written,
            share.corpus,
        )


def _check_room(share: Share, left: Mapping[int, BucketState]) -> None:
    """A disk that this share alone would fill is not filled: others write there, too."""
    needed = sum(state.num_bytes for state in left.values())
    with suppress(OSError):  # writing will tell
        free_bytes, free_files = room(share.directory)
        if free_bytes < needed:
            raise bucket_files.CannotWrite(share.directory, "No space left on device", "ENOSPC")
        if 0 <= free_files < len(left):
            raise bucket_files.CannotWrite(share.directory, "No inodes left on device", "ENOSPC")
