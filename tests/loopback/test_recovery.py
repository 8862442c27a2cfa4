"""The two promises on a real cluster: kills in every phase of a step, and kill -9 of the daemon.

``make chaos-matrix`` runs every cell and ``make chaos`` random ones; here is a subset in which every pair of
(phase, victim, number of deaths, policy) still occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from oobleckd.protocol.job import PolicyName
from tests.helpers.chaos import daemon_seed, random_seed
from tests.helpers.cluster import Cluster
from tests.helpers.matrix import NODES, Cell, all_cells, pairwise, run_cell


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("recovery"), NODES) as running:
        yield running


@pytest.mark.parametrize("cell", pairwise(all_cells()), ids=lambda cell: cell.name)
def test_kill_matrix(cluster: Cluster, cell: Cell) -> None:
    cluster.heal()
    run_cell(cluster, cell)


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("seed", range(2))
def test_random_kills(cluster: Cluster, seed: int, policy: PolicyName) -> None:
    random_seed(cluster, seed, policy=policy)


@pytest.mark.parametrize(
    ("seed", "with_node", "policy"), [(0, False, "oobleck"), (2, True, "oobleck"), (3, True, "slipstream")]
)
def test_daemon_killed(cluster: Cluster, seed: int, with_node: bool, policy: PolicyName) -> None:
    daemon_seed(cluster, seed, with_node=with_node, policy=policy)
