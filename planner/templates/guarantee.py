"""Puts the guarantee into numbers: which template sizes make every number of nodes usable.

Owns the five statements about consecutive sizes n0 .. n_max (proved in docs/guarantee.md, checked
against brute force in the tests). Owns no plan. ``r`` is the number of pipelines asked for, ``f`` the
losses to survive, so a plan wants r = f + 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from oobleckd.planner.plan import Layers


def usable(num_nodes: int, n0: int, n_max: int, r: int) -> bool:
    """Statement 1: whether ``num_nodes`` split exactly into at least ``r`` sizes of n0 .. n_max."""
    return max(r, -(-num_nodes // n_max)) <= num_nodes // n0


def n_max_for_f(n0: int, f: int, num_nodes: int) -> int:
    """Statement 2: the smallest n_max with which all of (f+1)*n0 .. ``num_nodes`` nodes are usable
    with f + 1 pipelines. ``num_nodes`` >= (f+1)*n0.
    """
    return -(-min(num_nodes, (f + 2) * n0 - 1) // (f + 1))


def largest_useful(n0: int, f: int, num_nodes: int) -> int:
    """Statement 2: the largest size that a plan of f + 1 pipelines on ``num_nodes`` nodes can hold."""
    return num_nodes - f * n0


def n_max_down_to_n0(n0: int, num_nodes: int) -> int:
    """Statement 3: the smallest n_max with which all of n0 .. ``num_nodes`` nodes are usable, with as
    many pipelines as ``max_pipelines`` says.
    """
    return min(num_nodes, 2 * n0 - 1)


def n_max(n0: int, f: int, num_nodes: int, num_layers: int) -> int:
    """The largest size to plan ahead: enough for statements 2 and 3, and every size that a plan of
    f + 1 pipelines can hold, as far as there are layers for it (statement 4).
    """
    wanted = max(n0, n_max_down_to_n0(n0, num_nodes), largest_useful(n0, f, num_nodes))
    return min(wanted, num_layers)


def max_pipelines(num_nodes: int, n0: int, f: int) -> int:
    """How many pipelines a plan on ``num_nodes`` nodes promises: f + 1, or what n0 leaves of it."""
    return min(f + 1, num_nodes // n0)


def max_usable(num_nodes: int, n0: int, n_max: int) -> int:
    """Statement 4: how many of ``num_nodes`` nodes can be used; fewer than all only where layers bound
    n_max below 2*n0 - 1. 0 below n0.
    """
    return min(num_nodes, num_nodes // n0 * n_max)


def idle_ranges(num_nodes: int, n0: int, n_max: int) -> tuple[range, ...]:
    """Statement 4: the numbers of nodes of n0 .. ``num_nodes`` at which some must idle, ascending.

    Between what k pipelines can use at most and k + 1 at least; none once n_max * k >= (k + 1) * n0 - 1.
    """
    gaps = []
    pipelines = 1
    while pipelines * n_max + 1 < (pipelines + 1) * n0 and pipelines * n_max < num_nodes:
        gaps.append(range(pipelines * n_max + 1, min((pipelines + 1) * n0, num_nodes + 1)))
        pipelines += 1
    return tuple(gaps)


def losses_survived(num_pipelines: int) -> int:
    """Statement 5: any so many losses leave the state whole, counted since the last completed copy."""
    return num_pipelines - 1


def lost_layers(held: Iterable[Layers], num_layers: int) -> tuple[int, ...]:
    """The layers of which no live device holds a copy; ``held``: what each live device holds."""
    alive = set(held)
    return tuple(layer for layer in range(num_layers) if not any(layer in layers for layers in alive))


def can_replan(num_nodes: int, n0: int, held: Iterable[Layers], num_layers: int) -> bool:
    """Whether a new plan loses nothing: exactly when every layer has a holder and n0 nodes are left.

    n0 nodes always make a plan (statement 1 with r = 1, statement 4), and what a place lacks a holder
    copies to it.
    """
    return num_nodes >= n0 and not lost_layers(held, num_layers)


class Guarantee(msgspec.Struct, frozen=True):
    """What a job on so many nodes is promised. ``num_pipelines``: at least so many copies of every layer.

    ``can_lose``: any so many nodes at once cost no state. ``full_down_to``: as many pipelines as were
    asked for, down to so many nodes. ``waits_below``: fewer nodes hold no plan. ``idle``: numbers of
    nodes down to there of which not all can be used.
    """

    num_pipelines: int
    can_lose: int
    full_down_to: int
    waits_below: int
    idle: tuple[range, ...]


def guarantee(num_nodes: int, n0: int, n_max: int, f: int) -> Guarantee:
    """The guarantee for ``num_nodes`` >= n0 nodes and templates of n0 .. n_max nodes."""
    pipelines = max_pipelines(num_nodes, n0, f)
    return Guarantee(
        num_pipelines=pipelines,
        can_lose=losses_survived(pipelines),
        full_down_to=(f + 1) * n0,
        waits_below=n0,
        idle=idle_ranges(num_nodes, n0, n_max),
    )
