"""Pipeline templates in which every device also holds its successor's stage (Bamboo, NSDI'23, section 4).

Owns which splits leave room for that, exactly: what a stage's device needs depends on the stage behind it
too, the last one's on the first. Counted are both stages' states, the own micro-batches in flight, and of the
successor the larger of what passes run ahead hold (``redundant``) and what would be in flight once it is
computed here. So a device that takes over has room. What blocks of both stages compute again is as the device
does it: passes ahead then hold inputs alone.

The fastest split without a limit is the start where it fits; else one that fits, about even in time. From
there boundaries are moved for as long as the run gets shorter (``refine``). Whether any split fits is exact;
that the one found is the fastest of those that fit is not proved: ``gap`` is against the fastest without a
limit. A pipeline of one stage holds nothing redundant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil

import msgspec
import numpy as np
from numpy.typing import NDArray

from oobleckd.planner.costs.choice import costs_by_mode
from oobleckd.planner.costs.model import Floats, StageCosts
from oobleckd.planner.plan import Plan, Range, Recompute, Stage, Template
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.reroute.redundant import max_bytes, pass_bytes
from oobleckd.planner.schedules.decoupled import EFFORT_AT_ONCE, Ordered, decoupled_orders
from oobleckd.planner.templates.fold import folded
from oobleckd.planner.templates.guarantee import n_max
from oobleckd.planner.templates.refine import Bounds, refined
from oobleckd.planner.templates.template import expected_share, templates_for, way_out
from oobleckd.words import count, noun

NEVER = -np.inf

Possible = NDArray[np.bool_]


def redundant_templates(setup: Setup) -> tuple[Template, ...]:
    """Templates for n0, n0+1, .. n_max nodes, as ``template.templates``, with room for redundant layers; one
    device a stage, one stage a device. Raises PlanError when no number of nodes fits.
    """
    if not setup.profile.layers or setup.num_micro_batches < 1 or setup.devices_per_node < 1:
        raise PlanError("a plan needs at least one layer, one micro-batch and one device a node")
    room = Room(setup)
    num_layers = len(setup.profile.layers)
    fitting = fitting_redundant(setup, setup.device_memory_bytes)
    if not fitting:
        raise _nothing_fits(setup)
    sizes = range(fitting[0], n_max(fitting[0], setup.f, setup.max_nodes or num_layers, num_layers) + 1)
    last = next((n for n in sizes if n not in fitting), sizes.stop)
    return tuple(_template(room, n) for n in range(sizes.start, last))


def _template(room: Room, num_nodes: int) -> Template:
    """The template for so many nodes, for which there is a split that fits."""
    setup, share = room.setup, expected_share(room.setup, num_nodes)
    free = msgspec.structs.replace(setup, device_memory_bytes=0, max_devices_per_stage=1, chunks=1)
    (fastest,) = templates_for(free, [(num_nodes, share)])
    # Whether a split fits is exact (checked by brute force); that moving downhill finds the fastest is not
    # proved, and the gap says against which bound. (D-policies-010)
    start = fastest
    if not room.holds(_bounds(fastest)):
        split = room.split(len(fastest.stages))
        start = msgspec.structs.replace(fastest, stages=tuple(Stage(layers, 1, 0.0, 0) for layers in split))
    found = refined(free, start, share, room.holds, room.modes_at)
    if start is not fastest:
        min_s = refined(free, fastest, share).time_s(share)
        found = msgspec.structs.replace(found, gap=max(0.0, 1 - min_s / found.time_s(share)))
    stages = [stage.layers for stage in found.stages]
    limited = msgspec.structs.replace(free, device_memory_bytes=setup.device_memory_bytes)
    found = folded(limited, found, share, room.besides(stages, [stage.recompute for stage in found.stages]))
    sized = zip(found.stages, room.needed(stages), strict=True)
    return msgspec.structs.replace(
        found,
        stages=tuple(msgspec.structs.replace(s, memory_bytes=int(np.ceil(need))) for s, need in sized),
        fill_s=found.fill_s + _more_update_s(setup, stages),
        redundant=len(stages) > 1,
    )


def _bounds(template: Template) -> Bounds:
    return (0, *(stage.layers.stop for stage in template.stages))


def _more_update_s(setup: Setup, stages: Sequence[Range]) -> float:
    """By how much longer the slowest update is with that of the successor's stage."""
    own = [setup.profile.update_s(layers.start, layers.stop) for layers in stages]
    behind = [*own[1:], own[0]] if len(own) > 1 else [0.0]
    return max(a + b for a, b in zip(own, behind, strict=True)) - max(own)


