"""Finds how little memory a device needs to hold a model split into so many stages. Owns no time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oobleckd.planner.costs.model import Floats, StageCosts


def min_memory(costs: Sequence[StageCosts], num_micro_batches: int) -> Floats:
    """Entry s: the smallest device memory that some split into s stages fits, in bytes (inf for 0).
    ``costs``: in each mode that a stage may have.
    """
    reach = _nothing_follows(costs[0])
    need = [np.inf]
    for from_end in range(1, costs[0].num_layers + 1):
        reach = np.maximum(_stages(costs, from_end, num_micro_batches), reach[None, :]).min(axis=1)
        need.append(reach[0])
    return np.array(need)


def smallest_memory_split(costs: Sequence[StageCosts], num_stages: int, num_micro_batches: int) -> list[int]:
    """Boundaries of the split into ``num_stages`` stages whose largest stage is smallest; fewest layers
    first on ties.
    """
    stages = [_stages(costs, from_end, num_micro_batches) for from_end in range(1, num_stages + 1)]
    reach = [_nothing_follows(costs[0])]
    for memory in stages:
        reach.append(np.maximum(memory, reach[-1][None, :]).min(axis=1))
    bounds = [0]
    for memory, beyond in zip(reversed(stages), reversed(reach[:-1]), strict=True):
        bounds.append(int(np.maximum(memory[bounds[-1]], beyond).argmin()))
    return bounds


def smallest_memory(costs: Sequence[StageCosts], from_end: int, num_micro_batches: int) -> Floats:
    """Memory of every stage in that place, in the mode that needs least."""
    found: Floats = np.minimum.reduce([cost.memory_bytes(from_end, num_micro_batches) for cost in costs])
    return found


def _stages(costs: Sequence[StageCosts], from_end: int, num_micro_batches: int) -> Floats:
    """The same, inf where there is no stage."""
    memory = smallest_memory(costs, from_end, num_micro_batches)
    return np.where(np.triu(np.ones_like(memory, dtype=bool), 1), memory, np.inf)


def _nothing_follows(costs: StageCosts) -> Floats:
    """Need of what follows layer i when nothing may: 0 after the last layer, inf before."""
    reach = np.full(costs.num_layers + 1, np.inf)
    reach[-1] = 0.0
    return reach
