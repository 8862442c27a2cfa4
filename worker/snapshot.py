"""What a device tells of a committed step besides its numbers: the sample ledger, its checkpoint share."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import CheckpointPart
from oobleckd.protocol.parts import Counters
from planner.plan import Layout
from worker import checkpoint
from worker.data import Corpus
from worker.store import Store


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


def write_share(
    device: str,
    job_id: str,
    job: Job,
    store: Store,
    layout: Layout,
    live: Collection[str],
    counters: Counters,
    corpus: str,
) -> Iterator[CheckpointPart]:
    """Write the buckets that fall to ``device``, one part each. Raises UserError when the disk refuses."""
    directory = checkpoint_dir(job, job_id, counters)
    buckets = store.spec.buckets
    for index, state in store.buckets.items():
        if writer_of(index, buckets[index].uses, layout, live) != device:
            continue
        written = checkpoint.write_bucket(
            directory, buckets[index], state.params, state.exp_avgs, state.exp_avg_sqs, state.exponents
        )
        if written is None:
            return
        file, num_bytes, sha256, tensors = written
        yield CheckpointPart(
            device,
            job_id,
            counters,
            str(directory),
            index,
            len(buckets),
            file,
            num_bytes,
            sha256,
            tensors,
            corpus,
        )
