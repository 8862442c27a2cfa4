"""Templates as a decoupled backward runs them: one stage a device or two, whichever is faster.

Owns that choice and the split into two stages a device (``pipe``): chunks whose sums are even from device to
device, the first with the last, and so on inwards. A template keeps its split where it runs as fast with one
stage. Either way its ``fill_s`` then makes ``time_s`` of the micro-batches that it was made for what the
decoupled run takes. The form is chosen here, when templates are made, so that a plan after a loss has nothing
to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from oobleckd.planner.costs.choice import costs_by_mode
from oobleckd.planner.costs.makespan import busy_s
from oobleckd.planner.costs.model import StageCosts
from oobleckd.planner.plan import Range, Recompute, Stage, Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.schedules.decoupled import EFFORT_AT_ONCE, RULES_QUICK, best_orders, pipe_of
from oobleckd.planner.schedules.orders import run
from oobleckd.planner.schedules.pipe import Pipe

MAX_OPS = 3_000
"""Ops to run in the search for one template's chunks, counted once for all rules: a tenth of a
second or two.
"""
_STEADY = 2  # micro-batches a device after which every further one takes as long as the busiest device
_SHORTER = 1 - 1e-9  # sums of the same times are rounded each for itself

Bounds = tuple[int, ...]  # 0, first layer of each further stage, number of layers


def folded(setup: Setup, template: Template, share: int, besides: Sequence[int] = ()) -> Template:
    """``template`` for ``share`` micro-batches with a decoupled backward; in two chunks a device where that
    is allowed, fits, and is faster or asked for. Others than decoupled ones, and stages that several devices
    share, stay as they are. ``besides``: bytes that the devices of its stages hold of others; then as it is,
    one stage a device.
    """
    if not setup.decoupled or share < 1 or any(stage.num_devices > 1 for stage in template.stages):
        return template
    search = _Search(setup, costs_by_mode(setup), len(template.stages), share, besides)
    plain = search.timed(
        [stage.layers for stage in template.stages], 1, [stage.recompute for stage in template.stages]
    )
    found = search.folded() if setup.chunks != 1 and not besides else None
    if found is None or (setup.chunks == 0 and found.taken_s >= plain.taken_s * _SHORTER):
        return search.as_it_will_be(plain).template(template, template.stages)
    return search.as_it_will_be(found).template(template, search.stages(found.layers))


@dataclass(frozen=True, slots=True)
class _Timed:
    """A split with what its micro-batches and the update take, and a further micro-batch on the busiest
    device.
    """

    layers: tuple[Range, ...]
    recompute: tuple[Recompute, ...]
    chunks: int
    taken_s: float
    period_s: float
    share: int

    def template(self, template: Template, stages: tuple[Stage, ...]) -> Template:
        """``template`` with these times, and ``stages``."""
        return Template(
            template.num_nodes,
            template.devices_per_node,
            stages,
            fill_s=self.taken_s - (self.share - 1) * self.period_s,
            period_s=self.period_s,
            gap=template.gap,
            chunks=self.chunks,
        )


@dataclass(slots=True)
class _Search:
    """Splits of one model over ``num_devices``, for ``share`` micro-batches. ``modes``: the costs in every
    mode that a device may compute in, those of least time first.
    """

    setup: Setup
    modes: tuple[StageCosts, ...]
    num_devices: int
    share: int
    besides: Sequence[int] = ()
    num_ops: int = 0
    memory: dict[Bounds, float] = field(default_factory=dict)

    @property
    def costs(self) -> StageCosts:
        """In the mode of least time."""
        return self.modes[0]

    def as_it_will_be(self, found: _Timed) -> _Timed:
        """``found`` with the schedule that a plan gets at once; of large ones about as it will be
        is enough.
        """
        if 3 * self._num_run * len(found.layers) > MAX_OPS:
            return found
        return self.timed(found.layers, found.chunks, found.recompute, EFFORT_AT_ONCE)

    @property
    def _num_run(self) -> int:
        return min(self.share, _STEADY * self.num_devices)

    def timed(
        self, layers: Sequence[Range], chunks: int, recompute: Sequence[Recompute], effort: int = 0
    ) -> _Timed:
        """Run it, about as it will be, or with ``effort`` as it will be; ``recompute``: stage by stage.
        Beyond some micro-batches a device, those that follow count a period each.
        """
        setup = self.setup
        limit_bytes = setup.device_memory_bytes
        pipe = pipe_of(layers, chunks, setup.profile, limit_bytes, self.besides, setup.held, recompute)
        num = self._num_run
        self.num_ops += 3 * num * len(layers)
        # A plan after a loss has milliseconds, so the form is chosen here; quick schedules of either form
        # are within a few per cent of searched ones. (D-schedules-008)
        rules = RULES_QUICK if chunks == 1 and not effort else ()
        ran = run(pipe, best_orders(pipe, num, effort, rules))
        assert ran is not None, "the search ends with orders that run"
        period_s = max(_device_sums(pipe, [busy_s(work) for work in pipe.works]))
        updates = [setup.profile.update_s(held.start, held.stop) for held in layers]
        taken_s = ran.makespan_s + (self.share - num) * period_s + max(_device_sums(pipe, updates))
        return _Timed(tuple(layers), tuple(recompute), chunks, taken_s, period_s, self.share)

    def folded(self) -> _Timed | None:
        """The fastest split into two chunks a device that is found downhill from an even one; None where none
        fits.
        """
        if self.num_devices < 2 or 2 * self.num_devices > self.costs.num_layers:
            return None
        bounds = self._even()
        if self._over(bounds):
            return None
        best, moved = self._timed_folded(bounds), True
        while moved:
            moved = False
            for changed in self._neighbours(bounds):
                if self.num_ops > MAX_OPS:
                    return best
                if self._over(changed):
                    continue
                tried = self._timed_folded(changed)
                if tried.taken_s < best.taken_s * _SHORTER:
                    best, bounds, moved = tried, changed, True
                    break
        return best

    def _timed_folded(self, bounds: Bounds) -> _Timed:
        layers = _ranges(bounds)
        modes = [mode.recompute for mode, _ in self._devices(layers)]
        return self.timed(layers, 2, [*modes, *reversed(modes)])

    def _even(self) -> Bounds:
        """Chunks of about the same time, moved to where the busiest device is least busy and memory suffices,
        if it does.
        """
        num_layers, num_stages = self.costs.num_layers, 2 * self.num_devices
        before = self.costs.time_s[0]
        bounds = [0]
        for stage in range(1, num_stages):
            wanted = before[num_layers] * stage / num_stages
            free = range(bounds[-1] + 1, num_layers - (num_stages - stage) + 1)
            bounds.append(min(free, key=lambda cut: abs(float(before[cut]) - wanted)))
        best = (*bounds, num_layers)
        while (better := min(self._neighbours(best), key=self._unevenness, default=best)) != best:
            if self._unevenness(better) >= self._unevenness(best):
                return best
            best = better
        return best

    def _unevenness(self, bounds: Bounds) -> tuple[float, float, float]:
        """Less is better: bytes beyond the limit, the busiest device, squares."""
        busy = [float(self.costs.period_s[start, stop]) for start, stop in pairwise(bounds)]
        sums = [busy[s] + busy[-1 - s] for s in range(self.num_devices)]
        return self._over(bounds), round(max(sums), 12), round(sum(s * s for s in sums), 12)

    def _neighbours(self, bounds: Bounds) -> Iterator[Bounds]:
        """One boundary, or the two of a device's chunks, a layer further to either side."""
        num_stages = 2 * self.num_devices
        moves: list[tuple[tuple[int, int], ...]] = [
            ((at, step),) for at in range(1, num_stages) for step in (-1, 1)
        ]
        moves += [
            ((at, one), (num_stages - at, other))
            for at in range(1, self.num_devices)
            for one in (-1, 1)
            for other in (-1, 1)
        ]
        for move in moves:
            changed = list(bounds)
            for at, step in move:
                changed[at] += step
            if all(start < stop for start, stop in pairwise(changed)):
                yield tuple(changed)

    def _over(self, bounds: Bounds) -> float:
        """Bytes by which the device that needs most is beyond the limit."""
        if bounds not in self.memory:
            self.memory[bounds] = max(self.memory_bytes(_ranges(bounds)))
        return max(0.0, self.memory[bounds] - (self.setup.device_memory_bytes or inf))

    def memory_bytes(self, layers: Sequence[Range]) -> list[float]:
        """The peak of each device, in the mode that it computes in."""
        return [peak for _, peak in self._devices(layers)]

    def _devices(self, layers: Sequence[Range]) -> list[tuple[StageCosts, float]]:
        """The mode of least time that each device has room for, or else the last one, and its peak then."""
        by_mode = [device_peaks(self.setup, costs, layers) for costs in self.modes]
        limit_bytes = self.setup.device_memory_bytes or inf
        found = []
        for device in range(self.num_devices):
            each = [(costs, peaks[device]) for costs, peaks in zip(self.modes, by_mode, strict=True)]
            found.append(next((fits for fits in each if fits[1] <= limit_bytes), each[-1]))
        return found

    def stages(self, layers: Sequence[Range]) -> tuple[Stage, ...]:
        """The stages of a template in two chunks; the memory is that of the device."""
        devices, found = self._devices(layers), []
        for place, part in enumerate(layers):
            costs, peak = devices[min(place, len(layers) - 1 - place)]
            seconds = float(costs.time_s[part.start, part.stop])
            found.append(Stage(part, 1, seconds, int(np.ceil(peak)), costs.recompute))
        return tuple(found)


