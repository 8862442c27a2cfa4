"""The best order of a small step over routes that cross, by mixed-integer programming (HiGHS): its makespan,
or its period.

Pure. Shares nothing with the planner's search but the definition of a shop.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from benchmarks.optimum import Program, Verdict
from oobleckd.planner.schedules.jobshop import NOBODY, Shop

Place = tuple[tuple[tuple[str, int, int], ...], int, str, int]


def shortest_step(shop: Shop, horizon_s: float, limit_s: float) -> Verdict:
    """The makespan of the best order, in seconds. ``horizon_s``: some order takes no longer. Ends after
    ``limit_s`` seconds, perhaps without a proof.
    """
    program = Program()
    _ops(program, shop, horizon_s)
    for op, seconds in enumerate(shop.seconds):
        program.at_most(-seconds, {op: 1.0, "makespan": -1.0})
    return program.least("makespan", horizon_s, limit_s)


def shortest_period(shop: Shop, horizon_s: float, limit_s: float) -> Verdict:
    """From step to step with staggered updates, all steps alike: forwards begin when their device has
    updated, which may be before the vote of the step before, all else behind that vote. Times are moved by
    ``horizon_s``, at which that vote is; some order has a period no longer.
    """
    program = Program()
    _ops(program, shop, 2 * horizon_s)
    stride = shop.stride
    for number in range(len(shop.names)):
        program.at_most(horizon_s, {("reduced", number): 1.0, "period": -1.0})
    for op, seconds in enumerate(shop.seconds):
        if op % stride:
            program.at_most(-horizon_s, {op: -1.0})
        else:
            device = shop.device[op]
            program.at_most(-shop.update_s[device], {("reduced", device): 1.0, "period": -1.0, op: -1.0})
        if op % stride == stride - 1:
            part = shop.part_of[op // stride]
            for parts, devices in shop.sums:
                if part in parts:
                    for device in devices:
                        program.at_most(-seconds, {op: 1.0, ("reduced", device): -1.0})
    return program.least("period", 2 * horizon_s, limit_s)


def _ops(program: Program, shop: Shop, horizon_s: float) -> None:
    """Each op after its source, one at a time on a device, and room for what is held when a forward begins.
    Micro-batches that take the same way are alike, so those of a kind and a hop run in order.
    """
    seconds = shop.seconds
    for op, source in enumerate(shop.source):
        if source != NOBODY:
            program.after(op, source, seconds[source])
    chain = [_place(shop, op) for op in range(len(seconds))]
    of_device: dict[int, list[int]] = {}
    for op, device in enumerate(shop.device):
        of_device.setdefault(device, []).append(op)
    for device, ops in of_device.items():
        _device(program, shop, chain, device, ops, horizon_s)


def _device(
    program: Program, shop: Shop, chain: list[Place], device: int, ops: list[int], horizon_s: float
) -> None:
    seconds, stride = shop.seconds, shop.stride
    held = {op: float(shop.change[op]) for op in ops if op % stride == 0}  # when that forward begins
    bits: dict[int, dict[Hashable, float]] = {op: {} for op in held}
    for one, other in itertools.combinations(ops, 2):
        order = _known(shop, chain, one, other)
        if order == 0:
            before: Hashable = ("before", one, other)
            program.at_most(horizon_s - seconds[one], {one: 1.0, other: -1.0, before: horizon_s})
            program.at_most(-seconds[other], {other: 1.0, one: -1.0, before: -horizon_s})
            if other in held:
                bits[other][before] = float(shop.change[one])
            if one in held:
                held[one] += shop.change[other]
                bits[one][before] = -float(shop.change[other])
            continue
        first, second = (one, other) if order > 0 else (other, one)
        if one // stride != other // stride:
            program.after(second, first, seconds[first])
        if second in held:
            held[second] += shop.change[first]
    room = shop.room[device]
    for op, terms in bits.items():
        if room is not None and terms:
            program.at_most(room - held[op], terms)


def _known(shop: Shop, chain: list[Place], one: int, other: int) -> int:
    """1 where the first comes before the second, -1 where behind it, 0 where that is open."""
    if one // shop.stride == other // shop.stride:
        return 1 if one < other else -1  # of one hop: each waits for the one before
    (way, hop, kind, count), (their_way, their_hop, their_kind, their_count) = chain[one], chain[other]
    if way != their_way:
        return 0
    if count <= their_count and _behind(hop, kind, their_hop, their_kind):
        return 1
    return -1 if their_count <= count and _behind(their_hop, their_kind, hop, kind) else 0


def _place(shop: Shop, op: int) -> Place:
    """Its micro-batch's way, its hop, its kind, and the micro-batch's number."""
    index, position = shop.hops[op // shop.stride]
    route = shop.routes[index]
    way = tuple((s.device, s.layers.start, s.layers.stop) for s in route.segments)
    return way, position, shop.kind(op), route.micro_batch


def _behind(hop: int, kind: str, their_hop: int, their_kind: str) -> bool:
    """Whether an op of a micro-batch comes before such an op of the same or a later one on the same way."""
    if kind == "F":
        return their_kind != "F" or hop <= their_hop
    if kind == "W":
        return their_kind == "W" and hop == their_hop
    if their_kind == "F":
        return False
    return (
        hop == their_hop if their_kind == "W" or hop == their_hop else hop > their_hop and their_kind != "W"
    )
