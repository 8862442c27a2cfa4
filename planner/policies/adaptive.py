"""Policy ``adaptive``: at each change whichever way costs least until the next loss is expected.

Owns the choice between what the others propose: go on as it is, micro-batches of vacant places re-routed
(``slipstream``); let nodes without a place fill them; re-instantiate (``oobleck``); either of these with
copies made while training goes on; roll back to the checkpoint. The same choice serves losses, joins and
drains: is the gain worth the switch? Plans, copies and routes are theirs.

What is weighed, in seconds until the next loss is expected: the steps as modelled, the copies, the stop at a
boundary, and what that loss would cost if it takes the last copy of a layer. But first of all the promise is
kept: where one of the ways leaves ``f`` losses that can be survived, none that leaves fewer is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from oobleckd.planner.placement.precopy import counts, has_room, hidden_s, lost_s, precopy_s, still_share
from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Plan, node_of
from oobleckd.planner.policies.filling import stayed, waiting_for
from oobleckd.planner.policies.grid import Grid, at_work, needed_bytes
from oobleckd.planner.policies.oobleck import bytes_of, nodes_of, size_of, steps_of
from oobleckd.planner.policies.slipstream import around
from oobleckd.planner.policies.staying import Staying, proposal_of
from oobleckd.planner.policy import Proposal, Rejected, Setup, Situation, Way
from oobleckd.words import seconds, than

# It was a step: steps of 10 s and more made a switch look that dear, and the job stayed longer than it
# should on a slower plan. (D-policies-020)
STOP_S = 0.1
"""Until all agree on a new layout, as in the simulator's costs (``deploy_s``); at most a step, where steps
are short.
"""


_WORDS: dict[Way, str] = {
    "re-instantiate": "re-instantiate", "fill": "fill vacant places", "re-route": "re-route and stay",
    "stay": "stay",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Weighed:
    """``proposal`` and which ``way`` it is; ``cost_s`` until the next loss, of which ``risk_s`` for what that
    may take along.
    """

    way: Way
    proposal: Proposal
    cost_s: float
    risk_s: float
    tolerance: int

    @property
    def what(self) -> str:
        """Its name for people."""
        return f"{'pre-copy, then ' if self.proposal.precopy_s > 0 else ''}{_WORDS[self.way]}"

    def rank(self, f: int) -> tuple[int, float]:
        """Less is better: the promise first; then the cost, to the nanosecond. The first of equals is the one
        that does least.
        """
        # Seconds and "can still lose k" have no common unit, and f is what the user asked for: the promise
        # comes before the cost. (D-policies-015)
        return -min(self.tolerance, f), round(self.cost_s, 9)


class Adaptive(Staying):
    """The cheapest of the others' ways."""

    name = "adaptive"

    def choose(self, situation: Situation, grid: Grid, anew: Proposal) -> Proposal:
        """The way of least modelled cost until the next loss is expected; the others with their costs, as
        rejected.
        """
        f, now = grid.setup.f, at_work(grid, situation)
        whole = _weighed("re-instantiate", grid.setup, situation, anew, stops=True)
        again = _begun(whole, now, situation)
        ways, dearer = [], []
        for way, stays, stops in _staying(situation, grid, now):
            # Orders for going around the dead were three quarters of the time at 32 nodes, where
            # re-instantiating nearly always won. The plans are the same. (D-policies-022)
            if _is_dearer(stays, again, f):
                dearer.append(_rejected_by_bound(way, stays, again))
                continue
            proposal = proposal_of(situation, stays, (), around)
            ways.append(_begun(_weighed(way, grid.setup, situation, proposal, stops=stops), now, situation))
        # A choice among what other policies propose: plans of its own would have to be proved again.
        # (D-policies-014)
        ways.append(again)
        ways += [found for each in ways if (found := _precopied(each, now, situation)) is not None]
        chosen = min(ways, key=lambda each: each.rank(f))
        others = sorted((each for each in ways if each is not chosen), key=lambda each: each.rank(f))
        rejected = [_rejected(each, chosen, situation, f) for each in others] + dearer
        if situation.redo_s >= 0:
            rejected.append(_back(situation, chosen))
        if chosen.proposal.plan is anew.plan:
            rejected += anew.rejected
        return _proposal(chosen, situation, rejected)