@dataclass(frozen=True, slots=True)
class _InMode:
    """What devices of ``setup`` need that compute in the mode of ``costs``. ``ahead``: entry [i, j]: what
    passes ahead through layers [i, j) hold.
    """

    setup: Setup
    costs: StageCosts
    ahead: Floats

    @classmethod
    def of(cls, setup: Setup, costs: StageCosts) -> _InMode:
        """Of the mode of ``costs``."""
        num, profile = setup.num_micro_batches, setup.profile
        passed = [num * pass_bytes(profile, layer, costs.recompute) for layer in range(costs.num_layers)]
        before = np.concatenate(([0.0], np.cumsum(passed)))
        shared = num * profile.shared_bytes
        ahead = np.minimum(max_bytes(setup), before[None, :] - before[:, None] + shared)
        # A device computes one block of either stage again at a time, and blocks are mostly alike: with the
        # largest of the model what two stages need is a sum.
        once = np.full_like(costs.once_bytes, costs.once_bytes.max())
        return cls(setup, replace(costs, once_bytes=once), ahead)

    @property
    def recompute(self) -> Recompute:
        """Its name."""
        return self.costs.recompute

    def own(self, from_end: int) -> Floats:
        """Entry [i, j]: bytes of a device that computes layers [i, j) in that place, without redundant
        layers.
        """
        return self.costs.memory_bytes(from_end, self.setup.num_micro_batches)

    def redundant(self, from_end: int) -> Floats:
        """Entry [i, j]: bytes that a device needs besides for holding the stage redundantly, as [i, j) in
        that place.
        """
        # Else a predecessor could take over and not have room; with it every single loss fits by
        # construction, and n0 grows. (D-policies-009)
        in_flight = min(from_end, self.setup.num_micro_batches) * self.costs.activation_bytes
        besides = self.setup.held.device_bytes  # what a hop sent is kept, and it then has two
        found: Floats = self.costs.state_bytes + np.maximum(self.ahead, in_flight) + besides
        return found

    def besides(self, stages: Sequence[Range]) -> list[int]:
        """What each device of a pipeline of ``stages`` needs for its successor's layers."""
        count = len(stages)
        if count == 1:
            return [0]
        places = [(stages[(at + 1) % count], count - (at + 1) % count) for at in range(count)]
        return [ceil(self.redundant(from_end)[layers.start, layers.stop]) for layers, from_end in places]

    def needed(self, stages: Sequence[Range]) -> list[float]:
        """What each device of a pipeline of ``stages`` needs in all."""
        count = len(stages)
        own = [float(self.own(count - at)[s.start, s.stop]) for at, s in enumerate(stages)]
        return [mine + more for mine, more in zip(own, self.besides(stages), strict=True)]


