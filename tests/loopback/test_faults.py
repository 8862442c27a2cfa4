"""Every kind of failure on a real cluster: told apart, survived without a step lost, and bit for bit the
same.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oobleckd.ctl.reference import to_toml
from oobleckd.protocol.deaths import OUT_OF_MEMORY
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import table_of
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.protocol.parts import LossCause
from tests.helpers.cluster import Cluster, tiny_job

NODES = 4
TRAIN, SLOW = {"steps": 28, "global_batch": 6}, 12
"""Of jobs that train on while something happens to them, so many times as slow, and nearly always asleep."""
STANDING_STILL = {"steps": 20, "global_batch": 6}
"""Of jobs that wait for what happens to them: nothing is to come while they train on."""
STOPPED_S = 4.0
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("faults"), NODES) as running:
        yield running


def begin(cluster: Cluster, name: str, train: dict[str, int]) -> tuple[str, str]:
    """A job a few steps in, and a node of it. Many train the same, so that one run without failures serves
    them all.
    """
    cluster.heal()
    job = cluster.client.submit(tiny_job(name, train=train)).id
    return job, cluster.at_step(job, 5).nodes[-1]


def finish(cluster: Cluster, job: str, node: str, cause: LossCause) -> IncidentView:
    """The job ends as if nothing had been; its one incident names ``node`` and ``cause``."""
    done = cluster.job_in(job, "done")
    (incident,) = [i for i in cluster.client.incidents() if i.job == job]
    assert incident.nodes == (node,)
    assert [loss.cause for loss in incident.losses] == [cause]
    assert done.steps_lost == 0
    cluster.verify(job)
    return incident


def in_state(cluster: Cluster, node: str, *states: str) -> NodeView:
    def check() -> NodeView | None:
        view = next(view for view in cluster.client.nodes() if view.name == node)
        return view if view.state in states else None

    return cluster.until(check, f"{node} in {states}")


def knows_the_heartbeats_of(cluster: Cluster, node: str) -> None:
    """Wait until what is to come cannot be taken for the silence of an agent that nobody knows yet."""

    def known() -> bool | None:
        return next(view.lease_s for view in cluster.client.nodes() if view.name == node) < STOPPED_S or None

    cluster.until(known, f"the lease of {node}")


def test_a_stopped_node_is_lost_and_joins_anew_when_it_goes_on(cluster: Cluster) -> None:
    job, node = begin(cluster, "stopped", TRAIN)
    before = next(view for view in cluster.client.nodes() if view.name == node)
    cluster.slow_down(cluster.client.job(job).nodes, SLOW)
    knows_the_heartbeats_of(cluster, node)
    cluster.client.kill(node, "sigstop", seconds=STOPPED_S)
    in_state(cluster, node, "disconnected", "lost")
    in_state(cluster, node, "lost")
    after = in_state(cluster, node, "standby", "active")
    assert after.pids == before.pids  # the same processes, and what they held is dropped
    cluster.hurry(each.name for each in cluster.usable(NODES))
    finish(cluster, job, node, "silent")


@pytest.mark.parametrize("how", ["hang", "stopped"])
def test_a_hung_device_is_ended_by_its_agent(cluster: Cluster, how: str) -> None:
    job, node = begin(cluster, f"device-{how}", STANDING_STILL)
    if how == "hang":
        cluster.client.kill(node, "hang", at="backward")
    else:
        os.kill(cluster.device_pids(node)[0], signal.SIGSTOP)
    finish(cluster, job, node, "device-lost")


def test_a_stopped_device_with_the_last_copy_is_woken(cluster: Cluster) -> None:
    """Nobody but us has its layers, and nobody but its agent sends SIGCONT."""
    cluster.heal()
    tables = {"fault_tolerance": {"f": 0}, "resources": {"min_pipeline_nodes": NODES}}
    job = cluster.client.submit(tiny_job("last-copy", train=STANDING_STILL, **tables)).id
    view = cluster.at_step(job, 2)
    node = view.pipelines[0].nodes[0]
    os.kill(cluster.device_pids(node)[0], signal.SIGSTOP)
    incident = finish(cluster, job, node, "device-stopped")
    assert incident.parts.way == "stay"


def test_a_node_without_a_network(cluster: Cluster) -> None:
    job, node = begin(cluster, "net-drop", TRAIN)
    cluster.slow_down(cluster.client.job(job).nodes, SLOW)
    knows_the_heartbeats_of(cluster, node)
    cluster.client.kill(node, "net-drop", seconds=STOPPED_S)
    in_state(cluster, node, "lost")
    in_state(cluster, node, "standby", "active")
    cluster.hurry(each.name for each in cluster.usable(NODES))
    finish(cluster, job, node, "silent")


def test_an_agent_takes_its_devices_with_it(cluster: Cluster) -> None:
    job, node = begin(cluster, "agent-only", STANDING_STILL)
    pid = os.pidfd_open(cluster.device_pids(node)[0])
    cluster.client.kill(node, "agent-only")
    finish(cluster, job, node, "link-closed")
    ended, _, _ = select.select([pid], [], [], WITHIN_S)  # also before whoever inherits it has reaped it
    assert ended
    os.close(pid)


DRILL = """
job = "job.toml"
verify = "single"

