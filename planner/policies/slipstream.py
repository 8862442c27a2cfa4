"""Policy ``slipstream``: peers compute what a dead node would have (SlipStream/ReCycle, SOSP'24).

Owns what happens to the places of the dead: nodes without a place fill them, a live node moves to a stage that
lost more than others where that pays (failure normalisation), and the rest stay vacant, their micro-batches
re-routed. No layer moves otherwise. Where nothing can be re-routed (no pipeline at work yet, one that is gone whole, a
layer that no place holds, too little memory for routes that cross) and where more nodes are here than places, it
is ``oobleck`` that answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from planner.plan import Template, node_of
from planner.policies.cases import listed
from planner.policies.grid import Grid, grid_of
from planner.policies.oobleck import Oobleck, size_of, sizes_of
from planner.policy import REROUTING, ROLLING_BACK, Proposal, Rejected, Setup, Situation
from planner.schedule import format_ops

PLACES_SHOWN = 3
_FASTER = 1 - 1e-9  # sums of the same times are rounded each for itself


class SlipStream:
    """Re-routing to data-parallel peers."""

    name = "slipstream"
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
        """The pipelines at work with as few vacant places as there can be; else what ``oobleck`` proposes.

        Raises PlanError when there are fewer than n0 nodes.
        """
        anew = self.anew.adapt(setup, templates, situation, sizes)
        grid = grid_of(setup, templates, situation)
        if grid is None:
            return anew
        waiting = waiting_for(grid, situation)
        if len(waiting) > len(grid.vacant):
            return anew
        found = stayed(grid, waiting)
        if found is None:
            return anew
        chosen, other = found
        rejected = [rejected_anew(chosen, anew)] if chosen.vacant else []
        if other is not None:
            rejected.append(_rejected_move(situation, chosen, other))
        return proposal_of(situation, chosen, rejected)


# ---------------------------------------------------------------------- who stands where


def waiting_for(grid: Grid, situation: Situation) -> list[str]:
    """The nodes that may be used and have no place in ``grid``, in name order."""
    return sorted(set(situation.nodes) - set(grid.here.values()))


def stayed(grid: Grid, waiting: Sequence[str]) -> tuple[Grid, Grid | None] | None:
    """``grid`` with the nodes of ``waiting`` (at most as many as are vacant) in places, and live nodes moved where that pays; and
    the best move that does not. None where routes cannot go around what stays vacant.
    """
    taken = filled(grid, waiting)
    if not taken.whole:
        return None
    chosen, other = _normalised(taken)
    return None if chosen.vacant and not chosen.fits else (chosen, other)


def filled(grid: Grid, waiting: Sequence[str]) -> Grid:
    """Each node of ``waiting`` in a vacant place: where the busiest device then has least to do, and of those
    where the fewest bytes are copied.
    """
    for count, node in enumerate(waiting):
        if len(waiting) - count >= len(grid.vacant):
            options = [grid.with_moved(grid.vacant[0], node)]
        else:
            options = [grid.with_moved(slot, node) for slot in _kinds(grid, grid.vacant)]
        grid = min(options, key=_rank)
    return grid


def _rank(grid: Grid) -> tuple[bool, float, int]:
    """Less is better: something without a holder, the busiest device, bytes."""
    if not grid.whole:
        return True, -grid.copies, 0
    return False, round(grid.busiest_s, 12), sum(copy.num_bytes for copy in grid.transfers)


def _kinds(grid: Grid, slots: Iterable[int]) -> list[int]:
    """Of slots with the same layers, in pipelines that miss as many nodes, the first."""
    missing = [grid.homes[slot] for slot in grid.vacant]
    found: dict[object, int] = {}
    for slot in slots:
        found.setdefault((grid.slots[slot], missing.count(grid.homes[slot])), slot)
    return list(found.values())


def _normalised(grid: Grid) -> tuple[Grid, Grid | None]:
    """``grid`` with live nodes moved to vacant places for as long as that pays; and the best move that does not.

    One vacant place stays as it is: the loss of one node moves no layer.
    """
    while len(grid.vacant) > 1:
        better = min(_moves(grid), key=_rank, default=None)
        if better is None or better.busiest_s >= grid.busiest_s * _FASTER:
            return grid, None
        if better.cost_s >= grid.cost_s * _FASTER:
            return grid, better
        grid = better
    return grid, None


def _moves(grid: Grid) -> Iterator[Grid]:
    """Every move of a node to a vacant place that loses no layer and leaves as many copies."""
    for slot in _kinds(grid, grid.vacant):
        for origin in _kinds(grid, grid.here):
            if grid.slots[origin] != grid.slots[slot]:
                moved = grid.with_moved(slot, grid.here[origin])
                if moved.whole and moved.copies >= grid.copies:
                    yield moved


# ---------------------------------------------------------------------- what is said of it


def proposal_of(situation: Situation, chosen: Grid, rejected: Iterable[Rejected]) -> Proposal:
    """The plan of ``chosen``. Nodes of the situation that have no place in it are idle."""
    reason = _reason(situation, chosen)
    idle = tuple(waiting_for(chosen, situation))
    plan = msgspec.structs.replace(chosen.plan, idle=idle, step_s=chosen.step_s, reason=reason)
    ops = {device: format_ops(each) for device, each in chosen.ops.items()} if chosen.vacant else {}
    return Proposal(plan, chosen.transfers, chosen.cost_s, reason, tuple(rejected), ops)


def rejected_anew(chosen: Grid, anew: Proposal) -> Rejected:
    """The plan on all nodes that ``oobleck`` would make, cheaper or not: this policy does not move layers."""
    extra_s = anew.cost_s - chosen.cost_s
    than = "more" if extra_s >= 0 else "less"
    copies = f"copies {size_of(anew.transfers)}" if anew.transfers else "copies nothing"
    over = f"{chosen.horizon_steps:.3g} steps"
    why = f"{abs(extra_s):.3g} s {than} over {over}: {copies}, step {anew.plan.step_s:.3g} s"
    return Rejected(f"re-instantiate: pipelines of {sizes_of(anew.plan)} nodes", anew.cost_s, why)


def _rejected_move(situation: Situation, chosen: Grid, other: Grid) -> Rejected:
    """A live node would stand where more is lost, and that does not pay."""
    over = f"{chosen.horizon_steps:.3g} steps"
    why = f"{other.cost_s - chosen.cost_s:.3g} s more over {over}: {costs(other)}"
    return Rejected("; ".join(placed(situation, other)), other.cost_s, why)


def _reason(situation: Situation, grid: Grid) -> str:
    """One sentence: who takes whose place, whose micro-batches go to whom, what is copied, what can be lost."""
    parts = placed(situation, grid)
    vacant = list(grid.vacant)
    parts += [_around(grid, slot) for slot in vacant[:PLACES_SHOWN]]
    if len(vacant) > PLACES_SHOWN:
        parts.append(f"{len(vacant) - PLACES_SHOWN} more places are vacant")
    return "; ".join([*(parts or ["keep: no pipeline changes"]), f"{costs(grid)}; can lose {grid.tolerance}"])


def costs(grid: Grid) -> str:
    """What is copied, and the step, for a sentence."""
    copies = f"copies {size_of(grid.transfers)}, " if grid.transfers else ""
    return f"{copies}step {grid.step_s:.3g} s as modelled"


def placed(situation: Situation, grid: Grid) -> list[str]:
    """Who stands where somebody else did, and who gets back what it held."""
    before = [name for nodes in situation.running for name in nodes]
    parts = []
    for slot, name in sorted(grid.here.items()):
        if name not in before:
            parts.append(f"{name} takes {before[slot]}'s place")
        elif before[slot] != name:
            parts.append(f"{name} moves to {before[slot]}'s place, where more is lost")
    back = {node_of(copy.target) for copy in grid.transfers} & {
        name for slot, name in grid.here.items() if before[slot] == name
    }
    return [
        *parts,
        *(
            [f"{listed(sorted(back))} {'get' if len(back) > 1 else 'gets'} back what was held"]
            if back
            else []
        ),
    ]


def _around(grid: Grid, slot: int) -> str:
    """Whose micro-batches go to whom."""
    names = [name for nodes in grid.named for name in nodes]
    takers = [f"{name} (pipeline {index})" for name, index in grid.takers(slot)]
    if not takers:
        return f"{names[slot]} had no micro-batch"
    return f"{names[slot]}'s micro-batches go to {listed(takers)}"
