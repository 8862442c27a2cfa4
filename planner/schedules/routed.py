"""Finds how long a step over routes that cross takes, and the order in which it is best run.

Routes cross where pipelines have vacant places, whose peers compute for them.

Owns the choice: ready-first, which is what devices do from a loss on, or orders that are enough faster to
stop for. Rules make orders (``dispatch``), and a search goes on from the best (``tabu``); the goal is a
flushed step or, with staggered updates, the period in which steps follow each other. Chooses no route
(``reroute``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from oobleckd.planner.plan import Layout, Recompute, Route
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.planner.schedules.dispatch import (
    READY_FIRST,
    ROUNDS,
    RULES,
    RULES_FUSED,
    RULES_SHUFFLED,
    DispatchRule,
    dispatch,
    has_room,
    mirrored,
)
from oobleckd.planner.schedules.evaluate import ROUNDING, makespan_s, period, run
from oobleckd.planner.schedules.jobshop import Hops, Orders, Shop, shop_of
from oobleckd.planner.schedules.tabu import improve

MAX_HOPS = 20_000
"""Of a step that is run to see how long it takes: some tenths of a second. Beyond it whoever asks must
estimate.
"""
# Ops run in search of orders while training waits for them or goes on ready-first: about half a second.
EFFORT_AT_ONCE = 300_000
DISPATCHED = 10  # an op that a rule places costs as much as so many that are run
SHUFFLES = 32  # orders in which micro-batches may come, tried by the rules as far as the effort goes
STARTS = 3  # the search begins from so many of the best orders
# Ready-first needs nobody's plan at the moment of a loss and loses up to a third of a step to an order. A
# stop costs about a step, and plans are chosen for a hundred. (D-schedules-011)
WORTH = 0.01
"""An order must be modelled to save so much of a step, or ready-first stays: a stop costs about a step of the
horizon's hundred.
"""

NOTHING_AGAIN: Mapping[str, Recompute] = {}


class Crossing(NamedTuple):
    """``step_s`` of what is to be run: in ``orders``, or ready-first where those are None."""

    step_s: float
    orders: Orders | None


def crossing(shop: Shop, effort: int = EFFORT_AT_ONCE, *, staggered: bool = False) -> Crossing:
    """How the step of ``shop`` is best run. ``effort``: how many ops may be run in search of it. For up to
    ``MAX_HOPS``.
    """
    ready_s = ready_first_s(shop, staggered=staggered)
    if min_s(shop, staggered=staggered) >= ready_s * (1 - WORTH):
        return Crossing(ready_s, None)  # no order can be worth it
    best_s, best = best_orders(shop, effort, (), staggered=staggered)
    if best is None or best_s >= ready_s * (1 - WORTH):
        return Crossing(ready_s, None)
    return Crossing(best_s, best)


def better(shop: Shop, orders: Orders, effort: int = EFFORT_AT_ONCE) -> Orders:
    """Orders with a shorter period than ``orders``, where updates are staggered; those where none
    is found.
    """
    before = period(shop, orders)
    assert before is not None, "orders that run"
    best_s, best = best_orders(shop, effort, (orders,), staggered=True)
    return orders if best is None or best_s >= before.seconds * (1 - ROUNDING) else best


def best_orders(
    shop: Shop, effort: int, begun: Sequence[Orders], *, staggered: bool
) -> tuple[float, Orders | None]:
    """The best orders that rules and a search find, also from those ``begun``, with their seconds; None where
    none fit. ``effort``: as in ``crossing``.
    """
    least = min_s(shop, staggered=staggered)
    found: dict[Orders, float] = {}
    for orders in (*begun, *_dispatched(shop, effort // 2, staggered=staggered)):
        if orders not in found and all(shop.fits(device, order) for device, order in enumerate(orders)):
            seconds = _seconds(shop, orders, staggered=staggered)
            if seconds is not None:
                found[orders] = seconds
                if seconds <= least * (1 + ROUNDING):
                    break
    best_s, best = min(((seconds, orders) for orders, seconds in found.items()), default=(0.0, None))
    effort //= 2
    for seconds, orders in sorted((seconds, orders) for orders, seconds in found.items())[:STARTS]:
        if best_s <= least * (1 + ROUNDING) or effort <= 0:
            break
        tried = improve(shop, orders, effort, least, staggered=staggered)
        effort = tried.ops_left
        if tried.seconds < min(seconds, best_s):
            best_s, best = tried.seconds, tried.orders
    return best_s, best


def ready_first_s(shop: Shop, *, staggered: bool = False) -> float:
    """Seconds of a step of devices that do whatever is ready, until the slowest update; staggered: from step
    to step.
    """
    votes = dispatch(shop, READY_FIRST, ROUNDS if staggered else 1).votes_s
    if staggered:
        return (votes[-1] - votes[0]) / (len(votes) - 1)
    return votes[0] + max(shop.update_s, default=0.0)


def min_s(shop: Shop, *, staggered: bool = False) -> float:
    """A bound from below. Whatever the order, the busiest device has its work to do; in a flushed step it
    cannot begin before something has come to it, and after its last backward those before it have theirs.
    """
    if staggered:
        return max(shop.busy_s(), default=0.0)
    seconds, stride = shop.seconds, shop.stride
    head, tail = [0.0] * len(shop.hops), [0.0] * len(shop.hops)
    for hop, (_, position) in enumerate(shop.hops):
        if position:
            before = stride * (hop - 1)
            head[hop] = head[hop - 1] + seconds[before]
            own_s = seconds[before + 2] if shop.apart else 0.0
            tail[hop] = seconds[before + 1] + max(own_s, tail[hop - 1])
    heads: dict[int, float] = {}
    tails: dict[int, float] = {}
    waited: defaultdict[int, float] = defaultdict(float)
    of_weights: defaultdict[int, float] = defaultdict(float)
    for hop in range(len(shop.hops)):
        device = shop.device[stride * hop]
        heads[device] = min(heads.get(device, head[hop]), head[hop])
        tails[device] = min(tails.get(device, tail[hop]), tail[hop])
        waited[device] += seconds[stride * hop] + seconds[stride * hop + 1]
        of_weights[device] += seconds[stride * hop + 2] if shop.apart else 0.0
    found = (heads[d] + waited[d] + max(of_weights[d], tails[d]) for d in heads)
    return max(found, default=0.0) + max(shop.update_s, default=0.0)


def busiest_s(
    routes: Iterable[Route], profile: Profile, recompute: Mapping[str, Recompute] = NOTHING_AGAIN
) -> float:
    """Seconds that the busiest device works in a step over ``routes``: no order takes less."""
    return max(device_s(routes, profile, recompute).values(), default=0.0)


def device_s(
    routes: Iterable[Route], profile: Profile, recompute: Mapping[str, Recompute] = NOTHING_AGAIN
) -> dict[str, float]:
    """Device -> seconds that it works in a step over ``routes``. ``recompute``: as in ``Layout``."""
    hops = Hops.of(profile, recompute)
    busy: defaultdict[str, float] = defaultdict(float)
    for route in routes:
        for position, segment in enumerate(route.segments):
            busy[segment.device] += hops.forward(route, position) + hops.backward(route, position)
    return dict(busy)


def layout_crossing(layout: Layout, setup: Setup, effort: int = EFFORT_AT_ONCE) -> tuple[Crossing, Shop]:
    """``crossing`` of ``layout`` as the job is run."""
    shop = shop_of(layout, setup)
    return crossing(shop, effort, staggered=setup.staggered), shop


def _dispatched(shop: Shop, effort: int, *, staggered: bool) -> Iterator[Orders]:
    """What rules lead to, from the beginning of a step and, where that can be, from its end."""
    rounds = ROUNDS if staggered else 1
    if not has_room(shop):
        return
    for rule in chain(RULES if shop.apart else RULES_FUSED, _shuffled()):
        for from_end in (False,) if shop.apart or staggered else (False, True):
            if effort <= 0:
                return
            effort -= DISPATCHED * rounds * len(shop.seconds)
            yield from mirrored(shop, rule) if from_end else dispatch(shop, rule, rounds).orders


def _shuffled() -> Iterator[DispatchRule]:
    return (rule._replace(shuffled=seed) for seed in range(SHUFFLES) for rule in RULES_SHUFFLED)


def _seconds(shop: Shop, orders: Orders, *, staggered: bool) -> float | None:
    # The period and not the flushed step: the shortest flushed step keeps the busiest device waiting at its
    # start and end, and steps that overlap do not. (D-schedules-013)
    if staggered:
        found = period(shop, orders)
        return None if found is None else found.seconds
    ran = run(shop, orders)
    return None if ran is None else makespan_s(shop, ran)
