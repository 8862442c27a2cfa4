"""Policy ``slipstream``: peers compute what a dead node would have (SlipStream/ReCycle, SOSP'24).

Owns what happens to the places of the dead: nodes without a place fill them, a live node moves to a stage
that lost more than others where that pays (failure normalisation), and the rest stay vacant, their
micro-batches re-routed. No layer moves otherwise. Where nothing can be re-routed (no pipeline at work yet,
one that is gone whole, a layer that no place holds, too little memory for routes that cross) and where more
nodes are here than places, it is ``oobleck`` that answers.
"""

from __future__ import annotations

from oobleckd.planner.policies.cases import phrase
from oobleckd.planner.policies.filling import stayed, waiting_for
from oobleckd.planner.policies.grid import Grid
from oobleckd.planner.policies.oobleck import bytes_of, steps_of
from oobleckd.planner.policies.staying import Staying, costs, placed, proposal_of, rejected_anew
from oobleckd.planner.policy import Action, Proposal, Rejected, Situation
from oobleckd.words import than


class SlipStream(Staying):
    """Re-routing to data-parallel peers."""

    name = "slipstream"

    def choose(self, situation: Situation, grid: Grid, anew: Proposal) -> Proposal:
        """The pipelines at work with as few vacant places as there can be; else what ``oobleck`` proposes."""
        waiting = waiting_for(grid, situation)
        if len(waiting) > len(grid.vacant):
            return anew
        found = stayed(grid, waiting)
        if found is None:
            return anew
        chosen, other = found
        # A loss moves nothing, also where a new plan would be faster: that is what the policy is. The other
        # plan is shown with its cost. (D-policies-001)
        rejected = [rejected_anew(chosen, anew)] if chosen.vacant else []
        if other is not None:
            rejected.append(_rejected_move(situation, chosen, other))
        return proposal_of(situation, chosen, rejected, around)


def around(grid: Grid, slot: int) -> tuple[Action, str]:
    """Whose micro-batches go to whom, and in words of which pipelines those are."""
    homes = dict(grid.takers(slot))
    action = Action("re-route", tuple(homes), (grid.name_at(slot),))
    return action, phrase(action, homes)


def _rejected_move(situation: Situation, chosen: Grid, other: Grid) -> Rejected:
    """A live node would stand where more is lost, and that does not pay."""
    over = steps_of(chosen.horizon_steps)
    why = f"{than(other.cost_s - chosen.cost_s)} over {over}: {costs(other)}"
    what = "; ".join(map(phrase, placed(situation, other)))
    return Rejected(
        what, other.cost_s, why, "re-route", "cost",
        step_s=other.step_s, copied_bytes=bytes_of(other.transfers), can_lose=other.tolerance,
    )  # fmt: skip
