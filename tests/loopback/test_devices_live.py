"""Nodes of several devices on a real cluster: one process after the other killed, spares, and a
standby node.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.nodeviews import NodeView
from tests.helpers.cluster import Cluster, tiny_job


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 3, spare=True) as running:
        yield running


@pytest.fixture
def four_by_two(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 4, devices=2, spare=True) as running:
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


def spare_takes_over(cluster: Cluster, job: str, before: NodeView, index: int, count: int) -> IncidentView:
    """Kill device ``index`` of a node; the incident, the ``count``-th of the job, once it is over."""
    os.kill(before.pids[index], signal.SIGKILL)
    incident = recovered(cluster, job, count)[-1]
    after = node(cluster, before.name)
    assert incident.nodes == (before.name,)
    assert [loss.cause for loss in incident.losses] == ["device-replaced"]
    assert incident.copied_bytes > 0
    assert after.incarnation == before.incarnation
    assert after.pids == tuple(before.spare_pid if n == index else pid for n, pid in enumerate(before.pids))
    return incident


def test_a_spare_for_a_process_and_a_standby_for_a_node(three: Cluster) -> None:
    before = with_spares(three)
    job = three.client.submit(tiny_job("stand", resources={"max_nodes": 2, "device_memory": "32MiB"})).id
    inside = three.at_step(job, 3).nodes
    (standby,) = before.keys() - set(inside)
    assert node(three, standby).state == "standby"
    spare_takes_over(three, job, before[inside[0]], 0, 1)
    assert three.client.job(job).nodes == inside
    three.kill(inside[1], "sigkill")
    incident = recovered(three, job, 2)[-1]
    assert incident.nodes == (inside[1],)
    assert [action.nodes for action in incident.parts.actions] == [(standby,)]
    assert incident.copied_bytes > 0
    assert "copy" in {phase.phase for phase in incident.phases}
    view = three.client.job(job)
    assert set(view.nodes) == {inside[0], standby}
    assert view.tolerance == 1
    finish(three, job)


@pytest.mark.slow
def test_one_process_after_the_other_of_four_nodes_with_two_devices(four_by_two: Cluster) -> None:
    cluster, before = four_by_two, with_spares(four_by_two)
    job = cluster.client.submit(tiny_job("mates", train={"steps": 40}, fault_tolerance={"f": 3})).id
    view = cluster.at_step(job, 3)
    assert view.tolerance == 3
    assert [len(pipeline.stages) for pipeline in view.pipelines] == [2] * 4  # one stage a device
    assert not meet_over_tcp(before["node-1"].pids)
    for count, (victim, index) in enumerate((("node-2", 0), ("node-3", 1), ("node-1", 0)), 1):
        spare_takes_over(cluster, job, before[victim], index, count)
    view = cluster.client.job(job)
    assert (view.tolerance, len(view.nodes)) == (3, 4)
    finish(cluster, job)
