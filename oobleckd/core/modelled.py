"""A step as the planner has it: the timeline of the plan in force, and around its dead where there are any.

Owns which simulation that is. Seconds of work: runs in the planner's pool, never on the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from oobleckd.core.questions import StepQuestion
from oobleckd.core.schedules import lanes
from oobleckd.planner.costs.work import plan_works
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import Layers, Layout, Route, Segment, standing_routes
from oobleckd.planner.policies import schedules_of
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.reroute.reroute import detour, layout_of
from oobleckd.planner.schedule import Op, schedules
from oobleckd.planner.schedules.dispatch import READY_FIRST, dispatch
from oobleckd.planner.schedules.jobshop import cost_of, step_ops
from oobleckd.planner.schedules.routed import MAX_HOPS, layout_crossing
from oobleckd.planner.schedules.timeline import Span, dry_run
from oobleckd.protocol.parts import OpTime
from oobleckd.protocol.watch import ScheduleView

_SHOWN = frozenset({"F", "B", "I", "W", "U"})


def modelled_view(question: StepQuestion) -> ScheduleView:
    """The answer. Raises PlanError where nobody can say: a layer without a holder, or too large a plan."""
    plan = question.plan
    hops = sum(len(route.segments) for route in question.layout.routes)
    if hops > MAX_HOPS:
        raise PlanError(
            f"a step of {hops:,} hops is too long to be simulated (at most {MAX_HOPS:,})",
            "look at a measured one",
        )
    run = _crossing(question) if plan.vacant or question.dead else _whole(question)
    routes = {route.micro_batch: route.segments for route in run.routes}
    ops = {device: _op_times(spans, routes) for device, spans in run.spans.items()}
    return ScheduleView(
        job=question.job,
        step=question.step,
        epoch=question.epoch,
        at=question.at,
        measured=False,
        span_s=run.span_s,
        lanes=lanes(plan, Lanes.laid_out(question.layout), question.dead, ops, run.span_s),
    )


Hops = Mapping[int, tuple[Segment, ...]]
"""Micro-batch -> its hops."""


class _Ran(NamedTuple):
    """A step of ``span_s``: device -> what it runs, and who computes what."""

    span_s: float
    spans: Mapping[str, Sequence[Span]]
    routes: Sequence[Route]


def _whole(question: StepQuestion) -> _Ran:
    """Every pipeline by itself, in the order that its devices are given, else as 1F1B."""
    setup, plan = question.setup, question.plan
    ops = schedules_of(setup, plan) or schedules(plan)
    works, held = plan_works(plan, setup.profile), plan.holdings()

    def cost(device: str, op: Op) -> float:
        return _update_s(setup, held[device]) if op.kind == "U" else works[device].seconds(op)

    run, of_devices = dry_run(ops, cost), Lanes.laid_out(question.layout)
    spans = {
        of_devices.device(place, rank): _of_lane(each, of_devices, rank)
        for place, each in run.spans.items()
        for rank in range(of_devices.devices_per_stage)
    }
    routes = layout_of(plan, question.layout.epoch, question.layout.num_layers)
    return _Ran(run.makespan_s, spans, of_devices.layout(routes).routes)


def _of_lane(spans: Sequence[Span], of_devices: Lanes, rank: int) -> list[Span]:
    """What the place of a stage runs, turn by turn, as its device of ``rank`` does."""
    g, num = of_devices.devices_per_stage, of_devices.num_micro_batches
    every = ((span, span.op.micro_batch * g + rank if span.op.micro_batch >= 0 else -1) for span in spans)
    return [
        msgspec.structs.replace(span, op=msgspec.structs.replace(span.op, micro_batch=number))
        for span, number in every
        if number < num
    ]


def _update_s(setup: Setup, held: Layers) -> float:
    return sum(setup.profile.layers[layer].update_s for layer in held.layers())


def _crossing(question: StepQuestion) -> _Ran:
    """Peers compute for the dead: in an order where that is enough faster, else ready-first."""
    layout = _without_dead(question)
    # The same job shop that the planner and the simulator use: a model of ready-first beside another of
    # orders would differ some day. (D-schedules-012)
    crossing, shop = layout_crossing(layout, question.setup)
    orders = crossing.orders or dispatch(shop, READY_FIRST).orders[0]
    run = dry_run(step_ops(shop, orders), cost_of(shop))
    return _Ran(run.makespan_s, run.spans, layout.routes)


def _without_dead(question: StepQuestion) -> Layout:
    """The layout as it stands in that round; where its dead are not taken care of yet, as detours would."""
    layout, dead = question.layout, question.layout.unable(question.dead)
    routes = standing_routes(layout, question.detours, question.round)
    standing = msgspec.structs.replace(layout, routes=routes)
    around: dict[int, Route] = {r.micro_batch: r for r in detour(standing, dead, layout.epoch)}
    return msgspec.structs.replace(
        layout,
        holdings={d: held for d, held in layout.holdings.items() if d not in dead},
        redundant={d: held for d, held in layout.redundant.items() if d not in dead},
        routes=tuple(around.get(route.micro_batch, route) for route in routes),
    )


def _op_times(spans: Sequence[Span], hops: Hops) -> list[OpTime]:
    """The work of a lane; what takes no time is left out."""
    return [
        OpTime(
            span.op.kind,
            span.op.stage,
            span.op.micro_batch,
            hops[span.op.micro_batch][span.op.stage].layers.start if span.op.stage >= 0 else -1,
            span.start_s,
            span.stop_s,
        )
        for span in spans
        if span.op.kind in _SHOWN and span.stop_s > span.start_s
    ]
