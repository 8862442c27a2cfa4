"""The shortest decoupled schedule of a small pipeline, by mixed-integer programming (HiGHS).

Pure. Shares nothing with the planner's search but the definition of a stage's work.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from oobleckd.planner.costs.work import StageWork

EARLIER = (("I", "F"), ("W", "F"), ("W", "I"))
"""Kinds whose order is open: an op of the first may come before a later micro-batch's op of the second."""


class Verdict(NamedTuple):
    """``min_s``: nothing is shorter. ``found_s``: the shortest found; both equal where that is proven."""

    min_s: float
    found_s: float


@dataclass(slots=True)
class Program:
    """Rows ``sum(coefficient * variable) <= bound`` over named variables."""

    columns: dict[Hashable, int] = field(default_factory=dict)
    rows: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def at_most(self, bound: float, terms: dict[Hashable, float]) -> None:
        row = {self.columns.setdefault(name, len(self.columns)): value for name, value in terms.items()}
        self.rows.append((row, bound))

    def after(self, later: Hashable, earlier: Hashable, took_s: float) -> None:
        """``later`` starts when ``earlier``, which takes ``took_s``, has ended."""
        self.at_most(-took_s, {earlier: 1.0, later: -1.0})

    def least(self, name: Hashable, horizon_s: float, limit_s: float) -> Verdict:
        """Minimise ``name``. Names that begin with "before" are 0 or 1, the others within the horizon."""
        size = len(self.columns)
        entries = [(r, c, value) for r, (row, _) in enumerate(self.rows) for c, value in row.items()]
        at_row, at_column, values = zip(*entries, strict=True)
        matrix = coo_array((values, (at_row, at_column)), shape=(len(self.rows), size)).tocsr()
        whole = np.zeros(size)
        whole[[c for key, c in self.columns.items() if isinstance(key, tuple) and key[0] == "before"]] = 1
        goal = np.zeros(size)
        goal[self.columns[name]] = 1
        found = milp(
            goal,
            constraints=LinearConstraint(matrix, -np.inf, np.array([bound for _, bound in self.rows])),
            bounds=Bounds(0, np.where(whole == 1, 1.0, horizon_s)),
            integrality=whole,
            options={"time_limit": limit_s},
        )
        return Verdict(found.mip_dual_bound or 0.0, np.inf if found.fun is None else found.fun)


def shortest(
    works: Sequence[StageWork], num_micro_batches: int, horizon_s: float, limit_s: float, chunks: int = 1
) -> Verdict:
    """The makespan of the best schedule of F, I and W within the memory of ``works``, in seconds. With two
    ``chunks`` a device has the stages that are as far from the beginning as from the end.

    ``horizon_s``: some schedule takes no longer. Ends after ``limit_s`` seconds, perhaps without a proof.
    Micro-batches are alike, so those of a kind run in order; a send follows its op at once.
    """
    program = Program()
    for stage, work in enumerate(works):
        took = {"F": work.forward_s + work.send_s, "I": work.input_s + work.return_s, "W": work.weight_s}
        for k in range(num_micro_batches):
            _data(program, works, stage, k)
            for kind in "FIW":
                program.at_most(-took[kind], {(stage, kind, k): 1.0, "makespan": -1.0})
                if k:
                    program.after((stage, kind, k), (stage, kind, k - 1), took[kind])
            for j in range(k):
                _one_at_a_time(program, stage, (j, k), took, horizon_s)
            if chunks == 1:
                _memory(program, stage, k, work)
    if chunks == 2:
        for stage in range(len(works) // 2):
            _two_chunks(program, works, (stage, len(works) - 1 - stage), num_micro_batches, horizon_s)
    return program.least("makespan", horizon_s, limit_s)


def _data(program: Program, works: Sequence[StageWork], stage: int, k: int) -> None:
    """F after F of the stage before, I after F and after I of the stage behind, W after I."""
    work = works[stage]
    program.after((stage, "I", k), (stage, "F", k), work.forward_s + work.send_s)
    program.after((stage, "W", k), (stage, "I", k), work.input_s + work.return_s)
    if stage:
        before = works[stage - 1]
        program.after((stage, "F", k), (stage - 1, "F", k), before.forward_s + before.send_s)
        program.after((stage - 1, "I", k), (stage, "I", k), work.input_s + work.return_s)


def _one_at_a_time(
    program: Program, stage: int, pair: tuple[int, int], took: dict[str, float], horizon_s: float
) -> None:
    """Of two ops whose order is open, ``before`` is 1 where the earlier micro-batch's is first."""
    j, k = pair
    for first, second in EARLIER:
        before = ("before", stage, first, j, second, k)
        one, other = (stage, first, j), (stage, second, k)
        program.at_most(horizon_s - took[first], {one: 1.0, other: -1.0, before: horizon_s})
        program.at_most(-took[second], {other: 1.0, one: -1.0, before: -horizon_s})
        if j:
            program.at_most(0.0, {before: 1.0, ("before", stage, first, j - 1, second, k): -1.0})


def _memory(program: Program, stage: int, k: int, work: StageWork) -> None:
    """When F of micro-batch ``k`` begins, it and all that is still held must fit."""
    if not work.limit_bytes:
        return
    freed: dict[Hashable, float] = {}
    for j in range(k):
        freed["before", stage, "I", j, "F", k] = -float(work.activation_bytes - work.kept_bytes)
        freed["before", stage, "W", j, "F", k] = -float(work.kept_bytes)
    if freed:
        room = work.limit_bytes - work.base_bytes
        program.at_most(room - (k + 1) * work.activation_bytes, freed)


def _two_chunks(
    program: Program, works: Sequence[StageWork], stages: tuple[int, int], num: int, horizon_s: float
) -> None:
    """Ops of the two stages of a device come one after the other, and what both hold fits."""
    ops = [[(stage, kind, k) for kind in "FIW" for k in range(num)] for stage in stages]
    for one, other in itertools.product(*ops):
        before = ("before", *one, *other)
        program.at_most(horizon_s - _took(works, one), {one: 1.0, other: -1.0, before: horizon_s})
        program.at_most(-_took(works, other), {other: 1.0, one: -1.0, before: -horizon_s})
    limit = works[stages[0]].limit_bytes
    if not limit:
        return
    base = sum(works[stage].base_bytes for stage in stages)
    for own, beside in (stages, stages[::-1]):
        mine, theirs = works[own], works[beside]
        for k in range(num):
            held: dict[Hashable, float] = {}
            for j in range(k):
                held["before", own, "I", j, "F", k] = -float(mine.activation_bytes - mine.kept_bytes)
                held["before", own, "W", j, "F", k] = -float(mine.kept_bytes)
            sure = base + (k + 1) * mine.activation_bytes
            changes = {
                "F": theirs.activation_bytes,
                "I": theirs.kept_bytes - theirs.activation_bytes,
                "W": -theirs.kept_bytes,
            }
            for kind, j in itertools.product("FIW", range(num)):
                if own < beside:  # 1 where ours is first: what theirs changes counts where it is 0
                    held["before", own, "F", k, beside, kind, j] = -float(changes[kind])
                    sure += changes[kind]
                else:
                    held["before", beside, kind, j, own, "F", k] = float(changes[kind])
            program.at_most(limit - sure, held)


def _took(works: Sequence[StageWork], op: tuple[int, str, int]) -> float:
    work = works[op[0]]
    return {"F": work.forward_s + work.send_s, "I": work.input_s + work.return_s, "W": work.weight_s}[op[1]]
