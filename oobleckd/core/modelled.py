"""A step as the planner has it: the timeline of the plan in force, and around its dead where there are any.

Owns which simulation that is. Seconds of work: runs in the planner's pool, never on the loop.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from oobleckd.core.questions import StepQuestion
from oobleckd.core.schedules import lanes
from oobleckd.planner.costs.work import plan_works
from oobleckd.planner.plan import Layers, Layout, Route, Segment, standing_routes
from oobleckd.planner.policies import schedules_of
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.reroute.reroute import detour
from oobleckd.planner.schedule import Op, schedules
from oobleckd.planner.schedules.dispatch import READY_FIRST, dispatch
from oobleckd.planner.schedules.jobshop import cost_of, step_ops
from oobleckd.planner.schedules.routed import MAX_HOPS, layout_crossing
from oobleckd.planner.schedules.timeline import Timeline, dry_run
from oobleckd.protocol.parts import OpTime
from oobleckd.protocol.watch import ScheduleView

_SHOWN = frozenset({"F", "B", "I", "W", "U"})


def modelled_view(question: StepQuestion) -> ScheduleView:
    """The answer. Raises PlanError where nobody can say: a layer without a holder, or too large a plan."""
    plan = question.plan
    hops = sum(len(p.micro_batches) * len(p.segments) for p in plan.pipelines)
    if hops > MAX_HOPS:
        raise PlanError(
            f"a step of {hops:,} hops is too long to be simulated (at most {MAX_HOPS:,})",
            "look at a measured one",
        )
    run, routes = _crossing(question) if plan.vacant or question.dead else _whole(question)
    ops = {device: _op_times(device, run, routes) for device in run.spans}
    return ScheduleView(
        job=question.job,
        step=question.step,
        epoch=question.epoch,
        at=question.at,
        measured=False,
        span_s=run.makespan_s,
        lanes=lanes(plan, question.dead, ops, run.makespan_s),
    )


Hops = Mapping[int, tuple[Segment, ...]]
"""Micro-batch -> its hops."""


def _whole(question: StepQuestion) -> tuple[Timeline, Hops]:
    """Every pipeline by itself, in the order that its devices are given, else as 1F1B."""
    setup, plan = question.setup, question.plan
    ops = schedules_of(setup, plan) or schedules(plan)
    works, held = plan_works(plan, setup.profile), plan.holdings()

    def cost(device: str, op: Op) -> float:
        return _update_s(setup, held[device]) if op.kind == "U" else works[device].seconds(op)

    return dry_run(ops, cost), {mb: p.segments for p in plan.pipelines for mb in p.micro_batches}


def _update_s(setup: Setup, held: Layers) -> float:
    return sum(setup.profile.layers[layer].update_s for layer in held.layers())


def _crossing(question: StepQuestion) -> tuple[Timeline, Hops]:
    """Peers compute for the dead: in an order where that is enough faster, else ready-first."""
    layout = _without_dead(question)
    # The same job shop that the planner and the simulator use: a model of ready-first beside another of
    # orders would differ some day. (D-schedules-012)
    crossing, shop = layout_crossing(layout, question.setup)
    orders = crossing.orders or dispatch(shop, READY_FIRST).orders[0]
    run = dry_run(step_ops(shop, orders), cost_of(shop))
    return run, {route.micro_batch: route.segments for route in layout.routes}


def _without_dead(question: StepQuestion) -> Layout:
    """The layout as it stands in that round; where its dead are not taken care of yet, as detours would."""
    layout, dead = question.layout, frozenset(question.dead)
    routes = standing_routes(layout, question.detours, question.round)
    standing = msgspec.structs.replace(layout, routes=routes)
    around: dict[int, Route] = {r.micro_batch: r for r in detour(standing, dead, layout.epoch)}
    return msgspec.structs.replace(
        layout,
        holdings={d: held for d, held in layout.holdings.items() if d not in dead},
        redundant={d: held for d, held in layout.redundant.items() if d not in dead},
        routes=tuple(around.get(route.micro_batch, route) for route in routes),
    )


def _op_times(device: str, run: Timeline, hops: Hops) -> list[OpTime]:
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
        for span in run.spans[device]
        if span.op.kind in _SHOWN and span.stop_s > span.start_s
    ]
