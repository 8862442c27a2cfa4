"""A node that works, slowly, on a real cluster of layers that sleep: it is named, drained, and the job ends
as if nothing had been (docs/corruption.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from benchmarks.sleeping import environment_asleep
from oobleckd.protocol.changes import DevicePace
from tests.helpers.cluster import TINY, Cluster, tiny_job

NODES, STAGES, MICRO_BATCHES = 6, 2, 12
BLOCKS, BLOCK_S = 4, 0.018
TIMES = 3.0
NAMED_WITHIN = 20
KEPT = 0.85  # of the throughput, for what is alive
STEPS, MEASURED = 42, 8
WAIT_S = 300.0
AWAKE = (0.0, 0.0, 0.0)


@pytest.fixture
def times(tmp_path: Path) -> Path:
    return tmp_path / "asleep.json"


@pytest.fixture
def cluster(tmp_path: Path, times: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", NODES, env=environment_asleep(times, (0.0, BLOCK_S, 0.0))) as running:
        yield running


def pace_s(cluster: Cluster, job: str) -> float:
    """Seconds of an undisturbed step: the lower quartile of so many from now on, as the daemon heard of them.

    Layers that sleep share this machine's cores with other tests, which can only make a step longer.
    """
    first = cluster.client.job(job).step + 1
    cluster.at_step(job, first + MEASURED, timeout_s=WAIT_S)
    seen = {view.step: view.at for view in cluster.client.steps(job)}
    steps_s = [seen[step + 1] - seen[step] for step in range(first, first + MEASURED)]
    return quantiles(steps_s, n=4)[0]


def test_a_node_that_takes_three_times_as_long(cluster: Cluster, times: Path) -> None:
    """Three pipelines of two; then one of two and one of three, which have a sixth less and a little more to
    wait.
    """
    sections: dict[str, Any] = {
        "model": {"config": TINY | {"n_layer": BLOCKS}},
        "train": {"steps": STEPS, "global_batch": MICRO_BATCHES, "micro_batch": 1},
        "fault_tolerance": {"f": 1, "slow": "drain"},
        "resources": {"device_memory": 0, "min_pipeline_nodes": STAGES},
        "checkpoint": {"every": 0},
    }
    job = cluster.client.submit(tiny_job("gray", **sections)).id
    view = cluster.at_step(job, 2)
    assert [len(pipeline.nodes) for pipeline in view.pipelines] == [STAGES] * (NODES // STAGES)
    healthy_s = pace_s(cluster, job)
    slow, began = view.nodes[0], cluster.client.job(job).step
    cluster.ctl("kill-node", slow, "--how", f"slow={TIMES:g}")

    cluster.told(DevicePace, lambda pace: pace.slow and pace.device == f"{slow}/0", f"{slow} named", WAIT_S)
    assert cluster.client.job(job).step - began <= NAMED_WITHIN
    cluster.until(lambda: slow not in cluster.client.job(job).nodes or None, f"{slow} to leave", WAIT_S)
    live = (NODES - 1 + 1 / TIMES) / NODES
    assert healthy_s / pace_s(cluster, job) >= KEPT * live
    done = cluster.job_in(job, "done", timeout_s=WAIT_S)
    assert (done.step, done.steps_lost, done.incidents) == (STEPS, 0, 0)
    times.write_text(json.dumps(AWAKE))  # for the run that it is compared with
    cluster.verify(job)
