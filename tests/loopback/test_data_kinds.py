"""Everything that can happen to a job, one after the other, on each kind of data: a death inside a step, half
of the nodes gone and back, the last copy of its state lost, a checkpoint taken up by another job. No bit may
tell.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oobleckd.protocol.job import Job
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.datakinds import KINDS, MIXES_AT, data_of
from tests.helpers.manners import KEEPING_MANNERS, Manner
from tests.helpers.matrix import drain, undrain

NODES = 6
STEPS = 36
USUAL = next(manner for manner in KEEPING_MANNERS if manner.policy == "oobleck")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("kinds"), NODES) as running:
        yield running


def every_way() -> Iterator[object]:
    """A kind of data and a manner of training; what is slow is the rest of all."""
    for kind in KINDS:
        for manner in KEEPING_MANNERS:
            slow = (kind, manner) != (KINDS[-1], USUAL)
            name = f"{kind}-{manner.name}"
            yield pytest.param(kind, manner, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("kind", "manner"), [*every_way()])
def test_no_bit_tells_what_happened(cluster: Cluster, kind: str, manner: Manner) -> None:
    cluster.heal()
    cluster.usable(NODES)
    spec = job_on(cluster, kind, manner)
    job = cluster.client.submit(spec).id
    view, before = cluster.at_step(job, 2), len(cluster.fired())
    cluster.client.kill(view.nodes[0], "device", at="backward", round=view.step + 2)
    cluster.until(lambda: cluster.fired()[before:] or None, "a death")
    half = [node.name for node in cluster.client.nodes()][: NODES // 2]
    for node in half:
        drain(cluster, node)
    for node in half:
        undrain(cluster, node, states=("active", "standby"))
    cluster.until(lambda: cluster.client.job(job).checkpoint_step or None, "a checkpoint")
    for each in cluster.client.nodes():
        cluster.kill(each.name, "device")
    cluster.until(lambda: went_back(cluster, job) or None, "the job to go on from its checkpoint")
    cluster.at_step(job, MIXES_AT + 4)
    cluster.client.control(job, "cancel")
    assert cluster.job_in(job, "cancelled").step < STEPS
    resumed = cluster.client.submit(spec, resume="latest").id
    assert cluster.job_in(resumed, "done").start_step > MIXES_AT
    cluster.verify(resumed)


def job_on(cluster: Cluster, kind: str, manner: Manner) -> Job:
    """A job on such data with a checkpoint now and then; there is room for the copy that one is written
    from.
    """
    tables = manner.tables()
    resources = {"device_memory": "32MiB", "min_pipeline_nodes": 2}
    return tiny_job(
        f"{kind}-{manner.name}",
        data=data_of(kind, cluster.state),
        train={"steps": STEPS},
        **tables | {"checkpoint": {"every": 4, "keep": 4}, "resources": tables["resources"] | resources},
    )


def went_back(cluster: Cluster, job: str) -> bool:
    """Whether it has gone back to a checkpoint, and on from there."""
    mine = (incident for incident in cluster.client.incidents() if incident.job == job)
    return any(each.parts.rollback is not None and not each.open for each in mine)
