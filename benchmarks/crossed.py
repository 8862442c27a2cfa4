"""The best order of a small step over routes that cross, by mixed-integer programming (HiGHS): its makespan, or its period.

Pure. Shares nothing with the planner's search but the definition of a shop. Nothing here limits memory, so what it proves is a
bound from below for devices of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from benchmarks.optimum import Program, Verdict
from planner.shop import NOBODY, Shop


def shortest_step(shop: Shop, horizon_s: float, limit_s: float) -> Verdict:
    """The makespan of the best order, in seconds. ``horizon_s``: some order takes no longer. Ends after ``limit_s`` seconds,
    perhaps without a proof.
    """
    program = Program()
    _ops(program, shop, horizon_s)
    for op, seconds in enumerate(shop.seconds):
        program.at_most(-seconds, {op: 1.0, "makespan": -1.0})
    return program.least("makespan", horizon_s, limit_s)


def shortest_period(shop: Shop, horizon_s: float, limit_s: float) -> Verdict:
    """From step to step with staggered updates, all steps alike: forwards begin when their device has updated, which may be before
    the vote of the step before, all else behind that vote. Times are moved by ``horizon_s``, at which that vote is; some order has
    a period no longer.
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
    """Each op after its source, one at a time on a device. Micro-batches that take the same way are alike, so
    those of a kind and a hop run in order.
    """
    seconds, stride = shop.seconds, shop.stride
    for op, source in enumerate(shop.source):
        if source != NOBODY:
            program.after(op, source, seconds[source])
    chain = [_place(shop, op) for op in range(len(seconds))]
    of_device: dict[int, list[int]] = {}
    for op, device in enumerate(shop.device):
        of_device.setdefault(device, []).append(op)
    for ops in of_device.values():
        for one, other in itertools.combinations(ops, 2):
            if one // stride == other // stride:
                continue  # of one hop: each waits for the one before
            (way, hop, kind, count), (their_way, their_hop, their_kind, their_count) = (
                chain[one],
                chain[other],
            )
            if way == their_way and count <= their_count and _behind(hop, kind, their_hop, their_kind):
                program.after(other, one, seconds[one])
            elif way == their_way and their_count <= count and _behind(their_hop, their_kind, hop, kind):
                program.after(one, other, seconds[other])
            else:
                before: Hashable = ("before", one, other)
                program.at_most(horizon_s - seconds[one], {one: 1.0, other: -1.0, before: horizon_s})
                program.at_most(-seconds[other], {other: 1.0, one: -1.0, before: -horizon_s})


def _place(shop: Shop, op: int) -> tuple[tuple[tuple[str, int, int], ...], int, str, int]:
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
