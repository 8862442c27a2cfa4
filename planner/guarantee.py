"""The guarantee in numbers: which template sizes make every number of nodes usable.

Owns the five statements about consecutive sizes n0 .. n_max (proved in docs/, checked against brute
force in the tests). Owns no plan. ``r`` is the number of pipelines asked for, ``f`` the losses to
survive, so a plan wants r = f + 1.
"""

from __future__ import annotations


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
    many pipelines as ``most_pipelines`` says.
    """
    return min(num_nodes, 2 * n0 - 1)


def n_max(n0: int, f: int, num_nodes: int, num_layers: int) -> int:
    """The largest size to plan ahead: enough for statements 2 and 3, and every size that a plan of
    f + 1 pipelines can hold, as far as there are layers for it (statement 4).
    """
    wanted = max(n0, n_max_down_to_n0(n0, num_nodes), largest_useful(n0, f, num_nodes))
    return min(wanted, num_layers)


def most_pipelines(num_nodes: int, n0: int, f: int) -> int:
    """How many pipelines a plan on ``num_nodes`` nodes promises: f + 1, or what n0 leaves of it."""
    return min(f + 1, num_nodes // n0)


def most_usable(num_nodes: int, n0: int, n_max: int) -> int:
    """Statement 4: how many of ``num_nodes`` nodes can be used; fewer than all only where layers bound
    n_max below 2*n0 - 1. 0 below n0.
    """
    return min(num_nodes, num_nodes // n0 * n_max)


def losses_survived(num_pipelines: int) -> int:
    """Statement 5: any so many losses leave the state whole, counted since the last completed copy."""
    return num_pipelines - 1
