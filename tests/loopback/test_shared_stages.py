"""Stages of several devices on a real cluster: the files that a job leaves do not show how many, nor who
died; and what is copied where one of a stage's devices, a node, or two of three nodes are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.sharedmatrix import (
    shared_resources,
)

STEPS = 12
TRAIN = {"steps": STEPS}
LASTING = {"steps": 30}
"""Of jobs that nodes leave and come back to."""
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "adamw-bf16": {"train": {"precision": "bf16"}},
    "muon": {"optimizer": {"name": "muon"}},
    "muon-bf16": {"optimizer": {"name": "muon"}, "train": {"precision": "bf16"}},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of two devices, and a spare each."""
    with Cluster(tmp_path_factory.mktemp("shared"), 3, devices=2, spare=True) as running:
        yield running


def submitted(cluster: Cluster, name: str, each: int, nodes: int, f: int, **tables: dict[str, Any]) -> str:
    """A job with stages of ``each`` devices in pipelines of ``nodes`` nodes or more; its id."""
    table = {
        "resources": shared_resources(each, nodes),
        "fault_tolerance": {"f": f},
        **tables,
        "train": TRAIN | tables.get("train", {}),
    }
    return cluster.client.submit(tiny_job(name, **table)).id


def files(job: JobView) -> dict[str, bytes]:
    """The numbers in its last checkpoint, by the name of the file."""
    found = {path.name: path.read_bytes() for path in Path(job.checkpoint).glob("*.safetensors")}
    assert found
    return found


def shape(job: JobView) -> list[list[int]]:
    """Of each stage of each pipeline how many devices it has."""
    return [[len(stage.devices) for stage in pipeline.shown] for pipeline in job.pipelines]


def incidents(cluster: Cluster, job: str, count: int) -> list[IncidentView]:
    """Wait until ``count`` incidents of ``job`` are over."""

    def check() -> list[IncidentView] | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        over = [each for each in cluster.client.incidents() if each.job == job and not each.open]
        return over if len(over) == count else None

    return cluster.until(check, f"{count} incidents over")


def with_spares(cluster: Cluster) -> None:
    """All nodes are there, each with a spare."""
    cluster.heal()
    cluster.until(
        lambda: all(node.spare == "ready" for node in cluster.client.nodes()) or None, "a spare in every node"
    )


@pytest.mark.parametrize(
    "recipe", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "adamw")]
)
def test_files_do_not_show_how_many_devices_a_stage_has(cluster: Cluster, recipe: str) -> None:
    """Nor how many pipelines there are; and a job goes on from one with stages of another size."""
    with_spares(cluster)
    shapes = {
        "plain": ((1, 1, 1), [[1]] * 3),
        "one": ((2, 3, 0), [[2, 2, 2]]),
        "three": ((2, 1, 2), [[2]] * 3),
    }
    found = {}
    for name, (asked, wanted) in shapes.items():
        job = submitted(cluster, f"{name}-{recipe}", *asked, **RECIPES[recipe])
        view = cluster.at_step(job, 1)
        if name != "plain":
            assert shape(view) == wanted
        done = cluster.job_in(job, "done")
        found[name] = files(done)
        if name == "one":
            assert f"{view.pipelines[0].nodes[0]}/0-1" in cluster.ctl("get", "layers", job).stdout
    assert found["one"] == found["plain"]
    assert found["three"] == found["plain"]
