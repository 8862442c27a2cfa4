"""Policy bamboo on a real cluster: a predecessor takes over, and the weights are those of a run without
failures, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from oobleckd.protocol.incidentviews import IncidentView
from tests.helpers.cluster import Cluster, tiny_job


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("redundant"), 4) as running:
        yield running


@pytest.mark.parametrize(
    ("place", "backward"),
    [
        (0, "decoupled"),
        (2, "fused"),
        pytest.param(0, "fused", marks=pytest.mark.slow),
        pytest.param(2, "decoupled", marks=pytest.mark.slow),
    ],
)
def test_one_pipeline_alone_survives_a_kill(
    cluster: Cluster, place: int, backward: Literal["fused", "decoupled"]
) -> None:
    """Four stages, no replica of any: what the dead node held is with its predecessor, and with
    nobody else.
    """
    cluster.heal()
    job = cluster.client.submit(
        tiny_job(
            f"alone-{place}-{backward}",
            train={"steps": 18},
            fault_tolerance={"policy": "bamboo", "f": 0},
            schedule={"backward": backward, "redundant_memory": "16MiB"},
            resources={"device_memory": 0, "min_pipeline_nodes": 4},
        )
    ).id
    before = cluster.at_step(job, 3)
    (pipeline,) = before.pipelines
    assert len(pipeline.nodes) == 4
    assert before.tolerance == 1
    held = {node.name: node for node in cluster.client.nodes()}
    for at, name in enumerate(pipeline.nodes):
        behind = held[pipeline.nodes[(at + 1) % 4]]
        assert [(s.start, s.stop) for s in held[name].redundant] == [(s.start, s.stop) for s in behind.layers]
    victim = pipeline.nodes[place]
    cluster.kill(victim, "sigkill")

    def recovered() -> IncidentView | None:
        mine = [incident for incident in cluster.client.incidents() if incident.job == job]
        return mine[0] if mine and not mine[0].open else None

    incident = cluster.until(recovered, "the recovery")
    assert incident.copied_bytes == 0
    assert incident.steps_lost == 0
    # Three are too few for a plan, so there is no other reason.
    assert (incident.parts.rerouted, incident.parts.plan) == ((f"{victim}/0",), "")
    view = cluster.client.job(job)
    assert {device for p in view.pipelines for device in p.vacant} == {f"{victim}/0"}
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    cluster.verify(job)
