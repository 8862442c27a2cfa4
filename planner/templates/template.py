"""Pipeline templates: for each number of nodes the split with the least modelled time that fits.

Owns which sizes there are and what a template says of its stages; the search is ``split``'s. Does not
choose which templates run (``instantiate``) nor on which nodes (``transfer``).

A template for n nodes of d devices uses all n*d of them. Where stages have one device each (the engine
does not shard them today) and layers are fewer, it has a stage a layer. Nodes are filled in order, and
no stage straddles two. The objective is the time of the micro-batches that a pipeline would get among
``max_nodes`` nodes, ``T(m) = fill + (m-1)*period`` (Oobleck section 4.1, with transfers and memory).
Memory is checked for all micro-batches of the step, so that any share fits later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec
import numpy as np

from oobleckd.planner.costs.choice import costs_by_mode
from oobleckd.planner.costs.memory import min_memory, smallest_memory, smallest_memory_split
from oobleckd.planner.costs.model import StageCosts, device_counts
from oobleckd.planner.plan import Stage, Template
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.templates.guarantee import n_max
from oobleckd.planner.templates.split import StageSplit, Wanted, fastest_splits
from oobleckd.planner.templates.suffix import menu
from oobleckd.words import count, noun


def templates(setup: Setup) -> tuple[Template, ...]:
    """Templates for n0, n0+1, .. n_max nodes, n0 being the fewest whose memory holds the model, or
    ``setup.min_nodes`` if that is more.

    Sizes are consecutive. Raises PlanError when no number of nodes fits.
    """
    model = _model(setup)
    num_layers = len(setup.profile.layers)
    # The only other way to ask for deeper pipelines was a memory cap, which moves layers between stages as
    # well. (D-planner-008)
    fitting = [n for n in range(setup.min_nodes, num_layers + 1) if model.fits(n)]
    if not fitting:
        raise model.nothing_fits()
    sizes = range(fitting[0], n_max(fitting[0], setup.f, setup.max_nodes or num_layers, num_layers) + 1)
    # A deeper pipeline holds more activations; where that stops fitting, larger sizes are left out.
    last = next((n for n in sizes if n not in fitting), sizes.stop)
    return model.templates([(n, expected_share(setup, n)) for n in range(sizes.start, last)])


def templates_for(setup: Setup, wanted: Sequence[tuple[int, int]]) -> tuple[Template, ...]:
    """A template for each (number of nodes, micro-batches to be fastest for) of ``wanted``.

    Raises PlanError for the first number of nodes that the model does not fit.
    """
    model = _model(setup)
    for num_nodes, _ in wanted:
        if not model.fits(num_nodes):
            raise model.does_not_fit(num_nodes)
    return model.templates(wanted)


def fewest_nodes(setup: Setup) -> int:
    """The fewest nodes of a pipeline that hold the model of ``setup``; 0 where none do."""
    model = _model(setup)
    nodes = range(setup.min_nodes, len(setup.profile.layers) + 1)
    return next((n for n in nodes if model.fits(n)), 0)


def way_out(effect: str) -> str:
    """The beginning of a hint, that recomputation has such an effect."""
    return f'set schedule.recompute = "auto" ({effect}), '


def node_stages(template: Template) -> tuple[int, ...]:
    """How many consecutive stages each node of ``template`` runs (devices, where those have two): nodes are
    filled in order, or as even as possible where there are fewer stages than devices.
    """
    devices = [stage.num_devices for stage in template.stages[: len(template.stages) // template.chunks]]
    if max(devices) > 1:
        node = (np.cumsum(devices) - 1) // template.devices_per_node
        return tuple(np.bincount(node).tolist())
    each, more = divmod(len(devices), template.num_nodes)
    return tuple(each + (node < more) for node in range(template.num_nodes))


def expected_share(setup: Setup, num_nodes: int) -> int:
    """Micro-batches that a pipeline of ``num_nodes`` nodes expects when all nodes run such ones: as many as
    there are, within ``max_nodes``; where nobody knows, as many as there are layers.
    """
    nodes = min(filter(None, (setup.nodes_now, setup.max_nodes)), default=len(setup.profile.layers))
    return -(-setup.num_micro_batches // max(setup.f + 1, nodes // num_nodes))


@dataclass(frozen=True, slots=True)
class _Model:
    """The model of a setup on its nodes; ``costs`` for every number of devices that a stage may have,
    ascending from 1, and every mode.
    """

    setup: Setup
    costs: list[StageCosts]
    need_bytes: list[float] = field(init=False)

    def __post_init__(self) -> None:
        # One stage on all devices of several needs no more memory than they do: the largest decide.
        # Its devices divide the largest number allowed, so whether a model fits n nodes is decided without
        # the search. (D-planner-005)
        need = min_memory(self.largest, self.setup.num_micro_batches).tolist()
        object.__setattr__(self, "need_bytes", need)

    @property
    def limit_bytes(self) -> float:
        return self.setup.device_memory_bytes or np.inf

    @property
    def largest(self) -> list[StageCosts]:
        """Of the largest number of devices that a stage may have, in every mode."""
        return [costs for costs in self.costs if costs.num_devices == self.costs[-1].num_devices]

    def num_devices(self, num_nodes: int) -> int:
        """Devices that a template for ``num_nodes`` nodes uses."""
        devices = num_nodes * self.setup.devices_per_node
        return devices if self.costs[-1].num_devices > 1 else min(devices, self.costs[0].num_layers)

    def min_stages(self, num_nodes: int) -> int:
        """Stages of a template for ``num_nodes`` nodes that has as large ones as may be."""
        return self.num_devices(num_nodes) // self.costs[-1].num_devices

    def fits(self, num_nodes: int) -> bool:
        """Whether some split for ``num_nodes`` nodes fits layers and memory."""
        stages = self.min_stages(num_nodes)
        return stages < len(self.need_bytes) and self.need_bytes[stages] <= self.limit_bytes

    def templates(self, wanted: Sequence[tuple[int, int]]) -> tuple[Template, ...]:
        """As ``templates_for``, where every number of nodes fits."""
        setup = self.setup
        stages = menu(self.costs, setup.devices_per_node, setup.num_micro_batches, self.limit_bytes)
        splits = fastest_splits(
            self.costs, stages, [Wanted(self.num_devices(n), share) for n, share in wanted], setup.gap
        )
        made = []
        for (num_nodes, _), split in zip(wanted, splits, strict=True):
            assert split is not None, "what fits has a split"
            made.append(self._template(num_nodes, split))
        return tuple(made)

    def _template(self, num_nodes: int, split: StageSplit) -> Template:
        by_kind = {(costs.num_devices, costs.recompute): costs for costs in self.costs}
        alone = self.costs[0]
        num_stages, stages = len(split.cuts), []
        sharing_s = cuts_s = period_s = update_s = 0.0
        for place, (layers, num_devices, mode) in enumerate(split.cuts):
            costs, where = by_kind[num_devices, mode], (layers.start, layers.stop)
            memory = costs.memory_bytes(num_stages - place, self.setup.num_micro_batches)[where]
            stages.append(Stage(layers, num_devices, float(costs.time_s[where]), int(np.ceil(memory)), mode))
            sharing_s += float(costs.time_s[where] - alone.time_s[where])
            cuts_s += float(costs.cut_s[layers.start])
            period_s = max(period_s, float(costs.period_s[where]))
            update_s = max(update_s, self.setup.profile.update_s(*where))
        return Template(
            num_nodes=num_nodes,
            devices_per_node=self.setup.devices_per_node,
            stages=tuple(stages),
            fill_s=float(alone.time_s[0, -1] + sharing_s + 2 * cuts_s) + update_s,
            period_s=period_s,
            gap=split.gap,
        )

    def nothing_fits(self) -> PlanError:
        """The error for a model that no number of nodes holds."""
        if any(map(self.fits, range(1, self.setup.min_nodes))):
            return PlanError(
                f"no pipeline of {count(self.setup.min_nodes, 'node')} or more can be made: the model has "
                f"{count(self.costs[0].num_layers, 'layer')}, and memory is limited",
                f"lower resources.min_pipeline_nodes from {self.setup.min_nodes}",
            )
        again, out = self._recomputing(), ""
        if nodes := fewest_nodes(again.setup):
            out = again.way_out(nodes, f"{count(nodes, 'node')} {noun(nodes, 'is')} enough then, with")
        less = again.need_bytes[again.least()]
        return self._too_large("the model fits no number of nodes", self.least(), out, less)

    def does_not_fit(self, num_nodes: int) -> PlanError:
        """The error for a model that ``num_nodes`` nodes do not hold."""
        stages, num_layers = self.min_stages(num_nodes), self.costs[0].num_layers
        nodes = "one node" if num_nodes == 1 else count(num_nodes, "node")
        if stages > num_layers:
            return PlanError(
                f"{nodes} of {count(self.setup.devices_per_node, 'device')}: too many for one pipeline, "
                f"which has {count(stages, 'stage')} at least while the model has "
                f"{count(num_layers, 'layer')}"
            )
        again = self._recomputing()
        out = again.way_out(num_nodes, "it needs") if again.fits(num_nodes) else ""
        return self._too_large(f"the model does not fit {nodes}", stages, out, again.need_bytes[stages])

    def least(self) -> int:
        """The number of stages with which a device needs least."""
        return min(range(1, len(self.need_bytes)), key=lambda s: (self.need_bytes[s], s))

    def _recomputing(self) -> _Model:
        """The same model with stages that compute again what they have no room for."""
        return _model(msgspec.structs.replace(self.setup, recompute="auto"))

    def way_out(self, num_nodes: int, effect: str) -> str:
        """The beginning of a hint: that it fits so many nodes, and what a device then needs."""
        need = ceil(self.need_bytes[self.min_stages(num_nodes)])
        return way_out(f"{effect} {need:,} bytes of a device")

    def _too_large(self, problem: str, num_stages: int, out: str, less: float) -> PlanError:
        """The error that names the stage which is too large even in the split that comes closest. ``out``:
        the way out that recomputation is, or else ``less``: the bytes that would do with it.
        """
        costs, profile, limit = self.largest, self.setup.profile, self.setup.device_memory_bytes
        num = self.setup.num_micro_batches
        bounds = smallest_memory_split(costs, num_stages, num)
        memory = [smallest_memory(costs, num_stages - s, num) for s in range(num_stages)]
        sizes = [int(np.ceil(memory[s][bounds[s], bounds[s + 1]])) for s in range(num_stages)]
        worst = int(np.argmax(sizes))
        first, last = bounds[worst], bounds[worst + 1] - 1
        where = (
            f"layer {first} ({profile.layers[first].name})" if first == last else f"layers {first} to {last}"
        )
        devices = (
            f"each of {count(costs[0].num_devices, 'device')}" if costs[0].num_devices > 1 else "a device"
        )
        raised = f"raise resources.device_memory to at least {sizes[worst]:,} bytes"
        helps = not out and ceil(less) < sizes[worst]
        besides = f' ({ceil(less):,} bytes with schedule.recompute = "auto")' if helps else ""
        return PlanError(
            f"{problem}: with {count(num_stages, 'stage')}, the split that needs least, {where} "
            f"needs {sizes[worst]:,} bytes of {devices} and the limit is {limit:,}",
            f"{out}{raised}{besides}, or lower train.micro_batch or train.sequence",
            raised,
        )


def _model(setup: Setup) -> _Model:
    """The model of ``setup``. Raises PlanError where there is nothing to plan."""
    if not setup.profile.layers or setup.num_micro_batches < 1 or setup.devices_per_node < 1:
        raise PlanError("a plan needs at least one layer, one micro-batch and one device a node")
    counts = device_counts(setup.profile, setup.devices_per_node, setup.max_devices_per_stage)
    return _Model(setup, [costs for count in counts for costs in costs_by_mode(setup, count)])
