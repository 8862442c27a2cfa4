"""Which rounds evaluate, and which micro-batches a round has: a function of a job and its counters, so that
every device knows it without a message.

An evaluation stands at a step's boundary. It has as many rounds as its micro-batches need, each with as many
as a step has but for the last, on the routes of a step; they are forward alone and update nothing. A step
whose batch is still being ramped up has the first micro-batches of a whole one, on their routes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from oobleckd.planner.plan import NOTHING, Detours, Layout, Route, standing_routes
from oobleckd.protocol.batchramp import BatchSizes
from oobleckd.protocol.parts import Counters


@dataclass(frozen=True, slots=True)
class EvalRounds:
    """``steps`` of the job, and when it evaluates; ``per_step``: micro-batches of a step of the whole global
    batch, ``total``: those of an evaluation (0: nothing is evaluated). ``sizes``: of the steps, where their
    batch is ramped up (None: each has ``per_step``).
    """

    steps: int
    per_step: int
    total: int = 0
    every: int = 0
    at_start: bool = False
    at_end: bool = False
    sizes: BatchSizes | None = None

    def of_step(self, step: int) -> int:
        """Micro-batches of ``step`` (from 0)."""
        return self.per_step if self.sizes is None else self.sizes.micro_batches(step)

    @property
    def whole_steps(self) -> float:
        """How many steps of the whole global batch have as many micro-batches as all of the job's."""
        if self.sizes is None:
            return self.steps
        return self.sizes.before(self.steps) / self.sizes.micro_batch / self.per_step

    @property
    def num_rounds(self) -> int:
        """Rounds of an evaluation."""
        return math.ceil(self.total / self.per_step)

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after ``step`` steps."""
        if not self.total:
            return False
        if step in {0, self.steps}:
            return (self.at_start and step == 0) or (self.at_end and step == self.steps)
        return self.every > 0 and step % self.every == 0

    def due_steps(self, first: int, last: int) -> Iterator[int]:
        """After how many steps there is an evaluation, from ``first`` to ``last``, in order."""
        if not self.total:
            return
        every = (
            range(-(-max(first, 1) // self.every) * self.every, last + 1, self.every) if self.every else ()
        )
        inside = (step for step in every if 0 < step < self.steps)
        for step in itertools.chain((0,), inside, (self.steps,)):
            if first <= step <= last and self.due(step):
                yield step

    def newest_due(self, first: int, last: int) -> int:
        """After how many steps the newest evaluation is of those from ``first`` to ``last``; -1: there is
        none.
        """
        inside = (min(last, self.steps - 1) // self.every * self.every,) if self.every else ()
        found = (step for step in (self.steps, *inside, 0) if first <= step <= last and self.due(step))
        return next(found, -1)

    def next_due(self, counters: Counters) -> int:
        """After how many steps the next evaluation is, or the one under way; -1: none is to come."""
        first = counters.step if self.evaluates(counters) else counters.step + 1
        return next(self.due_steps(first, self.steps), -1)

    @property
    def num_evaluations(self) -> int:
        """Of the whole job."""
        return self._num_from(0)

    def num_left(self, counters: Counters) -> int:
        """How many are to come, with the one under way."""
        return self._num_from(counters.step if self.evaluates(counters) else counters.step + 1)

    def _num_from(self, first: int) -> int:
        """How many there are after ``first`` steps, or more."""
        if not self.total or first > self.steps:
            return 0
        last, before = self.steps - 1, max(first, 1) - 1
        inside = max(0, last // self.every - before // self.every) if self.every else 0
        return inside + (self.due(0) if first == 0 else 0) + self.due(self.steps)

    def evaluates(self, counters: Counters) -> bool:
        """Whether the round that ``counters`` begin evaluates."""
        return counters.evaluated < self.num_rounds and self.due(counters.step)

    def micro_batches(self, counters: Counters) -> range:
        """Those of the evaluation that are in the round that ``counters`` begin: the first of them is the
        round's micro-batch 0.
        """
        first = counters.evaluated * self.per_step
        return range(first, min(first + self.per_step, self.total))

    def num_evaluated(self, counters: Counters) -> int:
        """How many micro-batches the round that ``counters`` begin evaluates; 0: it is a try at a step."""
        return len(self.micro_batches(counters)) if self.evaluates(counters) else 0

    def routes(self, layout: Layout, detours: Detours | None, counters: Counters) -> tuple[Route, ...]:
        """The standing routes of the round that ``counters`` begin: those of its micro-batches. Of one that
        evaluates nothing flows below the head.
        """
        standing = standing_routes(layout, detours, counters.round)
        if not (num := self.num_evaluated(counters)):
            # A plan, its routes and its orders are for the whole batch, so nothing is planned or moved where
            # the batch grows: a smaller step leaves out the last micro-batches. (D-training-010)
            return standing if self.sizes is None else standing[: self.of_step(counters.step)]
        return tuple(_forward_alone(route, layout.num_layers - 1) for route in standing[:num])

    def is_last(self, counters: Counters) -> bool:
        """Whether the evaluation ends with the round that ``counters`` begin."""
        return counters.evaluated + 1 == self.num_rounds

    def finished(self, counters: Counters) -> bool:
        """Whether all steps are done, and the evaluation behind them."""
        return counters.step >= self.steps and not self.evaluates(counters)


def _forward_alone(route: Route, head: int) -> Route:
    """``route`` with the loss at its end. It is the first to do its work, and no repair."""
    return msgspec.structs.replace(route, mask=(head,), redone=(NOTHING,) * len(route.segments))
