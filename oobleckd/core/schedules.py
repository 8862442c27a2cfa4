"""A step as a picture of who did what when: as devices told it (``samples``), or as the planner has it
(``modelled``).

Owns the lanes, and whose each op was before it was re-routed: that of the pipeline that has its micro-batch
in the plan. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from oobleckd.core.samples import Sample
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import Plan, Segment
from oobleckd.protocol.messages import OpTimes
from oobleckd.protocol.parts import OpTime
from oobleckd.protocol.unreadable import UNREADABLE
from oobleckd.protocol.watch import LaneView, OpKind, OpView, ScheduleView

_decoder = msgspec.msgpack.Decoder(tuple[OpTime, ...])


def sampled_view(sample: Sample) -> ScheduleView:
    """The step as it was. Clocks of hosts lay what their devices did side by side."""
    told = {device: ops_of(message) for device, message in sample.told.items()}
    starts = [sample.told[d].at + op.start_s for d, ops in told.items() for op in ops]
    stops = [sample.told[d].at + op.stop_s for d, ops in told.items() for op in ops]
    # By the hosts' clocks: commits are not simultaneous enough, as a device finds out about the last vote
    # between two layers. (D-watching-004)
    began_at = min(starts, default=sample.at)
    shifted = {device: _since(began_at - sample.told[device].at, ops) for device, ops in told.items()}
    span_s = max(stops, default=began_at) - began_at
    return ScheduleView(
        job=sample.job,
        step=sample.counters.step + 1,
        epoch=sample.epoch,
        at=began_at,
        measured=True,
        span_s=span_s,
        lanes=lanes(sample.plan, Lanes.laid_out(sample.layout), sample.gone, shifted, span_s),
    )


def share_waited(sample: Sample) -> float:
    """Of the step: what live devices that told of it waited, over all of them; 0 where none told. Computed
    once for all who ask, as it looks at each op.
    """
    if sample.waited[0] != len(sample.told):
        sample.waited = (len(sample.told), _share_waited(sample))
    return sample.waited[1]


def _share_waited(sample: Sample) -> float:
    told = {device: ops_of(message) for device, message in sample.told.items()}
    starts = [sample.told[d].at + min(op.start_s for op in ops) for d, ops in told.items() if ops]
    stops = [sample.told[d].at + max(op.stop_s for op in ops) for d, ops in told.items() if ops]
    span_s = max(stops, default=0.0) - min(starts, default=0.0)
    lost = frozenset(sample.gone)  # nobody tells of a vacant place
    devices = (device for device in sample.layout.holdings if device not in lost)
    waited = [_waited(told[device], span_s) for device in devices if told.get(device)]
    return statistics.fmean(waited) if waited else 0.0


def _waited(ops: Iterable[OpTime], span_s: float) -> float:
    """The share of ``span_s`` in which none of ``ops`` ran."""
    busy_s = sum(op.stop_s - op.start_s for op in ops)
    return 0.0 if span_s <= 0 else min(1.0, max(0.0, 1 - busy_s / span_s))


def ops_of(message: OpTimes) -> tuple[OpTime, ...]:
    """What the device told; nothing where it cannot be read, since a picture is no reason to fail."""
    try:
        return _decoder.decode(message.ops)
    except UNREADABLE:
        return ()


def _since(began_s: float, ops: Iterable[OpTime]) -> list[OpTime]:
    """``ops`` in seconds after ``began_s`` of their clock."""
    return [
        msgspec.structs.replace(op, start_s=op.start_s - began_s, stop_s=op.stop_s - began_s) for op in ops
    ]


# Whose an op was follows from the plan's pipelines: the layout's routes may go around vacant places
# already, and the plan still names whose they are. (D-watching-003)
def lanes(
    plan: Plan, of_devices: Lanes, gone: Iterable[str], ops: Mapping[str, Sequence[OpTime]], span_s: float
) -> tuple[LaneView, ...]:
    """A lane for every device of ``plan``, whose places have those ``of_devices``, pipeline by pipeline;
    ``gone``: those that are lost.
    """
    lost = frozenset(gone).union(*map(of_devices.devices, plan.vacant))
    own = {
        mb: of_devices.segments(pipeline, mb)
        for pipeline in plan.pipelines
        for mb in of_devices.micro_batches(pipeline.micro_batches)
    }
    found = []
    for index, pipeline in enumerate(plan.pipelines):
        for place in pipeline.devices:
            hops = tuple(hop for hop, segment in enumerate(pipeline.segments) if segment.device == place)
            for device in of_devices.devices(place):
                told = ops.get(device, ())
                mine = tuple(_op_view(device, op, own) for op in told)
                dead = device in lost
                waited = 0.0 if dead else _waited(told, span_s)
                found.append(LaneView(device, index, hops, mine, waited, dead))
    return tuple(found)


def _op_view(device: str, op: OpTime, own: Mapping[int, Sequence[Segment]]) -> OpView:
    owner = next((s.device for s in own.get(op.micro_batch, ()) if op.layer in s.layers), device)
    origin = "" if owner == device else owner
    kind = cast("OpKind", op.kind)
    return OpView(
        kind, op.stage, op.micro_batch, op.start_s, op.stop_s, origin, op.early, op.again, op.gather_s
    )
