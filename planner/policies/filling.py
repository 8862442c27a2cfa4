"""Who stands where in pipelines at work: nodes without a place fill vacant ones, live nodes move where more is lost.

Owns the choice of places for policies whose pipelines stay. Whether they stay is the policy's; what a choice makes is the ``grid``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.policies.grid import Grid
from planner.policy import Situation

_FASTER = 1 - 1e-9  # sums of the same times are rounded each for itself


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
    where the fewest bytes are copied; its own place before others that are as good.
    """
    for count, node in enumerate(waiting):
        slots = sorted(grid.vacant, key=lambda slot: grid.name_at(slot) != node)
        if len(waiting) - count >= len(slots):
            options = [grid.with_moved(slots[0], node)]
        else:
            options = [grid.with_moved(slot, node) for slot in _kinds(grid, slots)]
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

    One vacant place stays as it is: the loss of one node moves no layer. (Failure normalisation: SlipStream/ReCycle, SOSP'24.)
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
