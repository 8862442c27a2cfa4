"""Chooses who stands where in pipelines at work: nodes without a place fill vacant ones, live nodes move
where more is lost.

Owns the choice of places for policies whose pipelines stay. Whether they stay is the policy's; what a choice
makes is the ``grid``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from oobleckd.planner.placement.zones import exchanged
from oobleckd.planner.policies.grid import Grid
from oobleckd.planner.policy import Situation

_FASTER = 1 - 1e-9  # sums of the same times are rounded each for itself
_ROUNDED = 1 + 1e-12  # by so much a bound may seem above what it bounds
_DIGITS = 12  # of seconds, that are compared; the rest is rounding
_SAME_S = 10.0**-_DIGITS


def waiting_for(grid: Grid, situation: Situation) -> list[str]:
    """The nodes that may be used and have no place in ``grid``, in name order."""
    return sorted(set(situation.nodes) - set(grid.here.values()))


def stayed(grid: Grid, waiting: Sequence[str]) -> tuple[Grid, Grid | None] | None:
    """``grid`` with the nodes of ``waiting`` (at most as many as are vacant) in places, and live nodes moved
    where that pays; and the best move that does not. None where routes cannot go around what stays vacant.
    """
    taken = filled(grid, waiting)
    if not taken.whole:
        return None
    chosen, other = _normalised(taken)
    return None if chosen.vacant and not chosen.fits else (chosen, other)


def filled(grid: Grid, waiting: Sequence[str]) -> Grid:
    """Each node of ``waiting`` in a vacant place: where the busiest device then has least to do, of those
    where the fewest bytes are copied, and of those where fewest neighbours are in its zone; its own place
    before others that are as good.
    """
    for count, node in enumerate(waiting):
        # Zones decide last and only among what costs the same: a copy is paid at every fill, by all; a
        # neighbour in one zone costs something only if that zone is lost. (D-policies-012, D-policies-023)
        slots = sorted(grid.vacant, key=lambda slot: (grid.same_zone(slot, node), grid.name_at(slot) != node))
        if len(waiting) - count >= len(slots):
            options = [grid.with_moved(slots[0], node)]
        else:
            options = [grid.with_moved(slot, node) for slot in _kinds(grid, slots)]
        chosen = _least(options)
        assert chosen is not None, "a vacant place for each"
        grid = chosen
    return _apart(grid, waiting)


def _apart(grid: Grid, came: Sequence[str]) -> Grid:
    """``grid`` with nodes of ``came`` that hold the same exchanged, where fewer neighbours are in one zone
    then: who chose first may be in the only place that is good for another.
    """
    if not grid.zones:
        return grid
    rings = exchanged(grid.named, grid.zones, grid.holdings, came)
    names = [name for nodes in rings for name in nodes]
    here = {slot: names[slot] for slot in grid.here}
    return grid if here == grid.here else replace(grid, here=here)


def _least(options: Iterable[Grid], limit_s: float = inf) -> Grid | None:
    """The first of ``options`` with the least rank; None where nobody who is whole keeps its busiest device
    within ``limit_s``.

    Routes are nearly all of the work here, so none are chosen where a bound from below says enough: the
    lowest bounds go first.
    """
    numbered = list(enumerate(options))
    # Routes for fifty moves, and orders for two that nobody had room for, were most of a plan's time at 32
    # nodes. (D-policies-021)
    whole = sorted((option.min_busy_s, number) for number, option in numbered if option.whole)
    best: Grid | None = None
    least: tuple[bool, float, int, int] | None = None
    for bound_s, number in whole:
        if bound_s > limit_s * _ROUNDED:
            break
        option = numbered[number][1]
        rank = (*_rank(option), number)
        if least is None or rank < least:
            best, least = option, rank
            limit_s = min(limit_s, option.busiest_s + _SAME_S)
    return best or min((option for _, option in numbered if not option.whole), key=_rank, default=None)


def _rank(grid: Grid) -> tuple[bool, float, int]:
    """Less is better: something without a holder, the busiest device, bytes."""
    if not grid.whole:
        return True, -grid.copies, 0
    return False, round(grid.busiest_s, _DIGITS), sum(copy.num_bytes for copy in grid.transfers)


def _kinds(grid: Grid, slots: Iterable[int]) -> list[int]:
    """Of slots with the same layers, in pipelines that miss as many nodes, the first."""
    missing = [grid.homes[slot] for slot in grid.vacant]
    found: dict[object, int] = {}
    for slot in slots:
        found.setdefault((grid.slots[slot], missing.count(grid.homes[slot])), slot)
    return list(found.values())


def _normalised(grid: Grid) -> tuple[Grid, Grid | None]:
    """``grid`` with live nodes moved to vacant places for as long as that pays; and the best move that does
    not.

    One vacant place stays as it is: the loss of one node moves no layer. (Failure normalisation:
    SlipStream/ReCycle, SOSP'24.)
    """
    # One vacant place stays as it is: no copy, no stop. A move is weighed from two on. (D-policies-001)
    while len(grid.vacant) > 1:
        limit_s = grid.busiest_s * _FASTER
        better = _least(_moves(grid), limit_s)
        if better is None or better.busiest_s >= limit_s or not better.fits:
            return grid, None
        if grid.fits and better.cost_s >= grid.cost_s * _FASTER:
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
