"""A mixture of experts on a real cluster, from a folder as the hub has them: what dies does not show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.experts import saved
from tests.helpers.models import small_config

_SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256,
    "max_position_embeddings": 32,
}  # fmt: skip
_DEATHS = ("device", "sigkill", "device", "sigkill", "device")


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "state", 4, spare=True) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_five_deaths_do_not_show(four: Cluster, tmp_path: Path, family: str) -> None:
    saved(family, tmp_path / "hub", **small_config(family, **_SMALL))
    model = {"family": family, "config": {}, "checkpoint": str(tmp_path / "hub")}
    train = {"steps": 500, "precision": "bf16"}
    job = four.client.submit(
        tiny_job(family, model=model, train=train, resources={"device_memory": "16MiB"})
    ).id
    four.at_step(job, 3)
    for count, how in enumerate(_DEATHS, 1):
        nodes = four.until(lambda: tolerant(four, job), "one loss more to be survived").nodes
        victim = nodes[count % len(nodes)]
        four.kill(victim, how)
        recovered(four, job, count)
        if how == "sigkill":
            four.ctl("start-node", victim)
    assert four.job_in(job, "done", timeout_s=600.0).steps_lost == 0
    four.verify(job)


def tolerant(cluster: Cluster, job: str) -> JobView | None:
    view = cluster.client.job(job)
    return view if view.tolerance else None


def recovered(cluster: Cluster, job: str, count: int) -> list[IncidentView]:
    """Wait until ``count`` incidents of ``job`` are over."""

    def check() -> list[IncidentView] | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        over = [i for i in cluster.client.incidents() if i.job == job and not i.open]
        return over if len(over) == count else None

    return cluster.until(check, f"{count} incidents over")
