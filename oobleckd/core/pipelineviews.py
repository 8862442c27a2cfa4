"""The pipelines of a plan as the API shows them: device by device, also where several share a stage. Pure."""

from __future__ import annotations

from collections.abc import Collection

from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import Pipeline, Plan
from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.nodeviews import LayerRange


def pipelines_of(plan: Plan, lanes: Lanes, dead: Collection[str] = ()) -> tuple[PipelineView, ...]:
    """``plan``, which is of places and turns, with the devices and micro-batches of ``lanes``. Vacant are
    those of its vacant places, and the ``dead``.
    """
    gone = frozenset(dead).union(*map(lanes.devices, plan.vacant))
    return tuple(
        pipeline_view(index, pipeline, plan, lanes, gone) for index, pipeline in enumerate(plan.pipelines)
    )


def pipeline_view(
    index: int, pipeline: Pipeline, plan: Plan, lanes: Lanes, gone: Collection[str]
) -> PipelineView:
    """One of them. ``gone``: devices that nobody has."""
    stages = tuple(
        LayerRange(device, segment.layers.start, segment.layers.stop)
        for segment in pipeline.segments
        for device in lanes.devices(segment.device)
    )
    again = lanes.of_devices({d: mode for d in pipeline.devices if (mode := plan.recompute.get(d))})
    return PipelineView(
        index,
        pipeline.nodes,
        stages,
        lanes.micro_batches(pipeline.micro_batches),
        tuple(stage.device for stage in stages if stage.device in gone),
        again,
    )
