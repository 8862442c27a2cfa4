"""Turns what is planned in places and turns into devices and micro-batches, and back.

Owns that boundary. The planner knows nothing of stages that several devices share (``costs.sharded``): its
"device" is the *place* of a stage, ``node/k``, and its "micro-batch" a *turn* of the stage's devices. Here
place k of a node is its shard group k, devices k*g to k*g + g - 1, and turn t of a step is micro-batches t*g
to t*g + g - 1, as far as the step has them. A pipeline of places is so g *lanes* of devices: lane i on those
of rank i, with micro-batch t*g + i of every turn t. With one device a stage all is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from oobleckd.planner.plan import (
    Layers,
    Layout,
    Pipeline,
    Plan,
    Route,
    Segment,
    device_name,
    node_of,
)
from oobleckd.planner.policy import Setup, Situation
from oobleckd.planner.schedule import WHOLE_STEP, Op, format_ops, parse_ops

T = TypeVar("T")


class Lanes(msgspec.Struct, frozen=True):
    """The lanes of a job whose stages have ``devices_per_stage`` devices, and whose steps
    ``num_micro_batches``.
    """

    devices_per_stage: int
    num_micro_batches: int

    @classmethod
    def of(cls, setup: Setup) -> Lanes:
        """Those of the job that ``setup`` plans."""
        return cls(setup.profile.devices_per_stage, setup.whole_batch or setup.num_micro_batches)

    @classmethod
    def laid_out(cls, layout: Layout) -> Lanes:
        """Those that ``layout`` has, which is of devices."""
        return cls(layout.devices_per_stage, len(layout.routes))

    # ------------------------------------------------------------------ names

    def devices(self, place: str) -> tuple[str, ...]:
        """The devices of ``place``, by rank."""
        if self.devices_per_stage == 1:
            return (place,)
        first = _index(place) * self.devices_per_stage
        return tuple(
            device_name(node_of(place), index) for index in range(first, first + self.devices_per_stage)
        )

    def device(self, place: str, rank: int) -> str:
        """That of ``rank``."""
        if self.devices_per_stage == 1:
            return place
        return device_name(node_of(place), _index(place) * self.devices_per_stage + rank)

    def place(self, device: str) -> str:
        """The place that ``device`` has a part in."""
        if self.devices_per_stage == 1:
            return device
        return device_name(node_of(device), _index(device) // self.devices_per_stage)

    def places(self, devices: Iterable[str]) -> tuple[str, ...]:
        """The places that ``devices`` have a part in, in name order."""
        return tuple(sorted({self.place(device) for device in devices}))

    def micro_batches(self, turns: Iterable[int]) -> tuple[int, ...]:
        """Those of ``turns``: as many each as a stage has devices, in the last of a step what is left."""
        g, num = self.devices_per_stage, self.num_micro_batches
        if g == 1:
            return tuple(turns)
        return tuple(number for turn in turns for number in range(turn * g, min((turn + 1) * g, num)))

    # ------------------------------------------------------------------ what the devices have

    def layout(self, planned: Layout) -> Layout:
        """``planned``, which lays out places and turns, of devices and micro-batches."""
        g = self.devices_per_stage
        if g == 1:
            return planned
        return Layout(
            planned.epoch,
            planned.num_layers,
            self.of_devices(planned.holdings),
            tuple(route for turn in planned.routes for route in self._routes(turn)),
            self.of_devices(planned.redundant),
            self.of_devices(planned.recompute),
            g,
        )

    def holdings(self, plan: Plan) -> dict[str, Layers]:
        """Device -> the layers of which it holds a shard."""
        return self.of_devices(plan.holdings())

    def of_devices(self, by_place: Mapping[str, T]) -> dict[str, T]:
        """What is so of each place, by device."""
        return {device: value for place, value in by_place.items() for device in self.devices(place)}

    def segments(self, pipeline: Pipeline | Route, micro_batch: int) -> tuple[Segment, ...]:
        """The hops of ``micro_batch`` through the places of ``pipeline``."""
        if self.devices_per_stage == 1:
            return pipeline.segments
        rank = micro_batch % self.devices_per_stage
        return tuple(Segment(self.device(hop.device, rank), hop.layers) for hop in pipeline.segments)

    def _routes(self, turn: Route) -> Iterable[Route]:
        """The micro-batches of ``turn``, each along its lane."""
        for number in self.micro_batches((turn.micro_batch,)):
            hops = self.segments(turn, number)
            yield msgspec.structs.replace(turn, micro_batch=number, segments=hops)

    # ------------------------------------------------------------------ what the planner sees

    def at_places(self, by_device: Mapping[str, T]) -> dict[str, T]:
        """What is so of each place of which a device is named; those of one place are alike."""
        if self.devices_per_stage == 1:
            return dict(by_device)
        return {self.place(device): value for device, value in by_device.items()}

    def seen(self, situation: Situation) -> Situation:
        """``situation``, whose holdings are of devices, as policies see it. A place of which any device has
        its shard counts as holding it.
        """
        # The shards that are there stay where they are: were the place empty for the policy, it might as
        # well take another node's, and copy all of them. What is missing is copied all the same
        # (``policies.bydevice``). (D-planner-019)
        if self.devices_per_stage == 1:
            return situation
        return msgspec.structs.replace(situation, holdings=self.at_places(situation.holdings))

    def ops(self, planned: Mapping[str, str]) -> dict[str, str]:
        """Device -> its schedule as text, from those of places."""
        if self.devices_per_stage == 1:
            return dict(planned)
        return {
            self.device(place, rank): self._lane_ops(text, rank)
            for place, text in planned.items()
            for rank in range(self.devices_per_stage)
        }

    def _lane_ops(self, text: str, rank: int) -> str:
        """The schedule ``text`` of a place, for its device of ``rank``."""
        g = self.devices_per_stage
        return format_ops(
            op if op.kind in WHOLE_STEP else Op(op.kind, op.stage, op.micro_batch * g + rank)
            for op in parse_ops(text)
            if op.kind in WHOLE_STEP or op.micro_batch * g + rank < self.num_micro_batches
        )


def _index(name: str) -> int:
    return int(name.rpartition("/")[2])
