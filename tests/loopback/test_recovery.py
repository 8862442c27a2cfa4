"""The two promises on a real cluster: kills in every phase of a step, and kill -9 of the daemon.

``make chaos-matrix`` runs every cell and ``make chaos`` random ones; here is a subset in which every pair of
(phase, victim, number of deaths, policy, form of the pipeline, update) still occurs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.chaos import daemon_seed, random_seed
from tests.helpers.cluster import Cluster
from tests.helpers.manners import Manner
from tests.helpers.matrix import NODES, Cell, every_cell, pairwise, run_cell


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("recovery"), NODES) as running:
        yield running


@pytest.mark.parametrize("cell", pairwise(every_cell()), ids=lambda cell: cell.name)
def test_kill_matrix(cluster: Cluster, cell: Cell) -> None:
    cluster.heal()
    run_cell(cluster, cell)


@pytest.mark.parametrize("seed", range(4))
def test_random_kills(cluster: Cluster, seed: int) -> None:
    random_seed(cluster, seed)


@pytest.mark.parametrize(
    ("seed", "with_node", "manner"),
    [
        (0, False, Manner()),
        (2, True, Manner(backward="decoupled", update="staggered")),
        (3, True, Manner("slipstream", "decoupled", chunks=2)),
    ],
)
def test_daemon_killed(cluster: Cluster, seed: int, with_node: bool, manner: Manner) -> None:
    daemon_seed(cluster, seed, with_node=with_node, manner=manner)