@dataclass(slots=True)
class Room:
    """What devices of ``setup`` need, and the splits that fit. Stages are counted from the pipeline's end: 1
    is the last.
    """

    setup: Setup
    modes: tuple[_InMode, ...] = field(init=False)  # that devices may compute in, those of least time first
    reached: dict[Recompute, list[Floats]] = field(init=False)  # by the last device's mode

    def __post_init__(self) -> None:
        self.modes = tuple(_InMode.of(self.setup, costs) for costs in costs_by_mode(self.setup))
        self.reached = {mode.recompute: [self._alone(mode)] for mode in self.modes}

    def _alone(self, mode: _InMode) -> Floats:
        """``_reach`` of the last stage."""
        count = mode.costs.num_layers
        first = np.full((count + 1, count + 1), NEVER)
        first[:count, count] = self.limit_bytes - mode.own(1)[:count, count]
        return np.where(first < 0, NEVER, first)

    @property
    def limit_bytes(self) -> float:
        """What a device has; inf: nothing bounds it."""
        return self.setup.device_memory_bytes or np.inf

    def num_stages(self, num_nodes: int) -> int:
        """Stages of a pipeline of so many nodes."""
        return min(num_nodes * self.setup.devices_per_node, len(self.setup.profile.layers))

    def fits(self, num_stages: int) -> bool:
        """Whether some split into so many stages fits."""
        return any(self._first_stages(num_stages, last).any() for last in self.modes)

    def _first_stages(self, num_stages: int, last: _InMode) -> Possible:
        """Entry j: whether some split that fits begins with the stage [0, j), where the last device computes
        in mode ``last``.
        """
        reach = self._reach(num_stages, last)[0]
        wrapped = last.redundant(num_stages)[0] if num_stages > 1 else NEVER
        possible: Possible = np.logical_and(reach > NEVER, reach >= wrapped)
        return possible

    def _reach(self, from_end: int, last: _InMode) -> Floats:
        """Entry [i, j]: with [i, j) in that place, and the best split behind it, the most bytes that the last
        device, in its mode, has left for the first stage's layers held redundantly; ``NEVER`` where no split
        behind it fits.
        """
        reached = self.reached[last.recompute]
        while len(reached) < from_end:
            behind, place = reached[-1], len(reached) + 1
            rooms = [self.limit_bytes - mode.own(place) for mode in self.modes]
            needs = [mode.redundant(place - 1) for mode in self.modes]
            # The more layers a successor has the more it needs, so it may have any number up to one.
            best = np.maximum.accumulate(behind, axis=1)
            here = np.full_like(behind, NEVER)
            for cut in range(1, len(behind) - 1):
                most = np.maximum.reduce(
                    [
                        np.searchsorted(need[cut, cut + 1 :], room[:cut, cut], side="right")
                        for room, need in zip(rooms, needs, strict=True)
                    ]
                )
                here[:cut, cut] = np.where(most > 0, best[cut, cut + most], NEVER)
            reached.append(here)
        return reached[from_end - 1]

    def split(self, num_stages: int) -> list[Range]:
        """A split into so many stages that fits, each as near as can be to an even part of the time that is
        left.
        """
        time_s = self.modes[0].costs.time_s
        last = next(mode for mode in self.modes if self._first_stages(num_stages, mode).any())
        possible = self._first_stages(num_stages, last)
        stages = [Range(0, _nearest(time_s[0], possible, float(time_s[0, -1]) / num_stages))]
        wrapped = float(last.redundant(num_stages)[0, stages[0].stop])
        for from_end in range(num_stages - 1, 0, -1):
            start, before = stages[-1].stop, stages[-1]
            behind = self._reach(from_end, last)[start]
            fits = [
                mode.own(from_end + 1)[before.start, before.stop] + mode.redundant(from_end)[start]
                <= self.limit_bytes
                for mode in self.modes
            ]
            possible = np.logical_or.reduce(fits) & (behind > NEVER) & (behind >= wrapped)
            stop = _nearest(time_s[start], possible, float(time_s[start, -1]) / from_end)
            stages.append(Range(start, stop))
        return stages

    def besides(self, stages: Sequence[Range], recompute: Sequence[Recompute]) -> list[int]:
        """What each device needs for its successor's layers, where it computes in such a mode."""
        by_name = {mode.recompute: mode.besides(stages) for mode in self.modes}
        return [by_name[mode][at] for at, mode in enumerate(recompute)]

    def modes_of(self, stages: Sequence[Range]) -> tuple[Recompute, ...]:
        """The mode of least time that each device has room for, or else the last one."""
        return tuple(mode.recompute for mode, _ in self._devices(stages))

    def modes_at(self, bounds: Bounds) -> tuple[Recompute, ...]:
        """The same for the split at ``bounds``."""
        return self.modes_of([Range(*pair) for pair in pairwise(bounds)])

    def needed(self, stages: Sequence[Range]) -> list[float]:
        """What each device needs in all, in its mode."""
        return [need for _, need in self._devices(stages)]

    def _devices(self, stages: Sequence[Range]) -> list[tuple[_InMode, float]]:
        by_mode = [(mode, mode.needed(stages)) for mode in self.modes]
        found = []
        for at in range(len(stages)):
            each = [(mode, need[at]) for mode, need in by_mode]
            found.append(next((fits for fits in each if fits[1] <= self.limit_bytes), each[-1]))
        return found

    def holds(self, bounds: Bounds) -> bool:
        """Whether the split at ``bounds`` fits."""
        return max(self.needed([Range(*pair) for pair in pairwise(bounds)])) <= self.limit_bytes


