"""A job that compiles, on a real cluster: a spare takes a dead device's place, a node is lost and comes back,
and the bits are those of the run without failures. In ``make test`` the same is tried in one process
(tests/unit/worker/test_compiled.py): each layer that is compiled takes seconds of a core.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.api import JobView
from tests.helpers.cluster import Cluster, tiny_job

_COLD_S = 900.0  # of two cores that compile and do other things besides


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 3, spare=True) as running:
        yield running


@pytest.mark.slow
def test_a_spare_a_lost_node_and_its_return_do_not_show(three: Cluster) -> None:
    train = {"compile": True, "steps": 400}
    job = three.client.submit(tiny_job("compiled", train=train, resources={"device_memory": "32MiB"})).id
    three.at_step(job, 3, timeout_s=_COLD_S)
    (folder,) = (three.home.state / "compiled").iterdir()
    made = {file.name for file in folder.rglob("*.so")}
    assert made
    victim = next(node for node in three.client.nodes() if node.name == "node-2")
    os.kill(victim.pids[0], signal.SIGKILL)
    over(three, job, 1)
    assert next(n for n in three.client.nodes() if n.name == "node-2").pids == (victim.spare_pid,)
    three.kill("node-3", "sigkill")
    over(three, job, 2)
    three.ctl("start-node", "node-3")
    three.until(lambda: "node-3" in three.client.job(job).nodes or None, "node-3 in the plan", _COLD_S)
    assert three.job_in(job, "done", timeout_s=_COLD_S).steps_lost == 0
    assert {file.name for file in folder.rglob("*.so")} == made  # one compiled, all others loaded
    three.verify(job)


def over(cluster: Cluster, job: str, count: int) -> JobView:
    """Wait until ``count`` incidents of ``job`` are over."""

    def check() -> JobView | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        done = [each for each in cluster.client.incidents() if each.job == job and not each.open]
        return view if len(done) == count else None

    return cluster.until(check, f"{count} incidents over", _COLD_S)
