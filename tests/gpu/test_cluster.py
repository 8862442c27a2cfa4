"""Several device processes on one GPU, messages staged through pinned memory, and a real kill in a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oobleckd.protocol.deaths import OUT_OF_MEMORY
from tests.helpers import gpu
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.matrix import survivable

pytestmark = pytest.mark.gpu
NODES = 5
START_S = 300.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if problem := gpu.problem():
        pytest.fail(problem, pytrace=False)
    with Cluster(tmp_path_factory.mktemp("gpu"), NODES, kind=gpu.KIND) as running:
        yield running


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("phase", ["backward", "reduce"])
def test_a_kill_does_not_show(cluster: Cluster, phase: str, precision: str) -> None:
    cluster.heal()
    train = {"steps": 12, "precision": precision}
    job = cluster.client.submit(tiny_job(f"gpu-{phase}-{precision}", train=train)).id
    view = cluster.at_step(job, 2, START_S)
    victim = next(node for p in view.pipelines for node in p.nodes if survivable(view, {node}))
    before = len(cluster.fired())
    cluster.client.kill(victim, "device", at=phase, round=view.step + 4)
    done = cluster.job_in(job, "done", timeout_s=START_S)
    assert any(hit["point"] == phase for hit in cluster.fired()[before:]), "the kill did not fire"
    assert (done.step, done.steps_lost) == (done.steps, 0)
    cluster.ctl("verify", job)  # against a run of the same job, on the same GPU, in which nothing failed


def test_a_job_that_does_not_fit_fails_and_blames_nobody(cluster: Cluster) -> None:
    cluster.heal()
    most = 1 << 24
    model = {"config": {"n_layer": 6, "n_embd": 8192, "n_head": 4, "n_positions": 32, "vocab_size": 256}}
    train = {"global_batch": most, "micro_batch": most, "sequence": 2}  # 1 TiB between two layers
    job = cluster.client.submit(tiny_job("large", model=model, train=train)).id
    failed = cluster.job_in(job, "failed", timeout_s=START_S)
    assert failed.cause == OUT_OF_MEMORY
    assert {node.state for node in cluster.usable(NODES)} == {"standby"}
