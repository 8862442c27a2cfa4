"""Makes orders by dispatch rules in a job shop; one of them, ready-first, is what a worker without an order
does.

Owns the simulation of free devices that pick what they begin next, for one step or for several whose updates
are staggered. A rule never waits for ever (``_Bench.admits``). Which orders are good ``evaluate`` says, and
``tabu`` makes them better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from oobleckd.planner.schedules.jobshop import NOBODY, Orders, Shop

ROUNDS = 4  # that are dispatched where updates are staggered: by then they repeat, or nearly


class DispatchRule(NamedTuple):
    """How a free device picks among what it can do: backward (I) first, then F, then W; with ``eager`` F
    before I.

    It does not begin an F (a W) where something more urgent is known to arrive within this share of the time
    that it takes; and has at most ``ahead`` more micro-batches in flight than 1F1B. Forwards come by their
    micro-batches; with ``mixed`` those that take different ways in turn, with ``shuffled`` in the order of
    that seed.
    """

    f_patience: float = 0.0
    w_patience: float = 0.0
    ahead: float = 0.0
    eager: bool = False
    mixed: bool = False
    shuffled: int | None = None


READY_FIRST = DispatchRule()
"""What the worker does (``oobleckd.worker.round_machine.tasks.Board``)."""
RULES = (
    DispatchRule(0.0, 0.5, inf, mixed=True),
    DispatchRule(0.0, 0.0, inf, eager=True, mixed=True),
    DispatchRule(1.0, 0.5, inf, mixed=True),
    DispatchRule(0.0, 0.0, inf, mixed=True),
    DispatchRule(0.0, 1.0, inf, eager=True, mixed=True),
    DispatchRule(0.0, 0.5, inf),
)
RULES_FUSED = (
    DispatchRule(0.0, 0.0, inf, eager=True, mixed=True),
    DispatchRule(0.0, 0.0, inf, mixed=True),
    DispatchRule(0.0, 0.0, 0, eager=True),
    DispatchRule(0.0, 0.0, 1),
    DispatchRule(0.5, 0.0, inf, mixed=True),
    DispatchRule(0.0, 0.0, 1, eager=True, mixed=True),
)
"""Those that were best, of 72 that were tried on random shops: all others together bring less than 0.2 %
more.
"""
# Four of 51 shapes with a whole backward were a unit above the optimum; from shuffled orders, and from the
# end of a step, none is. (D-schedules-019)
RULES_SHUFFLED = (DispatchRule(0.0, 0.0, inf, eager=True), DispatchRule(0.0, 0.0, inf))
"""Tried with one seed after the other. Where stages are alike most moves of a search change nothing, and
beginning elsewhere finds what it cannot.
"""


class Dispatched(NamedTuple):
    """``orders`` of every round that was dispatched; ``votes_s``: when all devices had all sums of it."""

    orders: tuple[Orders, ...]
    votes_s: tuple[float, ...]


@dataclass(slots=True)
class _Bench:
    """What a device has of a round: what has come, what will, what it has done. Its levels are the hops left
    of its routes, ascending; here they go by their place among these.
    """

    shop: Shop
    device: int
    rule: DispatchRule
    levels: tuple[int, ...]
    most: tuple[int, ...]  # by level, the largest change of an F
    nearer: tuple[int, ...]  # by level, the sum of those before it
    place: dict[int, int]  # of a level
    rank: Sequence[int]
    coming: list[tuple[float, int]] = field(default_factory=list)  # F
    owed: list[tuple[float, int]] = field(default_factory=list)  # B or I on its way
    stride: int = field(init=False)
    forward: list[list[tuple[int, int]]] = field(init=False)
    backward: list[tuple[int, int]] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    first_weight: int = 0
    flying: list[int] = field(init=False)
    held: list[int] = field(init=False)
    ran: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stride = self.shop.stride
        self.forward = [[] for _ in self.levels]
        self.flying = [0] * len(self.levels)
        self.held = [0] * len(self.levels)

    def take_in(self, now_s: float) -> None:
        """Move what was on its way and has arrived to what can begin."""
        coming, owed, stride = self.coming, self.owed, self.stride
        while coming and coming[0][0] <= now_s:
            op = heappop(coming)[1]
            heappush(self.forward[self.place[self.shop.left[op]]], (self.rank[op // stride], op))
        while owed and owed[0][0] <= now_s:
            op = heappop(owed)[1]
            heappush(self.backward, (self.ran[op // stride], op))

    def pick(self, now_s: float, backward_from_s: float) -> int | None:
        """Choose what the free device begins now; None: it waits."""
        self.take_in(now_s)
        rule, gated = self.rule, now_s < backward_from_s
        next_b = now_s if self.backward else self.owed[0][0] if self.owed else inf
        if gated and next_b < backward_from_s:
            next_b = backward_from_s
        if next_b <= now_s and not rule.eager:
            return heappop(self.backward)[1]
        level = self._next_forward()
        if level >= 0:
            ready = self.forward[level]
            patience = rule.f_patience
            if rule.eager or patience == 0 or next_b >= now_s + patience * self.shop.seconds[ready[0][1]]:
                return heappop(ready)[1]
        if next_b <= now_s:
            return heappop(self.backward)[1]
        if self.first_weight < len(self.weights) and not gated:
            op = self.weights[self.first_weight]
            soon_s = min(next_b, now_s if level >= 0 else self.coming[0][0] if self.coming else inf)
            if rule.w_patience == 0 or soon_s >= now_s + rule.w_patience * self.shop.seconds[op]:
                self.first_weight += 1
                return op
        return None

    def _next_forward(self) -> int:
        """The level of the forward that it would begin; -1: of none."""
        found, first = -1, (-1, -1)
        for level, ready in enumerate(self.forward):
            if ready and (found < 0 or ready[0] < first) and self.admits(level):
                found, first = level, ready[0]
        return found

    def admits(self, level: int) -> bool:
        """Whether a forward so many hops from the end may begin: within the cap, and with room left for one
        of each that is nearer.

        For every number of hops s: what is held with s or more to go leaves room for the largest F of every
        smaller number. So nobody waits for ever, as in ``oobleckd.worker.round_machine.tasks``: suppose that
        all with fewer hops to go are done; then whatever device has one of r hops may run it.
        """
        hops = self.levels[level]
        if self.rule.ahead != inf and sum(self.flying[: level + 1]) >= hops + self.rule.ahead:
            return False
        room = self.shop.room[self.device]
        if room is None or self.rule is READY_FIRST:
            return True
        held, nearer = self.held, self.nearer
        above = sum(held[level:]) + self.most[level]
        while above + nearer[level] <= room:
            if not level:
                return True
            level -= 1
            above += held[level]
        return False

    def begin(self, op: int, clock: int) -> None:
        """Account for ``op``."""
        shop, level = self.shop, self.place[self.shop.left[op]]
        self.order.append(op)
        self.held[level] += shop.change[op]
        hop, kind = divmod(op, self.stride)
        if kind == 0:
            self.flying[level] += 1
            self.ran[hop] = clock
        elif kind == self.stride - 1:
            self.flying[level] -= 1
        else:
            self.weights.append(op + 1)


class _Floor:
    """All devices, over ``rounds`` steps."""

    def __init__(self, shop: Shop, rule: DispatchRule, rounds: int) -> None:
        self.shop, self.rule, self.rounds = shop, rule, rounds
        self.patient = rule.f_patience > 0 or rule.w_patience > 0
        self.rank = _ranks(shop, rule)
        self.most = _most(shop)
        self.benches = [[self._bench(device) for device in range(len(shop.names))] for _ in range(rounds)]
        self.round = [0] * len(shop.names)
        self.free_s = [0.0] * len(shop.names)
        self.votes_s: list[float] = []
        # What is still to be added to a bucket, and how many buckets a device still waits for.
        self.members: list[list[int]] = [[] for _ in range(max(shop.part_of, default=-1) + 1)]
        self.size = [0] * len(shop.sums)
        for bucket, (parts, _) in enumerate(shop.sums):
            for part in parts:
                self.members[part].append(bucket)
        for part in shop.part_of:
            for bucket in self.members[part]:
                self.size[bucket] += 1
        self.missing = [list(self.size) for _ in range(rounds)]
        waits = [0] * len(shop.names)
        for bucket, (_, devices) in enumerate(shop.sums):
            for device in devices:
                waits[device] += self.size[bucket] > 0
        self.waits = [list(waits) for _ in range(rounds)]
        self.reduced = [[0.0] * len(shop.names) for _ in range(rounds)]
        self.left = [sum(each > 0 for each in waits)] * rounds
        self.events: list[tuple[float, int, int]] = []
        self.clock = 0

    def _bench(self, device: int) -> _Bench:
        levels = tuple(sorted(self.most[device]))
        most = tuple(self.most[device][level] for level in levels)
        place = {level: number for number, level in enumerate(levels)}
        nearer = tuple(accumulate(most, initial=0))[:-1]
        return _Bench(self.shop, device, self.rule, levels, most, nearer, place, self.rank)

    def run(self) -> Dispatched:
        """Go from event to event until all rounds are dispatched."""
        shop, stride, events = self.shop, self.shop.stride, self.events
        for benches in self.benches:
            for hop, (_, position) in enumerate(shop.hops):
                if position == 0:
                    benches[shop.device[stride * hop]].coming.append((0.0, stride * hop))
        for device in range(len(shop.names)):
            self._wake(0.0, device)
        while events:
            now_s, _, device = heappop(events)
            if now_s >= self.free_s[device] and self.round[device] < self.rounds:
                self._serve(now_s, device)
        assert len(self.votes_s) == self.rounds, "devices that wait for each other"
        orders = tuple(tuple(tuple(bench.order) for bench in benches) for benches in self.benches)
        return Dispatched(orders, tuple(self.votes_s))

    def _wake(self, when_s: float, device: int) -> None:
        self.clock += 1
        heappush(self.events, (when_s, self.clock, device))

    def _serve(self, now_s: float, device: int) -> None:
        """Choose what ``device``, which is free, begins, and wake who is to hear of it."""
        shop, number = self.shop, self.round[device]
        bench = self.benches[number][device]
        stride = bench.stride
        votes = len(self.votes_s)
        # No backward before the vote on the step before: its weight gradients would need sums of their own,
        # as large as the model's. (D-schedules-007)
        from_s = 0.0 if number == 0 else self.votes_s[number - 1] if votes >= number else inf
        op = bench.pick(now_s, from_s)
        if op is None:
            self._sleep(bench, now_s, from_s)
            return
        end_s = now_s + shop.seconds[op]
        bench.begin(op, self.clock)
        self.free_s[device] = end_s
        self._wake(end_s, device)
        fed = shop.feeds[op]
        if fed != NOBODY:
            other = shop.device[fed]
            there = self.benches[number][other]
            heappush(there.owed if fed % stride else there.coming, (end_s, fed))
            # One that works looks for itself when it is free: of three events an op one is left, and the
            # orders
            # are the same. (D-schedules-021)
            if other != device and self.round[other] == number and self.free_s[other] <= now_s:
                if self.patient:
                    self._wake(now_s, other)
                self._wake(end_s, other)
        if op % stride == stride - 1:
            self._add(number, shop.part_of[op // stride], end_s)

    def _sleep(self, bench: _Bench, now_s: float, from_s: float) -> None:
        """Let the device wait: for the first of what is known to be on its way, and for the vote
        before it.
        """
        if bench.coming and bench.coming[0][0] > now_s:
            self._wake(bench.coming[0][0], bench.device)
        if bench.owed and bench.owed[0][0] > now_s:
            self._wake(bench.owed[0][0], bench.device)
        if now_s < from_s < inf:
            self._wake(from_s, bench.device)

    def _add(self, number: int, part: int, end_s: float) -> None:
        """Add the gradients of a hop to its device's sums; what is complete by them may be voted on."""
        for bucket in self.members[part]:
            self.missing[number][bucket] -= 1
            if self.missing[number][bucket]:
                continue
            for device in self.shop.sums[bucket][1]:
                self.waits[number][device] -= 1
                self.reduced[number][device] = max(self.reduced[number][device], end_s)
                if not self.waits[number][device]:
                    self._vote(number, device)

    def _vote(self, number: int, device: int) -> None:
        at_s = self.reduced[number][device]
        self.left[number] -= 1
        self.round[device] = number + 1
        self.free_s[device] = max(self.free_s[device], at_s + self.shop.update_s[device])
        self._wake(self.free_s[device], device)
        if not self.left[number]:
            self.votes_s.append(max(self.reduced[number]))
            for other in range(len(self.free_s)):
                self._wake(max(self.votes_s[-1], self.free_s[other]), other)


