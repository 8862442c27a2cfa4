"""Stages of several devices on a real cluster: files that do not show how many, nor who died; and what is
copied where a device of a stage, a node, or two of three nodes are lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.sharedmatrix import (
    NUM_NODES,
    SharedCell,
    run_shared_cell,
    shared_resources,
    some_shared_cells,
)

STEPS = 8
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {},
    "adamw-bf16": {"train": {"precision": "bf16"}},
    "muon": {"optimizer": {"name": "muon"}},
    "muon-bf16": {"optimizer": {"name": "muon"}, "train": {"precision": "bf16"}},
}
STATE_BYTES = 12
"""Of a parameter under AdamW: itself, and two moments."""
NUM_PARAMETERS = 318_464
SLOWER = 12
"""Times that a device takes for its layers, most of it asleep."""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "adamw"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of two devices, and a spare each."""
    with Cluster(tmp_path_factory.mktemp("shared"), 3, devices=2, spare=True) as running:
        yield running


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node of four devices."""
    with Cluster(tmp_path_factory.mktemp("large"), 1, devices=4) as running:
        yield running


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """What a cell of the kill matrix needs."""
    with Cluster(tmp_path_factory.mktemp("deep"), NUM_NODES, devices=2, spare=True) as running:
        yield running


def submit(
    cluster: Cluster, name: str, each: int, nodes: int, f: int, resume: str = "", **tables: dict[str, Any]
) -> str:
    """A job with stages of ``each`` devices in pipelines of ``nodes`` nodes or more; its id."""
    train = {"steps": STEPS} | tables.pop("train", {})
    asked = {"resources": shared_resources(each, nodes), "fault_tolerance": {"f": f}, "train": train}
    return cluster.client.submit(tiny_job(name, **asked, **tables), resume=resume).id


def ready(cluster: Cluster) -> None:
    """All nodes are there, each with a spare."""
    cluster.heal()
    cluster.until(
        lambda: all(node.spare == "ready" for node in cluster.client.nodes()) or None, "a spare in every node"
    )


def files(job: JobView) -> dict[str, bytes]:
    """The numbers in its last checkpoint, by the name of the file."""
    found = {path.name: path.read_bytes() for path in Path(job.checkpoint).glob("*.safetensors")}
    assert found
    return found


def stages(job: JobView) -> list[list[str]]:
    """Of each pipeline."""
    return [[stage.name for stage in pipeline.shown] for pipeline in job.pipelines]


def recovered(cluster: Cluster, job: str, count: int) -> list[IncidentView]:
    """Wait until ``count`` incidents of ``job`` are over."""

    def check() -> list[IncidentView] | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        over = [each for each in cluster.client.incidents() if each.job == job and not each.open]
        return over if len(over) == count else None

    return cluster.until(check, f"{count} incidents over")


@pytest.mark.parametrize("recipe", ["adamw", *SLOW])
def test_files_do_not_show_how_many_devices_a_stage_has(cluster: Cluster, recipe: str) -> None:
    """Nor how many pipelines there are."""
    ready(cluster)
    asked = {"one": (2, 3, 0), "three": (2, 1, 2), "plain": (1, 1, 1)}
    found: dict[str, dict[str, bytes]] = {}
    shapes = {}
    for name, (each, nodes, f) in asked.items():
        job = submit(cluster, f"{name}-{recipe}", each, nodes, f, **RECIPES[recipe])
        shapes[name] = stages(cluster.at_step(job, 1))
        found[name] = files(cluster.job_in(job, "done"))
    whole = [f"node-{number}/0-1" for number in (1, 2, 3)]
    assert shapes["one"] == [whole]
    assert shapes["three"] == [[name] for name in whole]
    assert found["one"] == found["plain"]
    assert found["three"] == found["plain"]


def test_a_node_of_four_goes_on_from_what_stages_of_one_device_left(large: Cluster) -> None:
    half = STEPS // 2
    alone = submit(large, "alone", 1, 1, 0, checkpoint={"every": half})
    wanted = files(large.job_in(alone, "done"))
    job = submit(large, "together", 4, 1, 0, resume=f"{alone}@{half}")
    assert stages(large.at_step(job, half + 1)) == [["node-1/0-3"]]
    assert files(large.job_in(job, "done")) == wanted


def test_a_device_a_drained_node_and_then_two_of_three_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Of a job that evaluates now and then."""
    ready(cluster)
    text = tmp_path / "held-out.txt"
    text.write_bytes(bytes(range(256)) * 8)
    source = {"name": "prose", "kind": "text", "path": str(text)}
    lasting = {"train": {"steps": 32}, "eval": {"every": 4, "sequences": 8, "source": [source]}}
    job = submit(cluster, "losses", 2, 1, 2, **lasting)
    first, second, third = sorted(cluster.at_step(job, 2).nodes)
    # Till it dies: a job of steps of a few milliseconds would be over before all of this has happened.
    cluster.ctl("kill-node", first, "--how", f"slow={SLOWER}")
    os.kill(cluster.device_pids(second)[1], signal.SIGKILL)
    (incident,) = recovered(cluster, job, 1)
    assert [(loss.cause, loss.device) for loss in incident.losses] == [("device-replaced", f"{second}/1")]
    assert {source.device for source in incident.sources} <= {f"{first}/1", f"{third}/1"}
    assert incident.copied_bytes == pytest.approx(NUM_PARAMETERS * STATE_BYTES / 2, rel=0.1)
    said = cluster.ctl("describe", "incident", incident.id).stdout
    assert f"{second} gets back what was held, shards of 8 layers" in said
    assert "keep" not in said

    cluster.client.drain(third, "a fan")
    cluster.until(lambda: third not in cluster.client.job(job).nodes or None, f"{third} to leave")
    assert f"{first}/0-1, {second}/0-1\n" in cluster.ctl("get", "layers", "--job", job).stdout
    cluster.client.undrain(third)
    cluster.until(lambda: third in cluster.client.job(job).nodes or None, f"{third} to be back")

    for node in (first, third):
        cluster.kill(node, "sigkill")
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    said = cluster.verify(job)
    assert "8 of 8 evaluations" in said


