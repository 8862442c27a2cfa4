"""Which mode a stage is computed in: of those that it may have the fastest that fits its device's memory.

Owns that choice for a stage in its place. Splits are chosen elsewhere (``templates``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oobleckd.planner.costs.model import Floats, StageCosts, stage_costs
from oobleckd.planner.costs.recompute import modes_for
from oobleckd.planner.plan import Recompute
from oobleckd.planner.policy import Setup


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The costs of every possible stage on one device in each of some modes, those of least time first, and
    ``deepest``: as ``StageCosts.deepest``, for each of them.
    """

    costs: tuple[StageCosts, ...]
    deepest: tuple[Floats, ...]

    def reach(self) -> Floats:
        """The largest place from the end at which every stage fits in some mode."""
        found: Floats = np.maximum.reduce(self.deepest)
        return found

    def time_s(self, from_end: int) -> Floats:
        """The time of every stage in that place, as ``at`` has it."""
        found = self.costs[-1].time_s
        for costs, deepest in zip(reversed(self.costs[:-1]), reversed(self.deepest[:-1]), strict=True):
            found = np.where(deepest >= from_end, costs.time_s, found)
        return found

    def in_mode(self, mode: Recompute) -> StageCosts:
        """The costs in that mode, which is one of them."""
        return next(costs for costs in self.costs if costs.recompute == mode)

    def at(self, start: int, stop: int, from_end: int) -> StageCosts:
        """The costs of stage [start, stop) in that place; of one that fits nowhere in the last mode."""
        for costs, deepest in zip(self.costs, self.deepest, strict=True):
            if deepest[start, stop] >= from_end:
                return costs
        return self.costs[-1]


def costs_by_mode(setup: Setup, num_devices: int = 1) -> tuple[StageCosts, ...]:
    """The costs of stages on ``num_devices`` devices in every mode that ``setup`` allows, those of least time
    first.
    """
    return tuple(
        stage_costs(setup.profile, num_devices, setup.held, mode, apart=setup.decoupled)
        for mode in modes_for(setup.profile, setup.recompute)
    )


def deepest_by_mode(
    costs: Iterable[StageCosts], num_micro_batches: int, limit_bytes: float
) -> tuple[Floats, ...]:
    """``StageCosts.deepest`` of each of ``costs``, modes of stages on as many devices, those of least time
    first; 0 where one before it fits wherever it does, and so nobody chooses it.
    """
    found: list[Floats] = []
    for mode in costs:
        deepest = mode.deepest(num_micro_batches, limit_bytes)
        found.append(np.where(_pointless(deepest, found), 0.0, deepest))
    return tuple(found)


def choice_of(setup: Setup) -> StageChoice:
    """What stages of one device of ``setup`` may be computed in."""
    costs, limit = costs_by_mode(setup), setup.device_memory_bytes or np.inf
    return StageChoice(costs, deepest_by_mode(costs, setup.num_micro_batches, limit))


def _pointless(deepest: Floats, faster: list[Floats]) -> NDArray[np.bool_]:
    """Where one of the ``faster`` modes fits in every place that there is for a stage with ``deepest``."""
    if not faster:
        return np.zeros(deepest.shape, dtype=bool)
    behind = np.arange(len(deepest))[::-1]  # layers behind a stage that ends there
    most = np.maximum.reduce(faster)
    found: NDArray[np.bool_] = (most >= deepest) | (most >= behind[None, :] + 1)
    return found