def has_room(shop: Shop) -> bool:
    """Whether every device has room for a micro-batch of each number of hops to go: else rules may wait for
    ever.
    """
    return all(
        room is None or sum(most.values()) <= room for room, most in zip(shop.room, _most(shop), strict=True)
    )


def _most(shop: Shop) -> list[dict[int, int]]:
    """Device -> hops to go -> the most that a forward takes there."""
    most: list[dict[int, int]] = [{} for _ in shop.names]
    for op in range(0, len(shop.seconds), shop.stride):
        levels = most[shop.device[op]]
        levels[shop.left[op]] = max(levels.get(shop.left[op], 0), shop.change[op])
    return most


def dispatch(shop: Shop, rule: DispatchRule, rounds: int = 1) -> Dispatched:
    """What ``rule`` leads to, for as many ``rounds`` with staggered updates."""
    if not shop.hops:
        return Dispatched((tuple(() for _ in shop.names),) * rounds, (0.0,) * rounds)
    return _Floor(shop, rule, rounds).run()


def mirrored(shop: Shop, rule: DispatchRule) -> tuple[Orders, ...]:
    """Orders of a flushed step with a backward as a whole that ``rule`` leads to from its end to its
    beginning.

    Seen from its end such a step is another one: B of the first stage comes first, F of the first stage last,
    and what is held is the same. A rule that makes the beginning tight then makes the end so.
    """
    assert not shop.apart, "W waits for its I alone, which mirrored is no F"
    seconds = list(shop.seconds)
    seconds[::2], seconds[1::2] = seconds[1::2], seconds[::2]
    found = dispatch(replace(shop, seconds=tuple(seconds)), rule).orders
    return tuple(tuple(tuple(op ^ 1 for op in reversed(order)) for order in orders) for orders in found)


def _mixed_bits(seed: int, number: int) -> int:
    """A number that looks like chance, and is the same each time."""
    return int.from_bytes(blake2b(b"%d %d" % (seed, number), digest_size=8).digest())


def _ranks(shop: Shop, rule: DispatchRule) -> list[int]:
    """Hop -> when its micro-batch is to come, of all."""
    if rule.shuffled is not None:
        keys = [_mixed_bits(rule.shuffled, index) for index in range(len(shop.routes))]
        return [keys[index] for index, _ in shop.hops]
    if not rule.mixed:
        return [index for index, _ in shop.hops]
    ways: dict[tuple[str, ...], list[int]] = {}
    for index, route in enumerate(shop.routes):
        ways.setdefault(tuple(segment.device for segment in route.segments), []).append(index)
    share = {
        index: ((at + 0.5) / len(each), index) for each in ways.values() for at, index in enumerate(each)
    }
    rank = {index: place for place, index in enumerate(sorted(share, key=lambda index: share[index]))}
    return [rank[index] for index, _ in shop.hops]