def _nearest(time_s: Floats, possible: Possible, wanted_s: float) -> int:
    """Where, of all that is ``possible``, ``time_s`` is nearest to ``wanted_s``."""
    return int(np.where(possible, np.abs(time_s - wanted_s), np.inf).argmin())


def _nothing_fits(setup: Setup) -> PlanError:
    """The error for a model whose devices have no room for redundant layers, whatever the number of nodes."""
    num_layers = len(setup.profile.layers)
    if setup.min_nodes > num_layers:
        return PlanError(
            f"no pipeline of {count(setup.min_nodes, 'node')} or more can be made: the model has "
            f"{count(num_layers, 'layer')}",
            f"lower resources.min_pipeline_nodes from {setup.min_nodes}",
        )
    low, high = 0, 1
    while not fitting_redundant(setup, high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fitting_redundant(setup, middle) else (middle, high)
    nodes = fitting_redundant(setup, high)[0]
    memory = f"raise resources.device_memory to at least {high:,} bytes"
    again = _recomputing(setup)
    return PlanError(
        "with every device holding its successor's layers too the model fits no number of nodes: on "
        f"{nodes}, which need least, a device needs {high:,} bytes and the limit is "
        f"{setup.device_memory_bytes:,}",
        f"{again}{memory}, lower schedule.redundant_memory, train.micro_batch or train.sequence, or choose "
        "another fault_tolerance.policy",
        memory,
    )


def _recomputing(setup: Setup) -> str:
    """The part of a hint that names recomputation, where it is enough."""
    found = fitting_redundant(msgspec.structs.replace(setup, recompute="auto"), setup.device_memory_bytes)
    return way_out(f"{count(found[0], 'node')} {noun(found[0], 'is')} enough then") if found else ""


def decoupled_within(setup: Setup, plan: Plan, *, redundant: bool) -> tuple[Ordered, ...]:
    """The orders that a decoupled job of ``setup`` gets at once, pipeline by pipeline, with room for what its
    devices keep, and hold for others if they are ``redundant``. Raises ScheduleError.
    """
    besides = Room(setup).besides if redundant else _nothing
    return decoupled_orders(
        plan, setup.profile, setup.device_memory_bytes, EFFORT_AT_ONCE, besides, setup.held
    )


def _nothing(_stages: Sequence[Range], _recompute: Sequence[Recompute]) -> Sequence[int]:
    return ()


def fitting_redundant(setup: Setup, limit_bytes: int) -> list[int]:
    """The numbers of nodes that a limit is enough for."""
    room = Room(msgspec.structs.replace(setup, device_memory_bytes=limit_bytes))
    nodes = range(setup.min_nodes, len(setup.profile.layers) + 1)
    return [n for n in nodes if room.fits(room.num_stages(n))]