def _staying(situation: Situation, grid: Grid, now: Grid) -> Iterator[tuple[Way, Grid, bool]]:
    """The pipelines at work as they are, with whoever came back in its place, and with the nodes that wait in
    the others that are vacant; and whether all have to stop for that.
    """
    waiting = waiting_for(grid, situation)
    working = tuple(now.here[slot] for slot in sorted(now.here))
    for count in sorted({0, min(len(waiting), len(grid.vacant))}):
        found = stayed(grid, waiting[:count])
        if found is None:
            continue
        chosen, _ = found
        fills = count or not grid.here.keys() <= now.here.keys()
        way: Way = "fill" if fills else "re-route" if chosen.vacant else "stay"
        yield way, chosen, bool(chosen.transfers) or chosen.plan.nodes() != working


def _is_dearer(chosen: Grid, again: _Weighed, f: int) -> bool:
    """Whether ``again`` is better whatever the order in which ``chosen`` would be run, so that none need be
    sought.
    """
    return _min_cost_s(chosen) > again.cost_s and min(chosen.tolerance, f) <= min(again.tolerance, f)


def _min_cost_s(chosen: Grid) -> float:
    """What ``chosen`` costs at least: pre-copies that are made as far as can be, and the steps."""
    copies_s = copy_s(chosen.transfers, chosen.setup.profile)
    return still_share(chosen.setup.profile) * copies_s + chosen.horizon_steps * chosen.min_s


def _begun(found: _Weighed, now: Grid, situation: Situation) -> _Weighed:
    """``found`` with its copies begun in the step under way, where that is worth it."""
    copies, setup = found.proposal.transfers, now.setup
    copies_s = copy_s(copies, setup.profile)
    # How long that step is matters little here, and who cannot go on has none of its own.
    step_s = found.proposal.plan.step_s
    if not (copies and counts(copies_s, step_s) and has_room(setup, needed_bytes(now), situation, copies)):
        return found
    # A step that mends a loss has time for copies whoever can go on after it. Weights do not change within
    # a round, so they begin in this one. (D-precopy-010, D-precopy-011)
    cost_s = found.cost_s - hidden_s(setup.profile, copies_s, step_s)
    return replace(found, proposal=msgspec.structs.replace(found.proposal, at_once=True), cost_s=cost_s)


def _precopied(found: _Weighed, now: Grid, situation: Situation) -> _Weighed | None:
    """``found`` with its copies waited for while the job goes on as it does ``now``; None where that does not
    pay, or it cannot go on.

    In place of what the copies take in the stop it costs what steps take longer until then. Where the next
    loss is expected before that, it is no way.
    """
    copies, new_s = found.proposal.transfers, found.proposal.plan.step_s
    if not (copies and now.goes_on):
        return None
    profile = now.setup.profile
    copies_s = copy_s(copies, profile)
    saved_s = (1 - still_share(profile)) * copies_s
    saved_s -= hidden_s(profile, copies_s, new_s) if found.proposal.at_once else 0.0
    if lost_s(copies_s, now.min_s, new_s) >= saved_s:
        return None  # and they take longer than on an idle link, in steps that may be longer
    step_s = now.step_s
    wait_s = precopy_s(now.setup, lambda: now.needed_bytes, situation, copies, step_s)
    if not 0 < wait_s < situation.horizon_steps * step_s:
        return None
    cost_s = found.cost_s - saved_s + lost_s(wait_s, step_s, new_s)
    proposal = msgspec.structs.replace(found.proposal, precopy_s=wait_s)
    return replace(found, proposal=proposal, cost_s=cost_s)


def _weighed(way: Way, setup: Setup, situation: Situation, proposal: Proposal, *, stops: bool) -> _Weighed:
    plan = proposal.plan
    copies, sole = _copies(plan)
    risk_s = max(0.0, situation.redo_s) * sole / max(1, len(plan.nodes()))
    cost_s = proposal.cost_s + (stop_s(setup, plan) if stops else 0.0) + risk_s
    return _Weighed(way, proposal, cost_s, risk_s, copies - 1)