def device_peaks(setup: Setup, costs: StageCosts, layers: Sequence[Range]) -> list[float]:
    """The peak of each device of a pipeline in two chunks, all computed in the mode of ``costs``, when
    whatever is ready runs, as it does after a loss (``oobleckd.worker.round_machine.tasks``): then a stage
    has as many micro-batches in flight as stages are left from it on, and the second chunk comes on top of
    the first.
    """
    num_devices = len(layers) // 2
    reserve = costs.reserve_bytes + setup.held.device_bytes  # what a hop sent is kept; a device has two
    peaks, once = [float(reserve)] * num_devices, [0.0] * num_devices
    for place, part in enumerate(layers):
        where = part.start, part.stop
        in_flight = min(len(layers) - place, setup.num_micro_batches)
        mine = min(place, len(layers) - 1 - place)
        peaks[mine] += float(costs.state_bytes[where] + in_flight * costs.activation_bytes[where])
        once[mine] = max(once[mine], float(costs.once_bytes[where]))
    return [peak + more for peak, more in zip(peaks, once, strict=True)]


def _device_sums(pipe: Pipe, by_stage: Sequence[float]) -> list[float]:
    return [sum(by_stage[stage] for stage in stages) for stages in pipe.stages]


def _ranges(bounds: Bounds) -> list[Range]:
    return [Range(start, stop) for start, stop in pairwise(bounds)]
