"""A node that does not see the folder of prepared data, or sees another one there: the job trains without it,
or ends with a sentence.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import BIN, Cluster, tiny_job
from tests.helpers.othernode import seeing
from tests.helpers.prepared import prepared

NAME = "a" * 32
pytestmark = pytest.mark.slow  # tests/sim/test_reasons.py has the sentences for `make test`


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """The same place with the data, with other data, and with none."""
    for seed, name in enumerate(("cache", "other")):
        numbers = np.random.default_rng(seed).integers(0, 256, 4000)
        prepared(tmp_path / name / NAME, [numbers[:1000], numbers[1000:]], "uint16")
    (tmp_path / "none").mkdir()
    return tmp_path


@pytest.fixture
def cluster(folders: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(folders / "state", request.param) as cluster:
        yield cluster


def trained(cluster: Cluster, folders: Path, seen: str) -> JobView:
    """How a job ends where the last node has ``seen`` in the place of the data."""
    last = f"node-{cluster.num_nodes}"
    cluster.kill(last, "sigkill")
    cluster.until(lambda: last not in cluster.home.alive() or None, f"{last} is dead")
    command = seeing({folders / "cache": folders / seen}, str(BIN / "oobleckctl"), "start-node", last)
    subprocess.run(command, env=cluster.env, capture_output=True, check=True)
    cluster.usable(cluster.num_nodes)
    data = {"source": "jsonl", "path": "/x.jsonl", "prepared": str(folders / "cache" / NAME)}
    spec = tiny_job("unseen", data=data, train={"steps": 12}, fault_tolerance={"f": 0})
    return cluster.job_in(cluster.client.submit(spec).id, "done", "failed")


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_job_that_needs_the_node_ends_and_names_it(cluster: Cluster, folders: Path) -> None:
    view = trained(cluster, folders, "none")
    assert (view.state, view.cause) == ("failed", "data-unreadable")
    assert "node-2" in view.reason
    assert str(folders / "cache" / NAME) in view.reason


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_where_two_see_different_data_nobody_trains(cluster: Cluster, folders: Path) -> None:
    view = trained(cluster, folders, "other")
    assert (view.state, view.cause) == ("failed", "data-changed")


@pytest.mark.parametrize("seen", ["none", "other"])
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_job_that_does_not_need_the_node_trains_without_it(
    cluster: Cluster, folders: Path, seen: str
) -> None:
    view = trained(cluster, folders, seen)
    assert view.state == "done"
    assert "12 of 12 losses" in cluster.verify(view.id)