def stop_s(setup: Setup, plan: Plan) -> float:
    """Seconds that the deployment of ``plan`` takes besides its copies. Steps of staggered updates overlap,
    so pipelines run empty and fill again; flushed ones do so in every step.
    """
    shares = [(len(p.segments) - 1) / len(p.micro_batches) for p in plan.pipelines if p.micro_batches]
    # Flushed pipelines run empty at every boundary, stop or not; staggered ones only where they stop.
    # (D-policies-020)
    filling = max(shares, default=0.0) if setup.staggered else 0.0
    return min(STOP_S, plan.step_s) + filling * plan.step_s


def _copies(plan: Plan) -> tuple[int, int]:
    """How many nodes hold the layer that fewest hold; and how many nodes are the last holder of
    some layer.
    """
    holders: dict[int, set[str]] = {}
    for device, layers in plan.holdings().items():
        for layer in layers.layers():
            holders.setdefault(layer, set()).add(node_of(device))
    counts = Counter(len(nodes) for nodes in holders.values())
    last = {min(nodes) for nodes in holders.values() if len(nodes) == 1}
    return min(counts, default=0), len(last)


# ---------------------------------------------------------------------- what is said of it


def _proposal(chosen: _Weighed, situation: Situation, rejected: list[Rejected]) -> Proposal:
    reason = f"{chosen.what}: {chosen.proposal.reason}; weighed over {steps_of(situation.horizon_steps)}"
    plan = msgspec.structs.replace(chosen.proposal.plan, reason=reason)
    return msgspec.structs.replace(
        chosen.proposal,
        plan=plan,
        cost_s=chosen.cost_s,
        reason=reason,
        rejected=tuple(rejected),
        precopy_s=max(0.0, chosen.proposal.precopy_s),
        way=chosen.way,
        summary=f"{chosen.what}: {chosen.proposal.summary}" if chosen.proposal.summary else "",
    )


def _rejected_by_bound(way: Way, chosen: Grid, again: _Weighed) -> Rejected:
    min_s, over = _min_cost_s(chosen), steps_of(chosen.horizon_steps)
    copies = f"copies {size_of(chosen.transfers)}, " if chosen.transfers else ""
    why = f"{than(min_s - again.cost_s)} over {over} at least; {copies}step {seconds(chosen.min_s)} or longer"
    return Rejected(
        _WORDS[way], min_s, why, way, "cost", at_least=True,
        step_s=chosen.min_s, copied_bytes=bytes_of(chosen.transfers), can_lose=chosen.tolerance,
    )  # fmt: skip


def _rejected(other: _Weighed, chosen: _Weighed, situation: Situation, f: int) -> Rejected:
    plan, extra_s = other.proposal.plan, round(other.cost_s - chosen.cost_s, 9)
    parts = [f"{than(extra_s)} over {steps_of(situation.horizon_steps)}"]
    copies = f"copies {size_of(other.proposal.transfers)}, " if other.proposal.transfers else ""
    wait_s = other.proposal.precopy_s
    while_s = f"for {seconds(wait_s)} while it trains, " if wait_s > 0 else ""
    parts.append(f"{copies}{while_s}step {seconds(plan.step_s)}")
    if other.risk_s:
        parts.append(f"{seconds(other.risk_s)} of it for a last copy that the next loss may take")
    fewer = min(other.tolerance, f) < min(chosen.tolerance, f)
    if fewer:
        parts.append(f"could lose {other.tolerance}, and f = {f}")
    anew = f": pipelines of {nodes_of(plan)}" if other.way == "re-instantiate" else ""
    return Rejected(
        f"{other.what}{anew}", other.cost_s, "; ".join(parts), other.way, "can-lose" if fewer else "cost",
        step_s=plan.step_s, copied_bytes=bytes_of(other.proposal.transfers), precopy_s=max(0.0, wait_s),
        risk_s=other.risk_s, can_lose=other.tolerance,
    )  # fmt: skip


def _back(situation: Situation, chosen: _Weighed) -> Rejected:
    """What a system without live copies would do."""
    why = f"{seconds(situation.redo_s)} of training again; every layer has a live copy"
    return Rejected("rollback", chosen.cost_s + situation.redo_s, why, "rollback", "cost")
