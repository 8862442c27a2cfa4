"""Draws failures and repairs without memory from a seed: a trace for as long as is asked for.

Owns the process. Every node fails at the same rate whatever happened before, so that a cluster of N nodes
that are all there loses one every ``mtbf_s`` seconds on average, and one of half as many every
``2 * mtbf_s``. A failed node is back after a time with the mean ``repair_s``, or never.
"""

from __future__ import annotations

import heapq
from random import Random

from oobleckd.simulator.traces import Trace, TraceEvent, node_names

DAY_S = 24 * 3600.0
_HALF = 0.5


def usual_duration_s(num_nodes: int, mtbf_s: float, repair_s: float) -> float:
    """For how long to simulate where nobody says: a day; without repairs until about half of the nodes are
    gone.
    """
    return DAY_S if repair_s else _HALF * num_nodes * mtbf_s


def memoryless(
    num_nodes: int, mtbf_s: float, repair_s: float, duration_s: float, seed: int, name: str = ""
) -> Trace:
    """A trace of ``num_nodes`` nodes. ``repair_s`` 0: nobody comes back. The same seed gives the
    same trace.
    """
    assert num_nodes >= 1
    assert mtbf_s > 0.0
    chance = Random(f"{seed}:{num_nodes}:{mtbf_s}:{repair_s}")  # noqa: S311 - it must repeat
    nodes = node_names(num_nodes)
    alive, events = list(nodes), []
    repairs: list[tuple[float, str]] = []
    now = 0.0
    while alive or repairs:
        # MTBF is the cluster's and each node fails at the same rate: a cluster of which half is gone fails
        # half as often. (D-simulator-006)
        fails_at = now + chance.expovariate(len(alive) / (num_nodes * mtbf_s)) if alive else float("inf")
        if repairs and repairs[0][0] <= fails_at:
            now, node = heapq.heappop(repairs)
            alive.append(node)
            event = TraceEvent(now, "join", node)
        else:
            now = fails_at
            node = alive.pop(chance.randrange(len(alive)))
            event = TraceEvent(now, "fail", node)
            if repair_s:
                heapq.heappush(repairs, (now + chance.expovariate(1 / repair_s), node))
        if now >= duration_s:
            break
        events.append(event)
    return Trace(name or f"seed {seed}", nodes, tuple(events), duration_s, seed=seed)
