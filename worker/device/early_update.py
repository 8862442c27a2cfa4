"""Updates a device's weights early: as soon as its own layers are reduced, before it has all votes.

What it does not know then is whether the round will be applied as it stands: a NaN or an overflow elsewhere,
or a gradient norm that has to be clipped. So the state before is kept until the votes of all are in (the
validation, which travels with them), and taken back where they say otherwise, or where somebody dies (Qi et
al., Zero Bubble Pipeline Parallelism, 2023, section 4). Owns that state, and whether it is worth trying;
``executor`` owns when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Vote
from oobleckd.worker.round.commit import outcome_of
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round.update import global_norm
from oobleckd.worker.state.optimizer import clip_scale
from oobleckd.worker.state.store import Saved, Store

_LOOKS_BACK = 16  # rounds
_MAX_IN_VAIN = 0.25  # of them


@dataclass(frozen=True, slots=True)
class SpeculativeUpdate:
    """An early update, made before all votes were in: the state ``saved`` before that, and the round
    ``next_round``.
    """

    saved: dict[int, Saved]
    next_round: Passes


def goes_through(job: Job, vote: Vote) -> bool:
    """Whether a round with this union of votes is applied with its gradients as they are."""
    return outcome_of(vote) == "applied" and clip_scale(global_norm(vote), job.optimizer.clip_norm) == 1.0


@dataclass(slots=True)
class UpdatePredictor:
    """Whether to expect that the present round goes through: from those before it, tried or not.

    Rounds that are clipped come in a row, so the last one must have gone through; and where they come and go,
    the plain update is the better one.
    """

    rounds: deque[bool] = field(default_factory=lambda: deque(maxlen=_LOOKS_BACK))

    def saw(self, through: bool) -> None:
        """Note whether a committed round went through."""
        self.rounds.append(through)

    @property
    def expects_a_commit(self) -> bool:
        """Whether to update before the votes are in."""
        in_vain = self.rounds.count(False)
        return bool(self.rounds) and self.rounds[-1] and in_vain <= _MAX_IN_VAIN * len(self.rounds)


def save(store: Store) -> dict[int, Saved]:
    """Copy the state of every bucket, to be able to roll back to it: 12 bytes a parameter more."""
    return {bucket: state.save() for bucket, state in store.buckets.items()}


def restore(store: Store, saved: dict[int, Saved]) -> None:
    """Roll back to the state ``saved``, in the same tensors."""
    for bucket, before in saved.items():
        store.buckets[bucket].restore(before)
