"""Policy ``bamboo``: every device also holds its successor's layers, and computes them when that one dies
(Bamboo, NSDI'23).

Owns what follows a loss: nodes that stand by take the places of the dead, with copies of a stage and of its
successor's; else each predecessor goes on with the work of both (section 5). A pipeline that has lost two
neighbours has a stage that no redundant holder holds any more, so others compute it until the pipelines are
instantiated anew as ``oobleck`` would, with redundant layers. The same where a pipeline is gone whole, where
what is left has no room for the work of two, and where more nodes are here than places.
"""

from __future__ import annotations

import msgspec

from oobleckd.planner.plan import Route, Template, node_of
from oobleckd.planner.policies.cases import listed, phrase
from oobleckd.planner.policies.filling import filled, waiting_for
from oobleckd.planner.policies.grid import Grid
from oobleckd.planner.policies.oobleck import bytes_of, steps_of
from oobleckd.planner.policies.staying import Staying, costs, proposal_of, rejected_anew
from oobleckd.planner.policy import Action, Proposal, Rejected, RejectionCause, Setup, Situation
from oobleckd.planner.reroute.redundant import heir
from oobleckd.planner.templates.redundant import redundant_templates


class Bamboo(Staying):
    """Redundant layers, and redundant forward passes in bubbles."""

    name = "bamboo"

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for n0 .. n_max nodes, with room for redundant layers. Raises PlanError when no number of
        nodes fits.
        """
        return redundant_templates(setup)

    def choose(self, situation: Situation, grid: Grid, anew: Proposal) -> Proposal:
        """The pipelines at work with as few vacant places as there can be, where redundant holders take over
        the others; else what ``oobleck`` proposes with these templates.
        """
        waiting = waiting_for(grid, situation)
        if len(waiting) > len(grid.vacant):
            return anew
        chosen = filled(grid, waiting)
        if not chosen.whole:
            return anew
        # Bamboo's rule: two neighbours lost, instantiate anew; one, stay, whatever oobleck's plan would
        # save. (D-policies-011)
        if without := orphans(chosen):
            why = f"no redundant holder of {listed(without)} is left"
            return _refusing(chosen, anew, "no-redundant-holder", why)
        if chosen.vacant and not chosen.fits:
            return _refusing(chosen, anew, "no-room", "no room for the work of two")
        rejected = [rejected_anew(chosen, anew)] if chosen.vacant else []
        return proposal_of(situation, chosen, rejected, _taken_over)


def orphans(grid: Grid) -> list[str]:
    """Nodes whose places are vacant, with a stage that nobody else in their pipeline holds."""
    plan, gone = grid.plan, frozenset(grid.plan.vacant)
    redundant = plan.living_redundant()
    found = [
        node_of(segment.device)
        for pipeline in plan.pipelines
        for segment in pipeline.segments
        if segment.device in gone
        and heir(Route(-1, 0, pipeline.segments), segment.layers, redundant, gone) is None
    ]
    return list(dict.fromkeys(found))


def _refusing(stay: Grid, anew: Proposal, cause: RejectionCause, why: str) -> Proposal:
    """``anew``, and why the pipelines do not stay as they are."""
    staying = Rejected(
        "stay with vacant places", stay.cost_s, f"{why}: {costs(stay)} over {steps_of(stay.horizon_steps)}",
        "take-over", cause, step_s=stay.step_s, copied_bytes=bytes_of(stay.transfers),
        can_lose=stay.tolerance,
    )  # fmt: skip
    return msgspec.structs.replace(anew, rejected=(*anew.rejected, staying))


def _taken_over(grid: Grid, slot: int) -> tuple[Action, str]:
    """Who does the work of a node that is gone."""
    action = Action("take-over", tuple(taker for taker, _ in grid.takers(slot)), (grid.name_at(slot),))
    return action, phrase(action)
