"""How many sequences each step of a job takes: its global batch, or fewer while the batch is ramped up.

Owns the key ``train.batch_ramp``, its checks, and the one function from steps to samples that samples, plans,
rates and figures go by. Pure, and a function of the step alone, so whoever joins, resumes or branches takes
the same samples.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from oobleckd.protocol.jobtable import JobError, JobTable

_Sequences = Annotated[int, Meta(ge=1, le=2**24)]


class BatchRamp(JobTable, frozen=True):
    """Fewer sequences a step at first (docs/recipe.md)."""

    start: Annotated[_Sequences, Meta(description="Sequences of the first step; a multiple of micro_batch.")]
    increment: Annotated[
        _Sequences,
        Meta(
            description="By so many more at a time, up to global_batch; a multiple of micro_batch that "
            "divides global_batch - start."
        ),
    ]
    samples: Annotated[
        int,
        Meta(
            ge=1,
            le=2**53,
            description="Sequences in all after which steps have global_batch; each size before that is for "
            "an equal part of them.",
        ),
    ]


class BatchLevel(NamedTuple):
    """From ``step`` on, ``sample`` samples into the job, a step takes ``size`` sequences."""

    step: int
    sample: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sequences of every step, in micro-batches of ``micro_batch``. ``levels``: ascending, the first at step
    0; one where there is no ramp.
    """

    levels: tuple[BatchLevel, ...]
    micro_batch: int

    def size(self, step: int) -> int:
        """Sequences of ``step`` (from 0)."""
        return self._at(step).size

    def micro_batches(self, step: int) -> int:
        """Micro-batches of ``step`` (from 0)."""
        return self.size(step) // self.micro_batch

    def before(self, step: int) -> int:
        """Samples of the first ``step`` steps together."""
        level = self._at(step)
        return level.sample + (step - level.step) * level.size

    def step_of(self, sample: int) -> int:
        """The step (from 0) that takes ``sample`` (from 0)."""
        level = self.levels[bisect_right(self.levels, sample, key=_sample_of) - 1]
        return level.step + (sample - level.sample) // level.size

    def steps_for(self, samples: int) -> int:
        """The fewest first steps that take so many samples, or more."""
        return self.step_of(samples - 1) + 1 if samples > 0 else 0

    def grown(self, step: int) -> int:
        """Sequences of the step before ``step`` where ``step`` takes more; 0 where it does not."""
        before = self.size(step - 1) if step > 0 else 0
        return before if before < self.size(step) else 0

    @property
    def ramp_steps(self) -> int:
        """Steps before the first one of the whole global batch."""
        return self.levels[-1].step

    def _at(self, step: int) -> BatchLevel:
        return self.levels[bisect_right(self.levels, step, key=_step_of) - 1]


def _step_of(level: BatchLevel) -> int:
    return level.step


def _sample_of(level: BatchLevel) -> int:
    return level.sample


@lru_cache(maxsize=64)
def sizes_of(global_batch: int, micro_batch: int, ramp: BatchRamp | UnsetType = UNSET) -> BatchSizes:
    """Of a job with these keys, which have passed ``check_ramp``."""
    if ramp is UNSET:
        return BatchSizes((BatchLevel(0, 0, global_batch),), micro_batch)
    # As Megatron: after c samples a step takes start + increment * floor(c / (samples / increments)). Here in
    # whole numbers, so that no rounding decides about a step.
    increments = (global_batch - ramp.start) // ramp.increment
    ends = (-(-ramp.samples * number // increments) for number in range(1, increments + 1))
    levels, step, sample = [], 0, 0
    for number, end in enumerate(ends):
        size = ramp.start + number * ramp.increment
        steps = max(0, -(-(end - sample) // size))  # none where the step before went beyond it
        if steps:
            levels.append(BatchLevel(step, sample, size))
        step, sample = step + steps, sample + steps * size
    return BatchSizes((*levels, BatchLevel(step, sample, global_batch)), micro_batch)


def check_ramp(global_batch: int, micro_batch: int, ramp: BatchRamp | UnsetType) -> None:
    """What the types cannot say. Raises JobError."""
    if ramp is UNSET:
        return
    for key, size in (("start", ramp.start), ("increment", ramp.increment)):
        if size % micro_batch:
            more = -(-size // micro_batch) * micro_batch
            raise JobError(
                f"train.batch_ramp.{key}",
                f"{size} is no multiple of train.micro_batch = {micro_batch}",
                f"make it {more}, or another multiple of {micro_batch}: a step has whole micro-batches",
            )
    if ramp.start >= global_batch:
        raise JobError(
            "train.batch_ramp.start",
            f"{ramp.start} is not less than train.global_batch = {global_batch}, where the ramp ends",
            "make it smaller, or leave batch_ramp out: then every step takes global_batch",
        )
    rest = global_batch - ramp.start
    if rest % ramp.increment:
        whole = ramp.start + rest // ramp.increment * ramp.increment
        raise JobError(
            "train.batch_ramp.increment",
            f"from start = {ramp.start} by {ramp.increment} at a time no step has train.global_batch = "
            f"{global_batch}",
            f"choose a divisor of {rest}, or make train.global_batch {whole + ramp.increment}",
        )
