"""Recovery policies behind the Policy protocol: the registry, and its two calls by name."""

from __future__ import annotations

from planner.plan import Template
from planner.policies.oobleck import Oobleck
from planner.policies.slipstream import SlipStream
from planner.policy import PlanError, Policy, Proposal, Setup, Situation

_POLICIES: dict[str, Policy] = {one.name: one for one in (Oobleck(), SlipStream())}


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
    """``policy(name).adapt``. Raises PlanError."""
    return policy(name).adapt(setup, templates, situation, sizes)
