"""How much each micro-batch of a step counts in the mean over the step.

The loss of a step is the mean over all tokens that its global batch asks for, its *targets*, wherever they
lie. A micro-batch's own loss is the mean over its own ones, so it counts as much as it asks for: its backward
pass begins with its weight, and the division at the end is by the weight of all. Owns neither: ``passes`` and
``reduce`` do that. Where the job makes all micro-batches ask for equally many tokens, each of them weighs 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from oobleckd.protocol.job import Job
from oobleckd.worker import sums
from oobleckd.worker.data.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the micro-batches of a step, from the first to the last: integers times one power of two."""

    each: tuple[float, ...]

    @property
    def total(self) -> float:
        """All of them together, exactly. 1 where nothing in the step is asked for: its loss and gradients are
        0, and stay so.
        """
        return sums.added(self.each) or 1.0

    def mean(self, values: Mapping[int, float]) -> float:
        """The mean of float32 ``values`` by micro-batch: products and their sum are exact, and rounded."""
        return sums.added(value * self.each[mb] for mb, value in values.items()) / self.total


WeightsOf = Callable[[int], Weights]
"""The weights of a step: known from the job and its corpus alone, so by every device, without a message."""


def weights_of(job: Job, corpus: Corpus) -> WeightsOf:
    """Of the steps of ``job``; the last two that were asked for are remembered."""
    if not job.data.weighs_targets:
        sizes = job.batch_sizes
        return lru_cache(maxsize=2)(lambda step: Weights((1.0,) * sizes.micro_batches(step)))
    # Targets times a power of two above any number of them, and not their share of the step, which would have
    # to be rounded: so no grouping shows, and gradients stay below those of a mean, for which exponents and
    # overflow tests are made. (D-exactness-016)
    exponent = -(job.train.micro_batch * job.train.sequence).bit_length()

    @lru_cache(maxsize=2)  # of the round, and of the one that is begun early
    def of_step(step: int) -> Weights:
        return Weights(tuple(math.ldexp(targets, exponent) for targets in corpus.targets_of(step)))

    return of_step
