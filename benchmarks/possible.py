"""Whether bubbles suffice: is there any flushed step as short as asked, by constraint programming (OR-tools'
CP-SAT)?

Pure. Shares nothing with the planner: who computes a dead place's share of which micro-batch is open, and so
is every order. A yes comes with a step, a no is proven.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ortools.sat.python import cp_model

Verdict = Literal["yes", "no", "unknown"]
Place = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True, slots=True)
class Step:
    """``micro_batches`` of every pipeline through ``stages`` equal stages, the ``dead`` of which their peers
    compute. Whole units of time: ``forward``, and ``backwards`` as parts that follow each other at their
    stage (B, or I and W), the first of which the stage before waits for.

    A place has room for ``room`` units of memory; of a micro-batch ``held`` of them are taken from its
    forward on, ``kept`` between I and W.
    """

    micro_batches: tuple[int, ...]
    stages: int
    dead: frozenset[Place]
    forward: int
    backwards: tuple[int, ...]
    room: int
    held: int
    kept: int = 0

    def doers(self, pipeline: int, stage: int) -> list[Place]:
        """Who may compute that place's share."""
        if (pipeline, stage) not in self.dead:
            return [(pipeline, stage)]
        peers = [(p, stage) for p in range(len(self.micro_batches)) if (p, stage) not in self.dead]
        assert peers, f"nobody is left of stage {stage}"
        return peers


@dataclass(slots=True)
class _Model:
    step: Step
    within: int
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    busy: dict[Place, list[cp_model.IntervalVar]] = field(default_factory=dict)
    memory: dict[Place, list[tuple[cp_model.IntervalVar, int]]] = field(default_factory=dict)

    def build(self) -> None:
        for pipeline, number in enumerate(self.step.micro_batches):
            first: list[cp_model.IntVar] = [self._micro_batch(pipeline) for _ in range(number)]
            for one, other in pairwise(first):  # micro-batches of a pipeline are alike
                self.model.add(one + self.step.forward <= other)
        for place, intervals in self.busy.items():
            self.model.add_no_overlap(intervals)
            held = self.memory[place]
            self.model.add_cumulative([each for each, _ in held], [size for _, size in held], self.step.room)

    def _micro_batch(self, pipeline: int) -> cp_model.IntVar:
        """One on its way there and back; when its first forward begins."""
        step, model = self.step, self.model
        forwards = [self._time() for _ in range(step.stages)]
        backwards = [[self._time() for _ in step.backwards] for _ in range(step.stages)]
        for stage in range(step.stages):
            if stage:
                model.add(forwards[stage] >= forwards[stage - 1] + step.forward)
                model.add(backwards[stage - 1][0] >= backwards[stage][0] + step.backwards[0])
            for at in range(1, len(step.backwards)):
                model.add(backwards[stage][at] >= backwards[stage][at - 1] + step.backwards[at - 1])
            self._hop(pipeline, stage, forwards[stage], backwards[stage])
        model.add(backwards[-1][0] >= forwards[-1] + step.forward)
        return forwards[0]

    def _hop(
        self, pipeline: int, stage: int, forward: cp_model.IntVar, backwards: list[cp_model.IntVar]
    ) -> None:
        step, doers = self.step, self.step.doers(pipeline, stage)
        chosen = [self.model.new_bool_var("") for _ in doers]
        self.model.add_exactly_one(chosen)
        starts, lengths = [forward, *backwards], [step.forward, *step.backwards]
        done = backwards[-1] + step.backwards[-1]
        for place, mine in zip(doers, chosen, strict=True):
            busy = self.busy.setdefault(place, [])
            for start, length in zip(starts, lengths, strict=True):
                busy.append(self.model.new_optional_interval_var(start, length, start + length, mine, ""))
            memory = self.memory.setdefault(place, [])
            if len(backwards) == 1:
                memory.append((self._span(forward, done, mine), step.held))
            else:
                middle = backwards[0] + step.backwards[0]
                memory.append((self._span(forward, middle, mine), step.held))
                memory.append((self._span(middle, done, mine), step.kept))

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.within, "")

    def _span(
        self, start: cp_model.LinearExprT, end: cp_model.LinearExprT, mine: cp_model.IntVar
    ) -> cp_model.IntervalVar:
        return self.model.new_optional_interval_var(start, self._time(), end, mine, "")


def least(step: Step) -> int:
    """No order is shorter, whoever computes what: of the places that share a stage one has at least its part
    of the work, cannot begin before a micro-batch has come to it, and behind its last backward those before
    it have theirs.
    """
    found, total = 0, sum(step.micro_batches)
    first, rest = step.backwards[0], sum(step.backwards[1:])
    for stage in range(step.stages):
        num_dead = sum(dead == stage for _, dead in step.dead)
        alive = len(step.micro_batches) - num_dead
        share = -(-total // alive) if num_dead else max(step.micro_batches)
        behind = max(share * rest, stage * first + (rest if stage else 0))
        found = max(found, stage * step.forward + share * (step.forward + first) + behind)
    return found


def possible(step: Step, within: int, limit_s: float, workers: int = 2) -> Verdict:
    """Whether ``step`` can be done in ``within`` units of time. ``unknown`` where ``limit_s`` seconds do not
    tell.
    """
    if least(step) > within:
        return "no"
    made = _Model(step, within)
    made.build()
    for intervals in made.busy.values():
        for interval in intervals:
            made.model.add(interval.end_expr() <= within)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    found = solver.solve(made.model)
    if found in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
        return "yes"
    return "no" if found == cp_model.INFEASIBLE else "unknown"
