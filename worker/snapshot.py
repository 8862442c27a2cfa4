"""What a device tells of a committed step besides its numbers: the sample ledger, its share of a checkpoint.

Owns what the share is and the copy of it, so that training can go on; when it is written, and in which thread, is ``writer``'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import CheckpointPart
from oobleckd.protocol.parts import Counters, Vote
from planner.plan import Layout
from worker import checkpoint
from worker.commit import outcome_of
from worker.data import Corpus
from worker.models import Bucket
from worker.store import BucketState, Store


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


def checkpoint_dir(job: Job, job_id: str, counters: Counters) -> Path:
    """Where the parts of a checkpoint are collected until the daemon completes it."""
    return Path(job.checkpoint.dir) / job_id / f"{checkpoint.step_name(counters.step)}.partial"


def writer_of(bucket: int, uses: Collection[int], layout: Layout, live: Collection[str]) -> str:
    """The one device that writes ``bucket``: holders take turns, so that the work spreads."""
    holders = sorted({device for use in uses for device in layout.holders(use)} & set(live))
    return holders[bucket % len(holders)]


@dataclass(frozen=True, slots=True)
class Due:
    """At a boundary: whether a checkpoint of it ``begins``, or one by the clock of ``checkpoint.every`` is ``skipped``."""

    begins: bool = False
    skipped: bool = False


def due_after(job: Job, vote: Vote, step: int) -> Due:
    """What a round that commits with ``vote``, after ``step`` steps, leads to. The same on every device: whoever still writes the
    last one has said so in its vote.
    """
    every = job.checkpoint.every
    fixed = every not in {0, "auto"} and step % int(every) == 0 and outcome_of(vote) != "repeated"
    free = vote.flags.hold or not vote.flags.writing
    last = step >= job.train.steps
    return Due(last or (free and (fixed or vote.flags.checkpoint)), fixed and not free and not last)


@dataclass(frozen=True, slots=True)
class Share:
    """What one device writes of a checkpoint: ``states`` of its buckets as they were at the boundary ``counters``.

    ``copied``: they are copies, and training goes on while these are written; else they are the store's own. ``under_way``: the
    copy of them to the host's memory, beside a GPU; ``sources`` must live until it is over.
    """

    device: str
    job_id: str
    directory: Path
    counters: Counters
    corpus: str
    num_buckets: int
    buckets: Mapping[int, Bucket]
    states: Mapping[int, BucketState]
    copied: bool
    under_way: torch.cuda.Event | None = None
    sources: tuple[Tensor, ...] = ()

    def settle(self) -> None:
        """The states are about to change: the GPU does that after their copy. The caller does not wait."""
        if self.under_way is not None:
            torch.cuda.current_stream().wait_event(self.under_way)

    def arrive(self) -> None:
        """Wait until the copies are in the host's memory."""
        if self.under_way is not None:
            self.under_way.synchronize()


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
) -> Share:
    """The buckets that fall to ``device``, as they are now."""
    buckets = store.spec.buckets
    states = {
        index: state
        for index, state in store.buckets.items()
        if writer_of(index, buckets[index].uses, layout, live) == device
    }
    sources = tuple(tensor for state in states.values() for tensor in state.tensors())
    under_way: torch.cuda.Event | None = None
    if copied:
        states, under_way = copies(states, store.device)
    return Share(
        device,
        job_id,
        checkpoint_dir(job, job_id, counters),
        counters,
        corpus,
        len(buckets),
        {index: buckets[index] for index in states},
        states,
        copied,
        under_way,
        sources,
    )


def copies(
    states: Mapping[int, BucketState], device: torch.device
) -> tuple[dict[int, BucketState], torch.cuda.Event | None]:
    """Copies of ``states``; those of a GPU's go to pinned memory of the host, beside its work, and the event says when they are there."""
    if device.type != "cuda":
        return {index: _like(state, Tensor.clone) for index, state in states.items()}, None
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        copies = {index: _like(state, _to_host) for index, state in states.items()}
        return copies, beside.record_event()


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def pinned(tensor: Tensor) -> Tensor:
    """``tensor`` where an accelerator reads it at full speed, if there is one."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _like(state: BucketState, copy: Callable[[Tensor], Tensor]) -> BucketState:
    return BucketState(
        [copy(param.detach()) for param in state.params],
        [copy(moment) for moment in state.exp_avgs],
        [copy(moment) for moment in state.exp_avg_sqs],
        state.exponents,
    )


def write_share(share: Share, halfway: Callable[[], object]) -> Iterator[CheckpointPart]:
    """Write it, one part a bucket; a part is durable when it comes. ``halfway`` is called in the middle of every file.

    Raises UserError when the disk refuses.
    """
    share.arrive()
    for index, state in share.states.items():
        written = checkpoint.write_bucket(
            share.directory,
            share.buckets[index],
            state.params,
            state.exp_avgs,
            state.exp_avg_sqs,
            state.exponents,
            halfway,
        )
        if written is None:
            return
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
