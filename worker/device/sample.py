"""A micro-batch like those of a job, for who runs its layers before there is one: to measure, to compile.

Owns its shape and form, and what its tokens are: drawn at random, the same ones on every device.
"""

from __future__ import annotations

import torch

from oobleckd.worker.models import Batch, Call, ModelSpec

_SEED = 0  # no job's: jobs that differ in theirs share a profile


def sample_batch(spec: ModelSpec) -> Batch:
    """A micro-batch of the job of ``spec``, of tokens of its whole vocabulary. Where documents are apart each
    row has two: with one, and no mask, another kernel would run.
    """
    train, data = spec.job.train, spec.job.data
    shape = train.micro_batch, train.sequence
    # Equal tokens would all go to the same experts. (D-costs-001)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(spec.config.vocab_size, shape, generator=generator)
    if not data.is_separate:
        return Batch(tokens, tokens)
    half = (train.sequence + 1) // 2
    at = torch.arange(train.sequence).expand(shape)
    return Batch(tokens, tokens, at % half, at // half, tokens.numel())


def calls_of(spec: ModelSpec, batch: Batch) -> dict[int, Call]:
    """What blocks are called with, where that depends on the micro-batch: layer -> call."""
    if batch.positions is None or batch.documents is None:
        return {}
    return spec.calls(batch.positions, batch.documents)
