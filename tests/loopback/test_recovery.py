"""The two promises on a real cluster: kills in every phase of a step, and kill -9 of the daemon.

``make chaos-matrix`` runs every cell and ``make chaos`` random ones; here is a subset in which every pair of
(phase, victim, number of deaths, policy, form of the pipeline, update) still occurs, and
each death while copies are made beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oobleckd.protocol.api import IncidentView
from tests.helpers.chaos import daemon_seed, random_seed
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import Manner
from tests.helpers.matrix import NODES, Cell, every_cell, pairwise, run_cell, some_preparing_cells


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("recovery"), NODES) as running:
        yield running


@pytest.mark.parametrize(
    "cell", [*pairwise(every_cell()), *some_preparing_cells()], ids=lambda cell: cell.name
)
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
        (4, True, Manner("bamboo", "decoupled")),
    ],
)
def test_daemon_killed(cluster: Cluster, seed: int, with_node: bool, manner: Manner) -> None:
    daemon_seed(cluster, seed, with_node=with_node, manner=manner)


@pytest.mark.parametrize(
    "manner",
    [Manner("slipstream"), Manner("slipstream", backward="decoupled", update="staggered")],
    ids=lambda manner: manner.name,
)
def test_an_order_follows_a_loss(cluster: Cluster, manner: Manner) -> None:
    """Two pipelines of three: one device then has twice the work, and the planner an order for all five."""
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    tables = manner.tables() | {"resources": {"min_pipeline_nodes": 3, "device_memory": 0}}
    train = {"steps": 60, "global_batch": 16, "micro_batch": 1}
    job = cluster.client.submit(tiny_job(f"ordered-{manner.name}", train=train, **tables)).id
    before = cluster.at_step(job, 3)
    victim = before.pipelines[0].nodes[1]
    cluster.kill(victim, "sigkill")

    def recovered() -> IncidentView | None:
        mine = [incident for incident in cluster.client.incidents() if incident.job == job]
        return mine[0] if mine and not mine[0].open else None

    phases = [phase.phase for phase in cluster.until(recovered, "the recovery").phases]
    assert phases[-2:] == ["copy", "resume"]  # of nothing but orders
    view = cluster.client.job(job)
    assert [p.nodes for p in view.pipelines] == [p.nodes for p in before.pipelines]
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    cluster.verify(job)
