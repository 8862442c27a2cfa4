"""Policy ``adaptive``: at each change whichever way costs least until the next loss is expected.

Owns the choice between what the others propose: go on as it is, micro-batches of vacant places re-routed (``slipstream``); let
nodes without a place fill them; re-instantiate (``oobleck``); go back to the checkpoint. The same choice serves losses, joins
and drains: is the gain worth the switch? Plans, copies and routes are theirs.

What is weighed, in seconds until the next loss is expected: the steps as modelled, the copies, the stop at a boundary, and what that loss would cost
if it takes the last copy of a layer. But first of all the promise is kept: where one of the ways leaves ``f`` losses that can be survived, none that leaves fewer is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from planner.plan import Plan, Template, node_of
from planner.policies.grid import Grid, grid_of
from planner.policies.oobleck import Oobleck, size_of, sizes_of
from planner.policies.slipstream import proposal_of, stayed, waiting_for
from planner.policy import REROUTING, ROLLING_BACK, Proposal, Rejected, Setup, Situation

STOP_STEPS = 1.0
"""What a deployment takes besides its copies: pipelines run empty, all agree, and they fill again. About a step."""


@dataclass(frozen=True, slots=True)
class _Way:
    """``proposal`` under its name; ``cost_s`` until the next loss, of which ``risk_s`` for what that may take along."""

    what: str
    proposal: Proposal
    cost_s: float
    risk_s: float
    tolerance: int

    def rank(self, f: int) -> tuple[int, float]:
        """Less is better: the promise first; then the cost, to the nanosecond. The first of equals is the one that does least."""
        return -min(self.tolerance, f), round(self.cost_s, 9)


class Adaptive:
    """The cheapest of the others' ways."""

    name = "adaptive"
    reroutes = name in REROUTING
    rolls_back = name in ROLLING_BACK

    def __init__(self) -> None:
        self.anew = Oobleck()

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for n0 .. n_max nodes. Raises PlanError when no number of nodes fits."""
        return self.anew.prepare(setup)

    def adapt(
        self,
        setup: Setup,
        templates: tuple[Template, ...],
        situation: Situation,
        sizes: tuple[int, ...] = (),
    ) -> Proposal:
        """The way of least modelled cost until the next loss is expected; the others with their costs, as rejected.

        Raises PlanError when there are fewer than n0 nodes.
        """
        anew = self.anew.adapt(setup, templates, situation, sizes)
        grid = grid_of(setup, templates, situation)
        if grid is None:
            return anew
        ways = [*_staying(situation, grid), _way("re-instantiate", situation, anew, stops=True)]
        chosen = min(ways, key=lambda way: way.rank(setup.f))
        others = sorted((way for way in ways if way is not chosen), key=lambda way: way.rank(setup.f))
        rejected = [_rejected(way, chosen, situation, setup.f) for way in others]
        if situation.redo_s >= 0:
            rejected.append(_back(situation, chosen))
        if chosen.proposal is anew:
            rejected += anew.rejected
        return _proposal(chosen, situation, rejected)


def _staying(situation: Situation, grid: Grid) -> Iterator[_Way]:
    """The pipelines at work as they are, and with the nodes that wait in their vacant places."""
    waiting = waiting_for(grid, situation)
    for count in sorted({0, min(len(waiting), len(grid.vacant))}):
        found = stayed(grid, waiting[:count])
        if found is None:
            continue
        chosen, _ = found
        proposal = proposal_of(situation, chosen, ())
        what = "fill vacant places" if count else "re-route and stay" if chosen.vacant else "stay"
        stops = bool(proposal.transfers or proposal.ops) or proposal.plan.nodes() != _at_work(grid)
        yield _way(what, situation, proposal, stops=stops)


def _at_work(grid: Grid) -> tuple[str, ...]:
    return tuple(grid.here[slot] for slot in sorted(grid.here))


def _way(what: str, situation: Situation, proposal: Proposal, *, stops: bool) -> _Way:
    plan = proposal.plan
    copies, sole = _copies(plan)
    risk_s = max(0.0, situation.redo_s) * sole / max(1, len(plan.nodes()))
    cost_s = proposal.cost_s + stops * STOP_STEPS * plan.step_s + risk_s
    return _Way(what, proposal, cost_s, risk_s, copies - 1)


def _copies(plan: Plan) -> tuple[int, int]:
    """How many nodes hold the layer that fewest hold; and how many nodes are the last holder of some layer."""
    holders: dict[int, set[str]] = {}
    for device, layers in plan.holdings().items():
        for layer in layers.layers():
            holders.setdefault(layer, set()).add(node_of(device))
    counts = Counter(len(nodes) for nodes in holders.values())
    last = {min(nodes) for nodes in holders.values() if len(nodes) == 1}
    return min(counts, default=0), len(last)


# ---------------------------------------------------------------------- what is said of it


def _proposal(chosen: _Way, situation: Situation, rejected: list[Rejected]) -> Proposal:
    reason = f"{chosen.what}: {chosen.proposal.reason}; weighed over {situation.horizon_steps:.3g} steps"
    plan = msgspec.structs.replace(chosen.proposal.plan, reason=reason)
    return msgspec.structs.replace(
        chosen.proposal, plan=plan, cost_s=chosen.cost_s, reason=reason, rejected=tuple(rejected)
    )


def _rejected(way: _Way, chosen: _Way, situation: Situation, f: int) -> Rejected:
    plan, extra_s = way.proposal.plan, way.cost_s - chosen.cost_s
    parts = [
        f"{abs(extra_s):.3g} s {'more' if extra_s >= 0 else 'less'} over {situation.horizon_steps:.3g} steps"
    ]
    copies = f"copies {size_of(way.proposal.transfers)}, " if way.proposal.transfers else ""
    parts.append(f"{copies}step {plan.step_s:.3g} s")
    if way.risk_s:
        parts.append(f"{way.risk_s:.3g} s of it for a last copy that the next loss may take")
    if min(way.tolerance, f) < min(chosen.tolerance, f):
        parts.append(f"could lose {way.tolerance}, and f = {f}")
    what = f"{way.what}: pipelines of {sizes_of(plan)} nodes" if way.what == "re-instantiate" else way.what
    return Rejected(what, way.cost_s, "; ".join(parts))


def _back(situation: Situation, chosen: _Way) -> Rejected:
    """What a system without live copies would do."""
    why = f"{situation.redo_s:.3g} s of training again; every layer has a live copy"
    return Rejected("back to the checkpoint", chosen.cost_s + situation.redo_s, why)
