"""Templates as they run: splits moved to where 1F1B, and not its linear model, is shortest.

Owns that last step. The model that ``split`` is exact for charges waits which an early stage fills with work.
Where stages differ, as under a head that weighs as much as some blocks, and micro-batches are few, its best
split can be a fifth slower than the best. From it, and from the best going by single stages
(``makespan.stage_bounds_s``), boundaries are moved one layer at a time for as long as the run gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from oobleckd.planner.costs.choice import StageChoice, choice_of
from oobleckd.planner.costs.makespan import one_f_one_b_s, stage_bounds_s
from oobleckd.planner.costs.model import Floats, StageCosts
from oobleckd.planner.costs.work import StageWork, stage_works
from oobleckd.planner.plan import Range, Recompute, Stage, Template
from oobleckd.planner.policy import Setup

MAX_OPS = 20_000
"""Forwards and backwards to run in the search for one template: some hundredths of a second."""
_SHORTER = 1 - 1e-9  # sums of the same times are rounded each for itself

Bounds = tuple[int, ...]  # 0, first layer of each further stage, number of layers


def refined(
    setup: Setup,
    template: Template,
    share: int,
    fits: Callable[[Bounds], bool] = lambda _bounds: True,
    modes: Callable[[Bounds], Sequence[Recompute]] | None = None,
) -> Template:
    """``template`` with its layers where ``share`` micro-batches take least; never slower, memory kept.

    Its ``fill_s`` then makes ``time_s(share)`` what the run takes. Stages that several devices share stay.
    ``fits``: which splits do besides, that of ``template`` among them. ``modes``: what the stages of a split
    compute again; without it the least that each has room for.
    """
    if any(stage.num_devices > 1 for stage in template.stages) or share < 1:
        return template
    search = _Search(setup, choice_of(setup), len(template.stages), share, fits, modes)
    bounds = (0, *(stage.layers.stop for stage in template.stages))
    # The linear model keeps the search exact and sizes additive, but charges an early stage for waits in
    # which it works: up to 22 % slower than the best. (D-planner-007)
    taken_s, bounds = search.shortest([bounds, *filter(fits, search.by_stages())])
    return search.template(template, bounds, taken_s)


@dataclass(slots=True)
class _Search:
    """Splits of one model into ``num_stages``, for ``share`` micro-batches."""

    setup: Setup
    choice: StageChoice
    num_stages: int
    share: int
    fits: Callable[[Bounds], bool]
    modes: Callable[[Bounds], Sequence[Recompute]] | None = None
    num_ops: int = 0
    works: dict[tuple[Range, Recompute], StageWork] = field(default_factory=dict)
    deepest: Floats = field(init=False)  # of each stage, the last place from the end in which it fits

    def __post_init__(self) -> None:
        self.deepest = self.choice.reach()
        self.deepest[np.tril_indices(len(self.deepest))] = 0  # a stage has a layer

    def run_s(self, bounds: Bounds) -> float:
        """Seconds that the micro-batches and the update take."""
        self.num_ops += 2 * self.num_stages * min(self.share, 4 * self.num_stages)
        stages = [(layers, costs.recompute) for layers, costs in self._stages(bounds)]
        new = [stage for stage in stages if stage not in self.works]
        if new:
            layers, modes = zip(*new, strict=True)
            works = stage_works(layers, self.setup.profile, recompute=modes)
            self.works.update(zip(new, works, strict=True))
        update_s = max(self.setup.profile.update_s(layers.start, layers.stop) for layers, _ in stages)
        return one_f_one_b_s([self.works[stage] for stage in stages], self.share) + update_s

    def _stages(self, bounds: Bounds) -> list[tuple[Range, StageCosts]]:
        """The stages of a split, with the costs of the mode that each is computed in."""
        stages = _ranges(bounds)
        if self.modes is not None:
            return [
                (layers, self.choice.in_mode(mode))
                for layers, mode in zip(stages, self.modes(bounds), strict=True)
            ]
        return [
            (layers, self.choice.at(layers.start, layers.stop, self.num_stages - place))
            for place, layers in enumerate(stages)
        ]

    def shortest(self, starts: Sequence[Bounds]) -> tuple[float, Bounds]:
        """From the best of ``starts`` downhill; the time, and where it is reached. The first wins a tie."""
        best_s, best = min(((self.run_s(bounds), bounds) for bounds in starts), key=lambda found: found[0])
        moved = True
        while moved:
            moved = False
            for bounds in self._neighbours(best):
                if self.num_ops > MAX_OPS:
                    return best_s, best
                taken_s = self.run_s(bounds)
                if taken_s < best_s * _SHORTER:
                    best_s, best, moved = taken_s, bounds, True
                    break
        return best_s, best

    def _neighbours(self, bounds: Bounds) -> Iterator[Bounds]:
        """One boundary, or two that follow each other, a layer further to either side, where that fits."""
        for width in (1, 2):
            for first in range(1, self.num_stages + 1 - width):
                for step in (-1, 1):
                    moved = [bound + step for bound in bounds[first : first + width]]
                    changed = (*bounds[:first], *moved, *bounds[first + width :])
                    if self._fits(changed):
                        yield changed

    def _fits(self, bounds: Bounds) -> bool:
        return all(
            self.deepest[start, stop] >= self.num_stages - place
            for place, (start, stop) in enumerate(pairwise(bounds))
        ) and self.fits(bounds)

    def by_stages(self) -> Iterator[Bounds]:
        """The split whose slowest stage, with what lies around it, is fastest. None where memory leaves none.

        What cuts take before a stage is that of the way found to it, behind it that of average ones.
        """
        costs = self.choice.costs[0]  # what is before and behind is taken to compute as little as can be
        num_layers, cut_s, time_s = costs.num_layers, costs.cut_s, costs.time_s
        forward_s = np.concatenate(
            ([0.0], np.cumsum([layer.forward_s for layer in self.setup.profile.layers]))
        )
        forward_s = forward_s[None, :] - forward_s[:, None]
        sending_s = forward_s + cut_s[None, :]
        average_s = float(cut_s[1:-1].mean()) if num_layers > 1 else 0.0
        spare = num_layers - self.num_stages  # layers beyond one a stage
        slowest_s = np.full(num_layers + 1, np.inf)  # of the stages so far, which end before that layer
        slowest_s[0] = 0.0
        crossed_s = np.zeros(num_layers + 1)  # what their cuts take of a micro-batch
        ways = []
        for place in range(self.num_stages):
            behind = self.num_stages - 1 - place
            returning_s = self.choice.time_s(behind + 1) - forward_s + cut_s[:, None]
            first, stop = slice(place, place + spare + 1), slice(place + 1, place + spare + 2)
            bound_s = stage_bounds_s(
                sending_s[first, stop],
                returning_s[first, stop],
                before_s=(time_s[0, first] + crossed_s[first])[:, None],
                behind_s=time_s[stop, num_layers] + (2 * behind - 1) * average_s * (behind > 0),
                in_flight=behind + 1,
                num=self.share,
            )
            bound_s[self.deepest[first, stop] <= behind] = np.inf
            through_s = np.maximum(slowest_s[first, None], bound_s)
            way = np.zeros(num_layers + 1, dtype=np.int64)
            way[stop] = place + through_s.argmin(axis=0)
            ways.append(way)
            slowest_s = np.full(num_layers + 1, np.inf)
            slowest_s[stop] = through_s.min(axis=0)
            crossed_s = crossed_s[way] + cut_s[way] + cut_s
        if np.isfinite(slowest_s[num_layers]):
            bounds = [num_layers]
            for way in reversed(ways):
                bounds.append(int(way[bounds[-1]]))
            yield tuple(reversed(bounds))

    def _stage(self, place: int, layers: Range, costs: StageCosts) -> Stage:
        where = layers.start, layers.stop
        memory = costs.memory_bytes(self.num_stages - place, self.setup.num_micro_batches)[where]
        return Stage(layers, 1, float(costs.time_s[where]), int(np.ceil(memory)), costs.recompute)

    def template(self, template: Template, bounds: Bounds, taken_s: float) -> Template:
        """``template`` with stages of these bounds, which take ``taken_s``."""
        found = self._stages(bounds)
        stages = tuple(self._stage(place, *each) for place, each in enumerate(found))
        period_s = max(float(costs.period_s[layers.start, layers.stop]) for layers, costs in found)
        return Template(
            template.num_nodes,
            template.devices_per_node,
            stages,
            fill_s=taken_s - (self.share - 1) * period_s,
            period_s=period_s,
            gap=template.gap,
        )


def _ranges(bounds: Bounds) -> list[Range]:
    return [Range(start, stop) for start, stop in pairwise(bounds)]
