"""Updates a device's weights early: as soon as its own layers are reduced, before it has all votes.

What it does not know then is whether the round will be applied as it stands: a NaN or an overflow elsewhere,
or a gradient norm that has to be clipped. So the state before is kept until the votes of all are in (the
validation, which travels with them), and taken back where they say otherwise, or where somebody dies (Qi et
al., Zero Bubble Pipeline Parallelism, 2023, section 4). Owns that state; the round machine owns when.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Vote, outcome_of
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round.update import global_norm
from oobleckd.worker.state.bucket_state import Saved
from oobleckd.worker.state.optimizer import clip_scale
from oobleckd.worker.state.store import Store


@dataclass(frozen=True, slots=True)
class EarlyUpdate:
    """An update made before all votes were in: the state ``saved`` before that, and the ``passes`` of the
    next round.
    """

    saved: dict[int, Saved]
    passes: Passes


def goes_through(job: Job, vote: Vote) -> bool:
    """Whether a round with this union of votes is applied with its gradients as they are."""
    return outcome_of(vote) == "applied" and clip_scale(global_norm(vote), job.optimizer.clip_norm) == 1.0


def save(store: Store) -> dict[int, Saved]:
    """Copy the state of every bucket, to be able to roll back to it: 12 bytes a parameter more."""
    return {bucket: state.save() for bucket, state in store.buckets.items()}


def restore(store: Store, saved: dict[int, Saved]) -> None:
    """Roll back to the state ``saved``, in the same tensors."""
    for bucket, before in saved.items():
        store.buckets[bucket].restore(before)
