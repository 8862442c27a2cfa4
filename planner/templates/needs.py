"""What each device of a template would need in every mode of recomputation, its layers being what they are.

Owns that comparison, for people who choose; templates say what they need in the mode that they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from oobleckd.planner.costs.choice import costs_by_mode
from oobleckd.planner.costs.model import StageCosts
from oobleckd.planner.plan import Range, Recompute, Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.templates.fold import device_peaks
from oobleckd.planner.templates.redundant import Room


def needed_by_mode(setup: Setup, template: Template) -> tuple[dict[Recompute, int], ...]:
    """Stage by stage: mode -> bytes of its device, for all modes whose costs are known."""
    setup = msgspec.structs.replace(setup, recompute="auto")
    stages = [stage.layers for stage in template.stages]
    by_mode: dict[Recompute, Sequence[float]] = {}
    if template.redundant:
        by_mode = {mode.recompute: mode.needed(stages) for mode in Room(setup).modes}
    elif template.chunks > 1:
        for costs in costs_by_mode(setup):
            peaks = device_peaks(setup, costs, stages)
            by_mode[costs.recompute] = [*peaks, *reversed(peaks)]
    else:
        for costs in costs_by_mode(setup, template.stages[0].num_devices):
            by_mode[costs.recompute] = _peaks(setup, costs, stages)
    return tuple(
        {mode: ceil(peaks[place]) for mode, peaks in by_mode.items()} for place in range(len(stages))
    )


def _peaks(setup: Setup, costs: StageCosts, stages: Sequence[Range]) -> list[float]:
    num = setup.num_micro_batches
    return [
        float(costs.memory_bytes(len(stages) - place, num)[layers.start, layers.stop])
        for place, layers in enumerate(stages)
    ]
