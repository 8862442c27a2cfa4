"""Policy ``bamboo``: every device also holds its successor's layers, and computes them when that one dies (Bamboo, NSDI'23).

Owns what follows a loss: nodes that stand by take the places of the dead, with copies of a stage and of its successor's; else
each predecessor goes on with the work of both (section 5). A pipeline that has lost two neighbours has a stage that no shadow
holds any more, so others compute it until the pipelines are instantiated anew as ``oobleck`` would, with shadows. The same where
a pipeline is gone whole, where what is left has no room for the work of two, and where more nodes are here than places.
"""

from __future__ import annotations

import msgspec

from planner.plan import Route, Template, node_of
from planner.policies.cases import listed
from planner.policies.grid import Grid, grid_of
from planner.policies.oobleck import Oobleck
from planner.policies.slipstream import PLACES_SHOWN, costs, filled, placed, rejected_anew, waiting_for
from planner.policy import REROUTING, ROLLING_BACK, Proposal, Rejected, Setup, Situation
from planner.schedule import format_ops
from planner.shadow import heir
from planner.shadowed import shadowed_templates


class Bamboo:
    """Redundant layers, and redundant forward passes in bubbles."""

    name = "bamboo"
    reroutes = name in REROUTING
    rolls_back = name in ROLLING_BACK

    def __init__(self) -> None:
        self.anew = Oobleck()

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for n0 .. n_max nodes, with room for shadows. Raises PlanError when no number of nodes fits."""
        return shadowed_templates(setup)

    def adapt(
        self,
        setup: Setup,
        templates: tuple[Template, ...],
        situation: Situation,
        sizes: tuple[int, ...] = (),
    ) -> Proposal:
        """The pipelines at work with as few vacant places as there can be, where shadows take over the others; else what ``oobleck``
        proposes with these templates.

        Raises PlanError when there are fewer than n0 nodes.
        """
        anew = self.anew.adapt(setup, templates, situation, sizes)
        grid = grid_of(setup, templates, situation)
        if grid is None:
            return anew
        waiting = waiting_for(grid, situation)
        if len(waiting) > len(grid.vacant):
            return anew
        chosen = filled(grid, waiting)
        if not chosen.whole:
            return anew
        if without := orphans(chosen):
            return _refusing(chosen, anew, f"no shadow of {listed(without)} is left")
        if chosen.vacant and not chosen.fits:
            return _refusing(chosen, anew, "no room for the work of two")
        return _proposal(situation, chosen, anew)


def orphans(grid: Grid) -> list[str]:
    """Nodes whose places are vacant, with a stage that nobody in their pipeline shadows."""
    plan, gone = grid.plan, frozenset(grid.plan.vacant)
    shadows = plan.living_shadows()
    found = [
        node_of(segment.device)
        for pipeline in plan.pipelines
        for segment in pipeline.segments
        if segment.device in gone
        and heir(Route(-1, 0, pipeline.segments), segment.layers, shadows, gone) is None
    ]
    return list(dict.fromkeys(found))


def _refusing(stay: Grid, anew: Proposal, why: str) -> Proposal:
    """``anew``, and why the pipelines do not stay as they are."""
    staying = Rejected(
        "stay with vacant places", stay.cost_s, f"{why}: {costs(stay)} over {stay.horizon_steps:.3g} steps"
    )
    return msgspec.structs.replace(anew, rejected=(*anew.rejected, staying))


def _proposal(situation: Situation, chosen: Grid, anew: Proposal) -> Proposal:
    reason = _reason(situation, chosen)
    plan = msgspec.structs.replace(chosen.plan, step_s=chosen.step_s, reason=reason)
    rejected = (rejected_anew(chosen, anew),) if chosen.vacant else ()
    ops = {device: format_ops(each) for device, each in chosen.ops.items()} if chosen.vacant else {}
    return Proposal(plan, chosen.transfers, chosen.cost_s, reason, rejected, ops)


def _reason(situation: Situation, grid: Grid) -> str:
    """One sentence: who takes whose place, who does whose work besides its own, what is copied, what can be lost."""
    parts = placed(situation, grid)
    names = [name for nodes in grid.named for name in nodes]
    vacant = list(grid.vacant)
    parts += [_taken_over(grid, slot, names[slot]) for slot in vacant[:PLACES_SHOWN]]
    if len(vacant) > PLACES_SHOWN:
        parts.append(f"{len(vacant) - PLACES_SHOWN} more places are vacant")
    return "; ".join([*(parts or ["keep: no pipeline changes"]), f"{costs(grid)}; can lose {grid.tolerance}"])


def _taken_over(grid: Grid, slot: int, name: str) -> str:
    """Who does the work of a node that is gone."""
    heirs = [taker for taker, _ in grid.takers(slot)]
    if not heirs:
        return f"{name} had no micro-batch"
    return f"{listed(heirs)}, which shadowed {name}, {'do' if len(heirs) > 1 else 'does'} its work too"
