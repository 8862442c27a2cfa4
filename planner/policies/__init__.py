"""Recovery policies behind the Policy protocol: the registry, and its two calls by name, with the schedules
of what they plan, also for devices of which several share a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.placement.precopy import lost_s, pays, precopy_s, still_share
from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Plan, Template
from oobleckd.planner.policies.adaptive import Adaptive
from oobleckd.planner.policies.bamboo import Bamboo
from oobleckd.planner.policies.bydevice import by_device, resharded
from oobleckd.planner.policies.grid import at_work, grid_of, needed_bytes
from oobleckd.planner.policies.oobleck import Oobleck
from oobleckd.planner.policies.slipstream import SlipStream
from oobleckd.planner.policies.varuna import Varuna
from oobleckd.planner.policy import PlanError, Policy, Proposal, Setup, Situation
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedule import Op
from oobleckd.planner.schedules.decoupled import ops_of
from oobleckd.planner.schedules.jobshop import Shop, orders_of, shop_of, step_ops
from oobleckd.planner.schedules.routed import MAX_HOPS, better
from oobleckd.planner.schedules.written import NOTHING, WrittenOrders, written_pipelines, written_shop
from oobleckd.planner.templates.redundant import decoupled_within

_POLICIES: dict[str, Policy] = {
    one.name: one for one in (Adaptive(), Oobleck(), SlipStream(), Bamboo(), Varuna())
}


def policy(name: str) -> Policy:
    """The policy called ``name``. Raises PlanError for a name that nobody bears."""
    if name not in _POLICIES:
        raise PlanError(
            f"no policy {name!r}", f"fault_tolerance.policy is one of: {', '.join(sorted(_POLICIES))}"
        )
    return _POLICIES[name]


def prepare(name: str, setup: Setup) -> tuple[Template, ...]:
    """``policy(name).prepare``. Raises PlanError."""
    return policy(name).prepare(setup)


def adapt(
    name: str,
    setup: Setup,
    templates: tuple[Template, ...],
    situation: Situation,
    sizes: tuple[int, ...] = (),
) -> Proposal:
    """``proposed``, with the schedule of every device that is to keep to one. Raises PlanError."""
    found = proposed(name, setup, templates, situation, sizes)
    if found.plan.vacant:
        return found  # the policy knows whether its routes are better run in an order
    written = _written(setup, found.plan)
    return msgspec.structs.replace(found, ops=written.ops, invalid=written.fault)


def proposed(
    name: str,
    setup: Setup,
    templates: tuple[Template, ...],
    situation: Situation,
    sizes: tuple[int, ...] = (),
) -> Proposal:
    """``policy(name).adapt``, with pre-copy where that pays and the policy has not weighed it. Raises
    PlanError.
    """
    asked = policy(name)
    found = asked.adapt(setup, templates, situation, sizes)
    if found.precopy_s >= 0:
        return found
    wait_s = _precopy_s(setup, templates, situation, found, goes_on=asked.reroutes)
    return msgspec.structs.replace(found, precopy_s=wait_s)


def deployable(
    name: str,
    setup: Setup,
    templates: tuple[Template, ...],
    situation: Situation,
    sizes: tuple[int, ...] = (),
    *,
    ordered: bool = True,
) -> Proposal:
    """``adapt`` (without ``ordered``: ``proposed``) where holdings are of devices, as they are told: so are
    its copies and schedules then. Raises PlanError.
    """
    if situation.held_per_stage:
        anew = msgspec.structs.replace(situation, holdings={}, running=(), held_per_stage=0)
        found = (adapt if ordered else proposed)(name, setup, templates, anew, sizes)
        return resharded(setup, found, situation)
    seen = Lanes.of(setup).seen(situation)
    found = (adapt if ordered else proposed)(name, setup, templates, seen, sizes)
    return by_device(setup, found, situation)


def _precopy_s(
    setup: Setup, templates: tuple[Template, ...], situation: Situation, found: Proposal, *, goes_on: bool
) -> float:
    """As ``precopy_s``, where less is lost by the steps until then than by the copies in the stop.
    ``goes_on``: the job does after a loss.
    """
    copies, new_s = found.transfers, found.plan.step_s
    copies_s = copy_s(copies, setup.profile)
    if not copies or not pays(copies_s, new_s, setup.profile.state_copies):
        return 0.0
    grid = grid_of(setup, templates, situation)
    now = at_work(grid, situation) if grid is not None else None
    if now is not None and now.vacant and not goes_on:
        return 0.0  # it stands still until there is a plan
    now_s = now.step_s if now is not None and now.goes_on else new_s
    wait_s = precopy_s(setup, lambda: needed_bytes(now), situation, copies, now_s)
    return wait_s if lost_s(wait_s, now_s, new_s) < (1 - still_share(setup.profile)) * copies_s else 0.0


def schedules_of(setup: Setup, plan: Plan) -> dict[str, tuple[Op, ...]]:
    """Device -> the schedule that it is given with ``plan``: of a decoupled backward; one that is whole is
    run ready-first, which is 1F1B.

    Raises ScheduleError.
    """
    if not setup.decoupled:
        return {}
    ops = ops_of(plan, decoupled_within(setup, plan, redundant=bool(plan.redundant)))
    shop = _staggered(setup, plan)
    return ops if shop is None else _better(shop, ops)


def _written(setup: Setup, plan: Plan) -> WrittenOrders:
    """``schedules_of``, checked, as text."""
    if not setup.decoupled:
        return NOTHING
    ordered = decoupled_within(setup, plan, redundant=bool(plan.redundant))
    alone, shop = written_pipelines(plan, ordered), _staggered(setup, plan)
    if alone.fault or shop is None:
        return alone
    return written_shop(shop, _better(shop, ops_of(plan, ordered)))


def _staggered(setup: Setup, plan: Plan) -> Shop | None:
    """The step in whose orders a shorter period is sought; None where none is."""
    if not setup.staggered or sum(len(p.micro_batches) * len(p.segments) for p in plan.pipelines) > MAX_HOPS:
        return None
    return shop_of(layout_of(plan, 1, len(setup.profile.layers)), setup)


def _better(shop: Shop, ops: Mapping[str, Sequence[Op]]) -> dict[str, tuple[Op, ...]]:
    return step_ops(shop, better(shop, orders_of(shop, ops)))
