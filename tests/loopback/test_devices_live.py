"""Nodes of several devices on a real cluster: one process after the other killed, spares, and a standby node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.api import IncidentView, NodeView
from tests.helpers.cluster import Cluster, tiny_job


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("devices"), 4, devices=2, spare=True) as running:
        yield running


def node(cluster: Cluster, name: str) -> NodeView:
    return next(view for view in cluster.client.nodes() if view.name == name)


def recovered(cluster: Cluster, job: str, count: int) -> list[IncidentView]:
    """Wait until ``count`` incidents of ``job`` are over."""

    def check() -> list[IncidentView] | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        over = [i for i in cluster.client.incidents() if i.job == job and not i.open]
        return over if len(over) == count else None

    return cluster.until(check, f"{count} incidents over")


def with_spares(cluster: Cluster) -> dict[str, NodeView]:
    """Wait until every node has a spare that is ready."""

    def check() -> dict[str, NodeView] | None:
        nodes = {view.name: view for view in cluster.client.nodes()}
        return nodes if all(view.spare == "ready" for view in nodes.values()) else None

    return cluster.until(check, "a spare in every node")


def meet_over_tcp(pids: tuple[int, ...]) -> bool:
    """Whether one of two processes has a TCP connection to the other."""
    table = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    owner = {line[1]: line[9] for line in table}  # local address -> inode
    mine, others = (sockets(pid) for pid in pids)
    return any(line[9] in mine and owner.get(line[2]) in others for line in table)


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def finish(cluster: Cluster, job: str) -> None:
    assert cluster.job_in(job, "done").steps_lost == 0
    cluster.verify(job)


def test_one_process_after_the_other_of_four_nodes_with_two_devices(cluster: Cluster) -> None:
    before = with_spares(cluster)
    job = cluster.client.submit(tiny_job("mates", train={"steps": 40}, fault_tolerance={"f": 3})).id
    view = cluster.at_step(job, 3)
    assert view.tolerance == 3
    assert [len(pipeline.stages) for pipeline in view.pipelines] == [2] * 4  # one stage a device
    assert not meet_over_tcp(before["node-1"].pids)
    for count, (victim, index) in enumerate((("node-2", 0), ("node-3", 1), ("node-1", 0)), 1):
        os.kill(before[victim].pids[index], signal.SIGKILL)
        incident = recovered(cluster, job, count)[-1]
        after = node(cluster, victim)
        assert incident.nodes == (victim,)
        assert incident.cause.endswith("the node's spare takes its place")
        assert incident.copied_bytes > 0
        assert after.incarnation == before[victim].incarnation
        assert after.pids[index] == before[victim].spare_pid
        assert after.pids[1 - index] == before[victim].pids[1 - index]
    view = cluster.client.job(job)
    assert (view.tolerance, len(view.nodes)) == (3, 4)
    finish(cluster, job)


def test_a_standby_takes_a_dead_node_s_place(cluster: Cluster) -> None:
    spec = tiny_job("stand", train={"steps": 40}, fault_tolerance={"f": 2}, resources={"max_nodes": 3})
    job = cluster.client.submit(spec).id
    inside = cluster.at_step(job, 3).nodes
    (standby,) = {view.name for view in cluster.client.nodes()} - set(inside)
    assert node(cluster, standby).state == "standby"
    cluster.kill(inside[0], "sigkill")
    (incident,) = recovered(cluster, job, 1)
    assert incident.nodes == (inside[0],)
    assert f"join: {standby}" in incident.reason or f"replace: {standby}" in incident.reason
    assert incident.copied_bytes > 0
    assert "copy" in {phase.phase for phase in incident.phases}
    view = cluster.client.job(job)
    assert set(view.nodes) == {*inside[1:], standby}
    assert view.tolerance == 2
    cluster.heal()
    assert node(cluster, inside[0]).state == "standby"
    finish(cluster, job)