[[fault]]
step = [4, 8]
how = "device"

[[fault]]
step = 20
after_s = [0.0, 0.1]
start = true
wait = "whole"
"""


def test_a_drill_passes_and_says_what_it_did(cluster: Cluster, tmp_path: Path) -> None:
    cluster.heal()
    # A copy on each node: two can be lost one after the other, however soon.
    job = tiny_job("drill", train=TRAIN | {"steps": 60}, resources={"device_memory": "64MiB"})
    (tmp_path / "job.toml").write_text(to_toml(table_of(job)))
    (tmp_path / "drill.toml").write_text(DRILL)
    said = cluster.ctl("drill", str(tmp_path / "drill.toml"), "--seed", "5", "-o", "json")
    done = json.loads(said.stdout)
    again = cluster.ctl("drill", str(tmp_path / "drill.toml"), "--seed", "5", "--dry-run", "-o", "json")
    assert json.loads(again.stdout)["script"] == done["script"]
    assert done["passed"]
    assert (done["seed"], done["incidents"], done["steps_lost"]) == (5, 2, 0)
    assert f"1. {done['script'][0]['text']}" in said.stderr
    lost = [node for act in done["script"] for node in act["nodes"]]
    assert [i.nodes[0] for i in cluster.client.incidents() if i.job == done["job"]] == lost
    cluster.usable(NODES)


def starve(cluster: Cluster, node: str) -> None:
    """The device of ``node`` gets no more memory than it has, but for words and the stacks of a thread or
    two: one that cannot be started says nothing of memory.
    """
    (pid,) = cluster.device_pids(node)
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kib,) = map(int, re.findall(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE))
    resource.prlimit(pid, resource.RLIMIT_DATA, (1024 * kib + (24 << 20), resource.RLIM_INFINITY))


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """Devices whose heaps have nothing left over from jobs of before."""
    with Cluster(tmp_path, NODES) as running:
        yield running


def test_out_of_memory_once_is_a_loss_and_twice_fails_the_job(fresh: Cluster) -> None:
    cluster = fresh
    nodes = [node.name for node in cluster.usable(NODES)]
    starve(cluster, nodes[1])  # the first one measures
    config = {"n_layer": 6, "n_embd": 384, "n_head": 4, "n_positions": 32, "vocab_size": 256}
    tables: dict[str, dict[str, Any]] = {
        "train": {"steps": 6, "global_batch": 6},
        "model": {"config": config | {"bos_token_id": 0, "eos_token_id": 0}},
        "resources": {"device_memory": 0, "min_pipeline_nodes": 2},
    }
    once = cluster.client.submit(tiny_job("once", **tables)).id
    (died,) = cluster.job_in(once, "done").deaths
    assert (died.device, died.death.kind) == (f"{nodes[1]}/0", OUT_OF_MEMORY)
    assert died.death.phase
    cluster.usable(NODES)
    for node in nodes[
        1:
    ]:  # the third time ends it whatever the phases are, and a heap decides how far a device gets
        starve(cluster, node)
    twice = cluster.client.submit(tiny_job("twice", **tables)).id
    failed = cluster.job_in(twice, "failed", "done")
    assert failed.state == "failed", cluster.ctl("story", twice).stdout
    assert failed.cause == OUT_OF_MEMORY
    assert all(each.death.kind == OUT_OF_MEMORY and each.planned_bytes for each in failed.deaths), (
        failed.deaths
    )
    assert {node.state for node in cluster.usable(NODES)} == {"standby"}  # nobody is to blame
