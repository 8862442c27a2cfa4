"""A micro-batch like those of a job, for who runs its layers before there is one: to measure, to compile.

Owns its shape and form. What its tokens are nobody looks at.
"""

from __future__ import annotations

import torch

from oobleckd.protocol.job import Job
from oobleckd.worker.models import Batch, Call, ModelSpec


def sample_batch(job: Job) -> Batch:
    """A micro-batch of ``job``. Where documents are apart every row has two: with one, and no mask, another
    kernel would run.
    """
    shape = job.train.micro_batch, job.train.sequence
    tokens = torch.zeros(shape, dtype=torch.int64)
    if not job.data.is_separate:
        return Batch(tokens, tokens)
    half = (job.train.sequence + 1) // 2
    at = torch.arange(job.train.sequence).expand(shape)
    return Batch(tokens, tokens, at % half, at // half, tokens.numel())


def calls_of(spec: ModelSpec, batch: Batch) -> dict[int, Call]:
    """What blocks are called with, where that depends on the micro-batch: layer -> call."""
    if batch.positions is None or batch.documents is None:
        return {}
    return spec.calls(batch.positions, batch.documents)
