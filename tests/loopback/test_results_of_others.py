"""Two clusters with one ``checkpoint.dir`` and one job name: both results are whole, and neither touches the
other's folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from oobleckd.host.checkpoint import checkpoints
from oobleckd.host.folder import mark_of
from oobleckd.protocol.job import Job
from tests.helpers.cluster import Cluster
from tests.helpers.models import small_config, small_job


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    root = tmp_path_factory.mktemp("others")
    with ExitStack() as stack:
        yield [stack.enter_context(Cluster(root / name, 1)) for name in ("a", "b")]


def job_in(folder: Path, seed: int) -> Job:
    tables = {"train": {"steps": 12, "seed": seed}, "checkpoint": {"dir": str(folder), "every": 2}}
    return small_job("gpt2", small_config("gpt2", vocab_size=257), fault_tolerance={"f": 0}, **tables)


def test_both_results_are_whole(clusters: list[Cluster], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [job_in(tmp_path, seed) for seed in (7, 8)]
        ids = list(pool.map(lambda pair: pair[0].client.submit(pair[1]).id, zip(clusters, jobs, strict=True)))
    assert sorted(ids) == ["small-1", "small-2"]
    for cluster, job in zip(clusters, ids, strict=True):
        view = cluster.job_in(job, "done")
        assert Path(view.checkpoint) == tmp_path / job / "step-00000012"
    marks = {mark.journal for job in ids if (mark := mark_of(tmp_path / job)) is not None}
    assert len(marks) == 2
    for cluster, job in zip(clusters, ids, strict=True):
        assert checkpoints(tmp_path / job)[-1].name == "step-00000012"
        cluster.verify(job)


def test_a_copy_ends_nothing_and_does_not_start(clusters: list[Cluster], tmp_path: Path) -> None:
    """Its files name the processes of the cluster that it was copied from."""
    cluster = clusters[0]
    shutil.copytree(cluster.state, tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock", "log"))
    copy = Cluster(tmp_path / "copy", 1)
    assert "no cluster runs" in copy.ctl("down").stderr
    refused = copy.ctl("up", "--nodes", "1", check=False)
    assert refused.returncode != 0
    assert "is a copy" in refused.stderr
    assert "--adopt" in refused.stderr
    assert len(cluster.home.alive()) == 2
