"""The two promises on a real cluster: kills in every phase of a step, and kill -9 of the daemon.

``make chaos-matrix`` runs every cell and ``make chaos`` random ones; here is a subset in which every pair of
(phase, victim, number of deaths, policy, form of the pipeline, update) still occurs, and
each death while pre-copies are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.incidentviews import IncidentView
from tests.helpers.chaos import daemon_seed, random_seed
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import Manner
from tests.helpers.matrix import (
    NODES,
    Cell,
    drain,
    eval_cells,
    every_cell,
    pairwise,
    run_cell,
    some_precopy_cells,
    undrain,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("recovery"), NODES) as running:
        yield running


@pytest.mark.parametrize("cell", [*pairwise(every_cell()), *some_precopy_cells()], ids=lambda cell: cell.name)
def test_kill_matrix(cluster: Cluster, cell: Cell) -> None:
    cluster.heal()
    run_cell(cluster, cell)


def some_eval_cells() -> Iterator[object]:
    """One for ``make test``."""
    for cell in eval_cells():
        usual = (cell.phase, cell.victim, cell.manner.policy) == ("reduced", "last", "oobleck")
        yield pytest.param(cell, id=cell.name, marks=[] if usual else [pytest.mark.slow])


@pytest.mark.parametrize("cell", [*some_eval_cells()])
def test_kills_in_an_evaluation(cluster: Cluster, cell: Cell) -> None:
    cluster.heal()
    run_cell(cluster, cell)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_random_kills(cluster: Cluster, seed: int) -> None:
    random_seed(cluster, seed)


@pytest.mark.parametrize(
    ("seed", "with_node", "manner"),
    [
        (0, False, Manner()),
        pytest.param(2, True, Manner(backward="decoupled", update="staggered"), marks=pytest.mark.slow),
        (3, True, Manner("slipstream", "decoupled", chunks=2)),
        pytest.param(4, True, Manner("bamboo", "decoupled"), marks=pytest.mark.slow),
    ],
)
def test_daemon_killed(cluster: Cluster, seed: int, with_node: bool, manner: Manner) -> None:
    daemon_seed(cluster, seed, with_node=with_node, manner=manner)


@pytest.mark.parametrize(
    "manner",
    [
        pytest.param(Manner("slipstream"), marks=pytest.mark.slow),
        Manner("slipstream", backward="decoupled", update="staggered"),
    ],
    ids=lambda manner: manner.name,
)
def test_an_order_follows_a_loss(cluster: Cluster, manner: Manner) -> None:
    """Two pipelines of three: one device then has twice the work, and the planner an order for all five."""
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    tables = manner.tables() | {"resources": {"min_pipeline_nodes": 3, "device_memory": 0}}
    train = {"steps": 18, "global_batch": 16, "micro_batch": 1}
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


def test_copies_begin_in_the_step_that_is_mended(cluster: Cluster) -> None:
    """Pipelines of two and three: without one of the two a stage has one copy left, so layers must move. As
    the planner is told, that takes many steps: nobody waits for it, and what was sent by the end of the step
    is not sent in the stop.
    """
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    guest = max(node.name for node in cluster.client.nodes())
    drain(cluster, guest)
    config = {"n_layer": 6, "n_embd": 128, "n_head": 4, "n_positions": 32, "vocab_size": 256}
    tables = {
        "model": {"config": config | {"bos_token_id": 0, "eos_token_id": 0}},
        "fault_tolerance": {"policy": "adaptive"},
        "train": {"steps": 25, "global_batch": 8, "micro_batch": 1, "sequence": 8},
        "resources": {"device_memory": 0, "min_pipeline_nodes": 2, "link": 1_000_000},
    }
    job = cluster.client.submit(tiny_job("at-once", **tables)).id
    view = cluster.at_step(job, 3)
    (short,) = [pipeline.nodes for pipeline in view.pipelines if len(pipeline.nodes) == 2]
    # Its whole node, that does not come back: a device does, some milliseconds later, and fills its place.
    before = len(cluster.fired())
    cluster.client.kill(short[0], "hang", at="backward", round=view.step + 2)
    cluster.until(lambda: cluster.fired()[before:] or None, "the device to hang")
    cluster.kill(short[0], "sigkill")

    def recovered() -> IncidentView | None:
        mine = [incident for incident in cluster.client.incidents() if incident.job == job]
        return mine[0] if mine and not mine[0].open else None

    incident = cluster.until(recovered, "the recovery")
    assert incident.parts.way == "re-instantiate"
    assert incident.parts.staged_bytes > 0
    undrain(cluster, guest, states=("active", "standby"))
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    cluster.verify(job)


def test_deaths_where_sums_lie_in_shared_memory(cluster: Cluster) -> None:
    """Layers are large enough here that replicas lend each other their sums."""
    cluster.heal()
    config = {"n_layer": 4, "n_embd": 160, "n_head": 4, "n_positions": 32, "vocab_size": 256}
    tables = {
        "model": {"config": config | {"bos_token_id": 0, "eos_token_id": 0}},
        "train": {"steps": 16, "global_batch": 8, "micro_batch": 1, "sequence": 8},
        "resources": {"device_memory": 0, "min_pipeline_nodes": 2},
    }
    job = cluster.client.submit(tiny_job("lent", **tables)).id
    view = cluster.at_step(job, 2)
    devices = [pid for node in view.nodes for pid in cluster.device_pids(node)]
    assert all(map(maps_what_is_lent, devices))
    first, last = view.pipelines[0].nodes[0], view.pipelines[-1].nodes[-1]
    before = len(cluster.fired())
    cluster.client.kill(first, "device", at="reduce", round=view.step + 3)
    cluster.until(lambda: cluster.fired()[before:] or None, "the device to die")
    cluster.at_step(job, view.step + 8)
    cluster.kill(last, "sigkill")
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    cluster.verify(job)
    cluster.heal()
    alive = [pid for node in cluster.client.nodes() for pid in cluster.device_pids(node.name)]
    cluster.until(lambda: not any(map(maps_what_is_lent, alive)) or None, "all of it to be given back")


def maps_what_is_lent(pid: int) -> bool:
    return "memfd:tensor messages" in Path(f"/proc/{pid}/maps").read_text()
