"""Decoupled (zero-bubble) schedules: weight gradients fill the bubbles, within each device's memory.

Owns the choice of a schedule whose backward is split into input gradients (I), for which the stage
before waits, and weight gradients (W), for which nobody does (Qi et al., Zero Bubble Pipeline
Parallelism, 2023). Some dispatch rules, and 1F1B, make orders; from the best of them on, each is
where a search begins (``orders``). On small cases that ended at the optimum (benchmarks/schedules.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import NamedTuple

import msgspec

from planner.orders import ROUNDING, Orders, durations, improve, least_makespan_s, run
from planner.plan import Plan, Range
from planner.profile import Profile
from planner.schedule import Op, backward_ops, forward_ops, one_f_one_b
from planner.work import StageWork, check_room, most_in_flight, stage_works

EFFORT = 1_000_000  # ops run in trials of the search, together about a second
EFFORT_AT_ONCE = 20_000  # where training waits for the schedule


class Rule(NamedTuple):
    """How a free device picks among what it can do: I first, then F, then W.

    It does not begin an F (a W) where something more urgent is known to arrive within this share of
    the time that it takes; and has at most ``ahead`` more micro-batches between F and I than 1F1B.
    """

    f_patience: float
    w_patience: float
    ahead: float


RULES = tuple(Rule(*choice) for choice in product((0.0, 1.0), (1.0, 0.5, 0.0), (0, 1, 4, inf)))


def decoupled(
    works: Sequence[StageWork], micro_batches: Sequence[int], effort: int = EFFORT
) -> tuple[tuple[Op, ...], ...]:
    """Stage -> ops of the fastest schedule found that fits the memory of ``works``; never slower than the
    1F1B that fits.

    ``effort``: how many ops the search may run in trials. Raises ScheduleError where a device has no
    room for one micro-batch.
    """
    check_room(works)
    orders = best_orders(works, len(micro_batches), effort)
    return tuple(_ops(len(works), stage, order, micro_batches) for stage, order in enumerate(orders))


def decoupled_plan(
    plan: Plan, profile: Profile, device_memory_bytes: int, effort: int = EFFORT
) -> dict[str, tuple[Op, ...]]:
    """Device -> its decoupled schedule, for every device of ``plan``; see ``decoupled``.

    Pipelines of equal stages and as many micro-batches are scheduled once. Raises ScheduleError.
    """
    made: dict[tuple[tuple[Range, ...], int], Orders] = {}
    ops = {}
    for pipeline in plan.pipelines:
        stages = tuple(segment.layers for segment in pipeline.segments)
        key = stages, len(pipeline.micro_batches)
        if key not in made:
            works = _with_a_limit(stage_works(stages, profile, device_memory_bytes))
            check_room(works)
            made[key] = best_orders(works, len(pipeline.micro_batches), effort)
        for stage, (segment, order) in enumerate(zip(pipeline.segments, made[key], strict=True)):
            ops[segment.device] = _ops(len(stages), stage, order, pipeline.micro_batches)
    return ops


def _with_a_limit(works: tuple[StageWork, ...]) -> tuple[StageWork, ...]:
    """Where nothing limits memory: as many micro-batches a stage as 1F1B has on the first one, not all of them."""
    return tuple(
        work
        if work.limit_bytes
        else msgspec.structs.replace(work, limit_bytes=work.peak_bytes("F" * len(works)))
        for work in works
    )


def best_orders(works: Sequence[StageWork], num_micro_batches: int, effort: int = EFFORT) -> Orders:
    """The order of F, I and W on every stage; see ``decoupled``."""
    times, bound_s = durations(works), least_makespan_s(works, num_micro_batches)
    made = [_dispatch(works, num_micro_batches, rule) for rule in RULES]
    tried = dict.fromkeys([*made, _coupled(works, num_micro_batches)])
    runs = ((run(times, orders), orders) for orders in tried)
    ranked = sorted((ran.makespan_s, orders) for ran, orders in runs if ran is not None)
    best_s, best = ranked[0]
    for _, orders in ranked:
        found = improve(works, orders, effort, bound_s)
        effort = found.ops_left
        best_s, best = min((best_s, best), (found.makespan_s, found.orders))
        if effort <= 0 or best_s <= bound_s * (1 + ROUNDING):
            break
    return best


def _coupled(works: Sequence[StageWork], num_micro_batches: int) -> Orders:
    """1F1B as far as memory allows it, W right behind its I."""
    letters = {"F": "F", "B": "IW"}
    return tuple(
        "".join(
            letters.get(op.kind, "") for op in one_f_one_b(len(works), stage, range(num_micro_batches), most)
        )
        for stage, most in enumerate(most_in_flight(works))
    )


def _ops(num_stages: int, stage: int, order: str, micro_batches: Sequence[int]) -> tuple[Op, ...]:
    """``order`` with receives before and sends behind; ends with the reduce and the update."""
    waiting = {kind: iter(micro_batches) for kind in "FIW"}
    ops: list[Op] = []
    for kind in order:
        micro_batch = next(waiting[kind])
        if kind == "F":
            ops += forward_ops(num_stages, stage, micro_batch)
        elif kind == "I":
            ops += backward_ops(num_stages, stage, micro_batch, "I")
        else:
            ops.append(Op("W", stage, micro_batch))
    return (*ops, Op("R"), Op("U"))


@dataclass(slots=True)
class _Stage:
    """A stage in the dispatch: what came and when, what was done, when it is free again."""

    work: StageWork
    most: float
    came: dict[str, list[float]] = field(default_factory=lambda: {"F": [], "I": []})
    order: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=lambda: {"F": 0, "I": 0, "W": 0})
    held_bytes: int = 0
    free_s: float = 0.0

    def next_s(self, kind: str) -> float:
        """When the next F or I could begin as far as data are concerned; inf if that is not known."""
        came, done = self.came[kind], self.done[kind]
        return came[done] if done < len(came) else inf

    def pick(self, now_s: float, rule: Rule, took: dict[str, float]) -> str | None:
        """What the free stage begins now; None: it waits."""
        next_i, next_f = self.next_s("I"), self.next_s("F") if self._has_room() else inf
        if next_i <= now_s:
            return "I"
        if next_f <= now_s and next_i >= now_s + rule.f_patience * took["F"]:
            return "F"
        owes_w = self.done["I"] > self.done["W"]
        if owes_w and min(next_i, next_f) >= now_s + rule.w_patience * took["W"]:
            return "W"
        return None

    def begin(self, kind: str, end_s: float) -> None:
        """Account for an op that runs until ``end_s``."""
        self.order.append(kind)
        self.done[kind] += 1
        self.free_s = end_s
        self.held_bytes += self.work.changes()[kind]

    def wakes(self, now_s: float) -> Iterator[float]:
        """When what is known to be on its way arrives."""
        return (came for came in (self.next_s("F"), self.next_s("I")) if now_s < came < inf)

    def _has_room(self) -> bool:
        in_flight = self.done["F"] - self.done["I"]
        held = self.held_bytes + self.work.activation_bytes
        return in_flight < self.most and self.work.fits(self.work.base_bytes + held)


def _dispatch(works: Sequence[StageWork], num_micro_batches: int, rule: Rule) -> Orders:
    """The orders that ``rule`` leads to, from event to event.

    It comes to an end: what a stage holds waits for an I, which the stages behind it lead to, or is
    a W that it can begin at any time; with neither there is room for an F.
    """
    times = durations(works)
    stages = [_Stage(work, len(works) - stage + rule.ahead) for stage, work in enumerate(works)]
    stages[0].came["F"] = [0.0] * num_micro_batches
    events = [(0.0, 0)]
    while events:
        now_s, at = heapq.heappop(events)
        stage = stages[at]
        if now_s < stage.free_s:
            continue
        kind = stage.pick(now_s, rule, times[at])
        if kind is None:
            for wake_s in stage.wakes(now_s):
                heapq.heappush(events, (wake_s, at))
            continue
        end_s = now_s + times[at][kind]
        stage.begin(kind, end_s)
        heapq.heappush(events, (end_s, at))
        told = _tells(at, kind, len(stages))
        if told is not None:
            other, what = told
            stages[other].came[what].append(end_s)
            heapq.heappush(events, (max(now_s, stages[other].free_s), other))
    return tuple("".join(stage.order) for stage in stages)


def _tells(stage: int, kind: str, num_stages: int) -> tuple[int, str] | None:
    """(stage, kind of op) that can begin when an op of ``kind`` on ``stage`` has ended."""
    if kind == "F":
        return (stage + 1, "F") if stage + 1 < num_stages else (stage, "I")
    return (stage - 1, "I") if kind == "I" and stage > 0 else None
