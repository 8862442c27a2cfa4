"""Checkpoints on a real cluster: written beside training, and never a torn one loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.torn import torn_seed

NODES = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("checkpoints"), NODES) as running:
        yield running


@pytest.mark.parametrize("seed", range(2))
def test_a_writer_dies_in_the_middle_of_a_file(cluster: Cluster, seed: int) -> None:
    torn_seed(cluster, seed)


def test_people_see_how_often_and_why(cluster: Cluster) -> None:
    cluster.heal()
    spec = tiny_job("seen", checkpoint={"every": "auto"}, resources={"device_memory": "14MiB"})
    job = cluster.client.submit(spec).id
    view = cluster.at_step(job, 3)
    assert view.cadence is not None
    assert view.cadence.interval_s > 60
    assert "cadence" in cluster.ctl("describe", "job", job).stdout
    cluster.job_in(job, "done")
    assert "(step 24)" in cluster.ctl("describe", "job", job).stdout