def test_a_number_that_is_left_open_is_another_one_for_fewer_nodes(cluster: Cluster) -> None:
    """Stages of one device need two nodes, those of two need three and are faster. Nothing goes by a
    checkpoint.
    """
    ready(cluster)
    small = {"devices_per_stage": "auto", "device_memory": "4MiB"}
    train = {"steps": 40, "global_batch": 4, "micro_batch": 1}
    asked = {"resources": small, "fault_tolerance": {"f": 0}, "train": train}
    job = cluster.client.submit(tiny_job("open", **asked)).id
    first, second, third = sorted(cluster.at_step(job, 2).nodes)

    def until_stages(names: set[str]) -> None:
        cluster.until(
            lambda: {name for each in stages(cluster.client.job(job)) for name in each} == names or None,
            f"stages {names}",
        )

    until_stages({f"{node}/0-1" for node in (first, second, third)})
    cluster.ctl("kill-node", first, "--how", f"slow={SLOWER}")
    cluster.client.drain(third, "a fan")
    until_stages({f"{node}/{index}" for node in (first, second) for index in (0, 1)})
    assert not cluster.client.job(job).checkpoint
    assert "stages of 1 device in place of 2" in cluster.ctl("story", f"job/{job}").stdout
    assert "auto: of 1 device" in cluster.ctl("describe", "job", job).stdout
    cluster.client.undrain(third)
    until_stages({f"{node}/0-1" for node in (first, second, third)})
    cluster.hurry([first])
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    cluster.verify(job)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[] if cell.phase == "gather" else pytest.mark.slow, id=cell.name)
        for cell in some_shared_cells()
    ],
)
def test_kill_matrix(deep: Cluster, cell: SharedCell) -> None:
    run_shared_cell(deep, cell)
