"""Recovery policies behind the Policy protocol: the registry, and its two calls by name, with the schedules of what they plan."""

from __future__ import annotations

import msgspec

from planner.plan import Plan, Template
from planner.policies.adaptive import Adaptive
from planner.policies.bamboo import Bamboo
from planner.policies.oobleck import Oobleck
from planner.policies.slipstream import SlipStream
from planner.policies.varuna import Varuna
from planner.policy import PlanError, Policy, Proposal, Setup, Situation
from planner.reroute import layout_of
from planner.routed import MOST_HOPS, better
from planner.schedule import Op, format_ops
from planner.shadowed import decoupled_within
from planner.shop import orders_of, shop_of, step_ops

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
    """``policy(name).adapt``, with the schedule of every device that is to keep to one. Raises PlanError."""
    found = policy(name).adapt(setup, templates, situation, sizes)
    if found.plan.vacant:
        return found  # the policy knows whether its routes are better run in an order
    ops = {device: format_ops(each) for device, each in _schedules(setup, found.plan).items()}
    return msgspec.structs.replace(found, ops=ops)


def _schedules(setup: Setup, plan: Plan) -> dict[str, tuple[Op, ...]]:
    """Of a decoupled backward; one that is whole is run ready-first, which is 1F1B."""
    if not setup.decoupled:
        return {}
    ops = decoupled_within(setup, plan, shadowed=bool(plan.shadows))
    if not setup.staggered or sum(len(p.micro_batches) * len(p.segments) for p in plan.pipelines) > MOST_HOPS:
        return ops
    shop = shop_of(layout_of(plan, 1, len(setup.profile.layers)), setup)
    return step_ops(shop, better(shop, orders_of(shop, ops)))
