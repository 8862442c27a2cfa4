"""One flipped bit on a real cluster: found, named, quarantined, and the job ends bit for bit as if nothing
had been (docs/corruption.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oobleckd.protocol.changes import NodeQuarantined
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.parts import How
from oobleckd.protocol.traits import CANARY
from tests.helpers.cluster import Cluster, tiny_job

NODES = 7
STEPS = 22


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("corruption"), NODES) as running:
        yield running


def begin(cluster: Cluster, name: str, nodes: int, f: int) -> tuple[str, str]:
    """A job on ``nodes`` nodes, in pipelines of two, a few steps in; and the node that shall have a wrong
    bit.
    """
    cluster.heal()
    sections: dict[str, Any] = {
        "train": {"steps": STEPS, "global_batch": 8},
        "fault_tolerance": {"f": f},
        "resources": {"device_memory": "14MiB", "max_nodes": nodes, "min_pipeline_nodes": 2},
        "checkpoint": {"every": 4},
    }
    job = cluster.client.submit(tiny_job(name, **sections)).id
    return job, cluster.at_step(job, 9).nodes[-1]


def evidence(cluster: Cluster, node: str) -> tuple[str, str]:
    """The device for which ``node`` is quarantined, and what that rests on."""

    def check() -> tuple[str, str] | None:
        told = [change.data for change in cluster.client.story(f"node:{node}")]
        found = [data for data in told if isinstance(data, NodeQuarantined)]
        view = next(view for view in cluster.client.nodes() if view.name == node)
        out = view.state in {"draining", "drained"}
        return (found[-1].device, found[-1].evidence) if found and out else None

    return cluster.until(check, f"{node} quarantined")


def finish(cluster: Cluster, job: str) -> IncidentView:
    done = cluster.job_in(job, "done")
    (incident,) = [
        each
        for each in cluster.client.incidents()
        if each.job == job and each.parts.rollback is not None and each.parts.rollback.cause == "corruption"
    ]
    assert 0 < done.steps_lost == incident.steps_lost
    cluster.verify(job)
    return incident


@pytest.mark.parametrize(
    "how",
    [
        "flip-weight",
        pytest.param("flip-moment", marks=pytest.mark.slow),
        pytest.param("flip-mean", marks=pytest.mark.slow),
    ],
)
def test_two_copies(cluster: Cluster, how: How) -> None:
    job, node = begin(cluster, f"two-{how}", 5, 1)
    cluster.client.kill(node, how)
    assert evidence(cluster, node) == (f"{node}/0", "recomputed")
    finish(cluster, job)
    assert node not in cluster.client.job(job).nodes


def test_three_copies(cluster: Cluster) -> None:
    job, node = begin(cluster, "three", 7, 2)
    cluster.client.kill(node, "flip-weight")
    assert evidence(cluster, node) == (f"{node}/0", "outvoted")
    assert finish(cluster, job).nodes == (node,)


def test_a_gradient_sum(cluster: Cluster) -> None:
    job, node = begin(cluster, "sum", 5, 1)
    cluster.client.kill(node, "flip-sum")
    assert evidence(cluster, node) == (f"{node}/0", "own-check")
    finish(cluster, job)


OTHER_KERNELS = """
import sys

class OtherKernels:
    "Has a device compute attention by another kernel, of which no version and no setting tells."
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "oobleckd.worker.canary.canary":
            import torch
            torch.backends.cuda.enable_flash_sdp(False)  # which is heeded by CPUs, too

sys.meta_path.insert(0, OtherKernels)
"""


def test_one_that_computes_otherwise_is_told_apart_and_not_corrupt(cluster: Cluster, tmp_path: Path) -> None:
    """It says the same of itself as the others do, but for its canary."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_KERNELS)
    cluster.heal()
    cluster.kill("node-3", "sigkill")
    usual = dict(cluster.env)
    cluster.env["PYTHONPATH"] = str(tmp_path)
    cluster.ctl("start-node", "node-3")
    cluster.env.clear()
    cluster.env.update(usual)
    config = tiny_job("plain").model.config | {"attn_pdrop": 0.0}
    odd = tiny_job("odd", model={"config": config}, train={"steps": 12}, fault_tolerance={"f": 2})
    job = cluster.client.submit(odd).id
    at_work = cluster.at_step(job, 3)
    (found,) = at_work.differences
    assert (found.devices, [*found.traits]) == (("node-3/0",), [CANARY])
    told = json.loads(cluster.ctl("describe", "node", "node-3", "-o", "json").stdout)
    assert told["traits"][0][CANARY] == found.traits[CANARY][0]
    cluster.job_in(job, "done")
    assert len(cluster.client.job(job).kinds) == 2
    story = [change.data for change in cluster.client.story("node:node-3")]
    assert not any(isinstance(data, NodeQuarantined) for data in story)
    cluster.kill("node-3", "sigkill")  # the next test has one that is as the others
    cluster.heal()
