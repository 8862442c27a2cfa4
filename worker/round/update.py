"""The optimizer step of a committed round: clipping by the global norm, the rule, next fixed-point scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.protocol.learningrate import lr_at
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker import sums
from oobleckd.worker.round.reduce import Reduced
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.store import Store


def global_norm(vote: Vote) -> float:
    """Norm of the whole model's mean gradient, from the squared float64 norms of all keys in ``vote``."""
    return math.sqrt(sums.added(chain.from_iterable(vote.norms.values())))


def apply_update(
    job: Job,
    store: Store,
    reduced: Mapping[int, Reduced],
    scale: float,
    counters: Counters,
    faults: Faults,
) -> None:
    """Update every bucket of ``store`` in place with ``scale`` times its mean gradients.

    ``reduced``: of every bucket held; its float32 ``grads`` are scaled in place, too, so that a pre-copy
    sends what went into the optimizer. Buckets without numbers here get exponents alone.
    """
    for bucket, state in store.buckets.items():
        part = reduced[bucket]
        if part.grads:
            update_bucket(job, state, part.grads, counters, scale)
        # Of all keys, also where this device has a shard without any numbers.
        state.exponents = part.told.figures.exponents
        if not part.grads:
            continue
        faults.reach("update", counters.round)


def update_bucket(
    job: Job, state: BucketState, grads: Sequence[Tensor], counters: Counters, scale: float = 1.0
) -> None:
    """Make the update of the round that ``counters`` begin on one bucket, with ``scale`` times ``grads``, all
    in place.

    ``grads``: float32, a tensor for each key of ``state``, mean gradients.

    A pure function: whoever has the state before it and these gradients has the state after it, to the bit.
    """
    # A pre-copy target replays this with the source's gradients and has its bits: a gradient is a third of
    # the state, and no weight is copied twice. (D-precopy-001)
    state.update_(grads, applied=counters.applied, lr=lr_at(counters.step, job), scale=scale)
