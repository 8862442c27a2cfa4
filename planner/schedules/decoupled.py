"""Decoupled (zero-bubble) schedules: weight gradients fill the bubbles, within each device's memory.

Owns the choice of a schedule whose backward is split into input gradients (I), for which the stage before
waits, and weight gradients (W), for which nobody does (Qi et al., Zero Bubble Pipeline Parallelism, 2023), of
one or two virtual stages a device (``pipe``). Some dispatch rules, and 1F1B where a device has one stage,
make orders; from the best of them on, each is where a search begins (``orders``). On small cases that ended
at the optimum (benchmarks/schedules.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import NamedTuple

from oobleckd.planner.costs.work import StageWork, check_room, max_in_flight, stage_works
from oobleckd.planner.plan import Plan, Range, Recompute
from oobleckd.planner.profile import NOTHING, HeldBesides, Profile
from oobleckd.planner.schedule import Op, backward_ops, forward_ops, one_f_one_b
from oobleckd.planner.schedules.orders import ROUNDING, Orders, improve, min_makespan_s, run
from oobleckd.planner.schedules.pipe import CHUNKS, Pipe

EFFORT = 1_000_000  # ops run in trials of the search, together about a second
EFFORT_AT_ONCE = 20_000  # where training waits for the schedule


class Rule(NamedTuple):
    """How a free device picks among what it can do: I first, then F, then W; with ``eager`` F before I.

    It does not begin an F (a W) where something more urgent is known to arrive within this share of the time
    that it takes; and has at most ``ahead`` more micro-batches between F and I than 1F1B. Of its two stages
    the one nearer to the end comes first with an F or a W, and with an I the one that could begin it first.
    """

    f_patience: float
    w_patience: float
    ahead: float
    eager: bool = False


RULES = tuple(Rule(*choice) for choice in product((0.0, 1.0), (1.0, 0.5, 0.0), (0, 1, 4, inf)))
RULES_QUICK = tuple(rule for rule in RULES if rule.f_patience == 0.0 and rule.ahead in {0, inf})
"""Enough to see about how long a schedule takes."""
RULES_V = tuple(
    Rule(0.0, w_patience, inf, eager) for w_patience, eager in product((1.0, 0.5, 0.0), (False, True))
)
"""Those that were best for devices with two stages: all others together bring less than 1 % more."""


def decoupled(
    works: Sequence[StageWork], micro_batches: Sequence[int], effort: int = EFFORT, chunks: int = 1
) -> tuple[tuple[Op, ...], ...]:
    """Device -> ops of the fastest schedule found that fits the memory of ``works`` (one for each virtual
    stage, of which a device has as many as ``chunks``); with one stage a device never slower than the 1F1B
    that fits.

    ``effort``: how many ops the search may run in trials. Raises ScheduleError where a device has no
    room for one micro-batch.
    """
    pipe = Pipe.of(works, chunks)
    orders = best_orders(pipe, len(micro_batches), effort)
    return tuple(_ops(pipe, device, order, micro_batches) for device, order in enumerate(orders))


class Ordered(NamedTuple):
    """Pipelines of one shape, and the orders of their devices."""

    pipe: Pipe
    num_micro_batches: int
    orders: Orders

    def ops(self, micro_batches: Iterable[int]) -> tuple[tuple[Op, ...], ...]:
        """Device by device its schedule, of a pipeline with ``micro_batches``."""
        wanted = tuple(micro_batches)
        return tuple(_ops(self.pipe, device, order, wanted) for device, order in enumerate(self.orders))


def decoupled_orders(
    plan: Plan,
    profile: Profile,
    device_memory_bytes: int,
    effort: int = EFFORT,
    besides: Callable[[Sequence[Range], Sequence[Recompute]], Sequence[int]] = lambda _stages, _modes: (),
    held: HeldBesides = NOTHING,
) -> tuple[Ordered, ...]:
    """The orders of each pipeline of ``plan``; see ``decoupled``.

    Pipelines of equal stages and as many micro-batches are ordered once and share the answer. ``besides``:
    stages, and what they compute again -> bytes that their devices hold of others; ``held``: what any device
    keeps besides its stages. Raises ScheduleError.
    """
    made: dict[tuple[tuple[Range, ...], int, int, tuple[Recompute, ...]], Ordered] = {}
    found = []
    for pipeline in plan.pipelines:
        stages = tuple(segment.layers for segment in pipeline.segments)
        key = stages, len(pipeline.micro_batches), pipeline.chunks, plan.modes_of(pipeline)
        if key not in made:
            more = besides(stages, key[3])
            pipe = pipe_of(stages, key[2], profile, device_memory_bytes, more, held, key[3])
            made[key] = Ordered(pipe, key[1], best_orders(pipe, key[1], effort))
        found.append(made[key])
    return tuple(found)


def ops_of(plan: Plan, ordered: Iterable[Ordered]) -> dict[str, tuple[Op, ...]]:
    """Device -> its schedule, for every device of ``plan``, whose pipelines are ``ordered``."""
    return {
        device: ops
        for pipeline, each in zip(plan.pipelines, ordered, strict=True)
        for device, ops in zip(pipeline.devices, each.ops(pipeline.micro_batches), strict=True)
    }


def pipe_of(
    stages: Sequence[Range],
    chunks: int,
    profile: Profile,
    device_memory_bytes: int,
    besides: Sequence[int] = (),
    held: HeldBesides = NOTHING,
    recompute: Sequence[Recompute] = (),
) -> Pipe:
    """The pipeline of ``stages``. Where nothing limits memory: room for as many micro-batches a device as
    1F1B has on the first of as many devices, not for all of them. ``besides``, ``held``,
    ``recompute``: as in ``work.stage_works``.
    """
    works = stage_works(stages, profile, device_memory_bytes, chunks, besides, held, recompute, apart=True)
    pipe = Pipe.of(works, chunks)
    if device_memory_bytes:
        return pipe
    num_devices = len(pipe.stages)
    limits = tuple(
        pipe.peak_bytes(device, CHUNKS[0][0] * num_devices + CHUNKS[1][0] * num_devices * (chunks - 1))
        for device in range(num_devices)
    )
    return replace(pipe, limit_bytes=limits)


def best_orders(
    pipe: Pipe, num_micro_batches: int, effort: int = EFFORT, rules: Sequence[Rule] = ()
) -> Orders:
    """The order of F, I and W on every device; see ``decoupled``. ``rules``: none but these. Raises
    ScheduleError.
    """
    check_room(pipe.works, pipe.chunks)
    bound_s = min_makespan_s(pipe, num_micro_batches)
    rules = rules or (RULES if pipe.chunks == 1 else RULES_V)
    made = [_dispatch(pipe, num_micro_batches, rule) for rule in rules]
    if pipe.chunks == 1:
        made.append(_coupled(pipe, num_micro_batches))
    runs = ((run(pipe, orders), orders) for orders in dict.fromkeys(made))
    ranked = sorted((ran.makespan_s, orders) for ran, orders in runs if ran is not None)
    best_s, best = ranked[0]
    for _, orders in ranked:
        # Rules and a search, no integer program: that proves small cases in a second and large ones never,
        # and the search ended at its optimum on all of them. (D-schedules-001)
        found = improve(pipe, orders, effort, bound_s)
        effort = found.ops_left
        best_s, best = min((best_s, best), (found.makespan_s, found.orders))
        if effort <= 0 or best_s <= bound_s * (1 + ROUNDING):
            break
    return best


def _coupled(pipe: Pipe, num_micro_batches: int) -> Orders:
    """1F1B as far as memory allows it, W right behind its I."""
    letters = {"F": "F", "B": "IW"}
    return tuple(
        "".join(
            letters.get(op.kind, "")
            for op in one_f_one_b(len(pipe.works), stage, range(num_micro_batches), limit)
        )
        for stage, limit in enumerate(max_in_flight(pipe.works))
    )


def _ops(pipe: Pipe, device: int, order: str, micro_batches: Sequence[int]) -> tuple[Op, ...]:
    """``order`` with receives before and sends behind; ends with the reduce and the update."""
    waiting = {letter: iter(micro_batches) for letter in pipe.times[device]}
    num_stages, ops = len(pipe.works), []
    for letter in order:
        stage, micro_batch = pipe.stages[device][letter.islower()], next(waiting[letter])
        if letter in "Ff":
            ops += forward_ops(num_stages, stage, micro_batch)
        elif letter in "Ii":
            ops += backward_ops(num_stages, stage, micro_batch, "I")
        else:
            ops.append(Op("W", stage, micro_batch))
    return (*ops, Op("R"), Op("U"))


@dataclass(slots=True)
class _Device:
    """A device in the dispatch: what came and when, what was done, when it is free again."""

    pipe: Pipe
    number: int
    rule: Rule
    came: dict[str, list[float]] = field(init=False)
    done: dict[str, int] = field(init=False)
    order: list[str] = field(default_factory=list)
    held_bytes: int = 0
    free_s: float = 0.0

    def __post_init__(self) -> None:
        letters = self.pipe.times[self.number]
        self.came = {letter: [] for letter in letters if letter not in "Ww"}
        self.done = dict.fromkeys(letters, 0)
        self.held_bytes = self.pipe.base_bytes[self.number]

    def next_s(self, letter: str) -> float:
        """When the next F or I could begin as far as data are concerned; inf if that is not known."""
        came, done = self.came[letter], self.done[letter]
        return came[done] if done < len(came) else inf

    def pick(self, now_s: float) -> str | None:
        """Choose what the free device begins now; None: it waits."""
        rule, took, chunks = self.rule, self.pipe.times[self.number], CHUNKS[: self.pipe.chunks]
        next_i, i = min((self.next_s(i), i) for _, i, _ in chunks)
        if next_i <= now_s and not rule.eager:
            return i
        next_f, f = self._next_f(now_s)
        if next_f <= now_s and (rule.eager or next_i >= now_s + rule.f_patience * took[f]):
            return f
        if next_i <= now_s:
            return i
        owed = next((w for _, i, w in reversed(chunks) if self.done[i] > self.done[w]), None)
        if owed and min(next_i, next_f) >= now_s + rule.w_patience * took[owed]:
            return owed
        return None

    def _next_f(self, now_s: float) -> tuple[float, str]:
        """When a forward could begin, and which; of those that could by now the one nearer to the end."""
        found = inf, ""
        for f, _, _ in reversed(CHUNKS[: self.pipe.chunks]):
            came_s = self.next_s(f)
            if came_s < found[0] and self._has_room(f):
                found = came_s, f
                if came_s <= now_s:
                    break
        return found

    def begin(self, letter: str, end_s: float) -> None:
        """Note that the device runs op ``letter`` until ``end_s``, and what it then holds."""
        self.order.append(letter)
        self.done[letter] += 1
        self.free_s = end_s
        self.held_bytes += self.pipe.changes[self.number][letter]

    def wakes(self, now_s: float) -> Iterator[float]:
        """When what is known to be on its way arrives."""
        return (came for came in map(self.next_s, self.came) if now_s < came < inf)

    def _has_room(self, letter: str) -> bool:
        """Of a first chunk as long as its own leave room for one of the second: that must always be able to
        go on.
        """
        changes = self.pipe.changes[self.number]
        if not self.pipe.fits(self.number, self.held_bytes + changes[letter]):
            return False
        if letter == "f":
            return self.done["f"] - self.done["i"] < self.pipe.cap(self.number, 1) + self.rule.ahead
        flying = self.done["F"] - self.done["I"]
        if self.pipe.chunks > 1:
            flying += self.done["f"] - self.done["i"]
            own = sum(changes[kind] * self.done[kind] for kind in CHUNKS[0])
            min_bytes = self.pipe.base_bytes[self.number] + own + changes["F"] + changes["f"]
            if not self.pipe.fits(self.number, min_bytes):
                return False
        return flying < self.pipe.cap(self.number, 0) + self.rule.ahead


def _dispatch(pipe: Pipe, num_micro_batches: int, rule: Rule) -> Orders:
    """The orders that ``rule`` leads to, from event to event.

    It comes to an end: what a device holds of its last stage waits for an I, which the stages behind it lead
    to, or is a W that it can begin at any time; with neither there is room for an F there. What it holds of
    its first one waits for the I of stages nearer to the end, or is such a W, or there is room.
    """
    devices = [_Device(pipe, number, rule) for number in range(len(pipe.stages))]
    devices[0].came["F"] = [0.0] * num_micro_batches
    events = [(0.0, 0)]
    while events:
        now_s, at = heapq.heappop(events)
        device = devices[at]
        if now_s < device.free_s:
            continue
        letter = device.pick(now_s)
        if letter is None:
            for wake_s in device.wakes(now_s):
                heapq.heappush(events, (wake_s, at))
            continue
        end_s = now_s + pipe.times[at][letter]
        device.begin(letter, end_s)
        heapq.heappush(events, (end_s, at))
        told = pipe.feeds[at].get(letter)
        if told is not None:
            other, what = told
            devices[other].came[what].append(end_s)
            heapq.heappush(events, (max(now_s, devices[other].free_s), other))
    return tuple("".join(device.order) for device in devices)
