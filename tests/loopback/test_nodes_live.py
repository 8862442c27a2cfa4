"""A real cluster whose nodes go and come: 6 down to n0 = 2 and back, below n0, and the last copy lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job

NODES = 6
SLOW, SLOW_S = 6, 3.0
"""Times as long as layers take, nearly all of it asleep, and for how many seconds where not to the end."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Six nodes whose SIGTERM leaves them a minute."""
    with Cluster(tmp_path_factory.mktemp("nodes"), NODES, env={"OOBLECK_NOTICE_S": "60"}) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """The same for all tests, and whole again."""
    running.heal()
    return running


def settled(cluster: Cluster, job: str, count: int) -> JobView:
    """Wait until exactly ``count`` nodes train ``job``."""

    def check() -> JobView | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        return view if view.state == "running" and len(view.nodes) == count else None

    return cluster.until(check, f"{count} nodes in the plan")


def test_six_down_to_two_and_back_without_losing_a_step(cluster: Cluster) -> None:
    spec = tiny_job("tide", train={"steps": 40}, fault_tolerance={"f": 2})
    job = cluster.client.submit(spec).id
    view = settled(cluster, job, 6)
    cluster.slow_down(view.nodes, SLOW)
    assert view.tolerance == 2
    gone = []
    for count, tolerance in ((5, 1), (4, 1), (3, 0)):
        gone.append(view.nodes[0])
        cluster.kill(view.nodes[0], "sigkill")
        view = settled(cluster, job, count)
        assert view.tolerance == tolerance
    drained = view.nodes[0]
    cluster.client.drain(drained, "one copy is left: handed over, not killed")
    view = settled(cluster, job, 2)
    # Below n0 the job waits with its state in a checkpoint, and goes on when a node is back.
    last = view.nodes[0]
    cluster.client.drain(last)
    waiting = cluster.job_in(job, "waiting")
    assert waiting.cause == "too-few-nodes"
    cluster.client.undrain(last)
    settled(cluster, job, 2)
    cluster.client.undrain(drained)
    settled(cluster, job, 3)
    # Paused meanwhile: it must not come to its end before the nodes are up, however slow the machine.
    cluster.client.control(job, "pause")
    cluster.job_in(job, "paused")
    for node in gone:
        cluster.ctl("start-node", node)
    cluster.usable(6)
    cluster.client.control(job, "resume")
    view = settled(cluster, job, 6)
    assert view.tolerance == 2
    cluster.hurry(view.nodes)
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0
    cluster.verify(job)


def test_a_node_with_notice_is_out_of_the_plan_before_it_goes(cluster: Cluster) -> None:
    job = cluster.client.submit(tiny_job("notice", train={"steps": 20})).id
    nodes = cluster.at_step(job, 5).nodes
    cluster.slow_down(nodes, SLOW, SLOW_S)
    leaving = nodes[0]
    cluster.terminate(leaving)
    settled(cluster, job, NODES - 1)
    cluster.until(lambda: leaving not in cluster.home.alive() or None, f"{leaving} has left")
    (node,) = [view for view in cluster.client.nodes() if view.name == leaving]
    assert (node.state, node.cause) == ("left", "left")
    done = cluster.job_in(job, "done")
    assert (done.incidents, done.steps_lost) == (0, 0)
    assert job not in {incident.job for incident in cluster.client.incidents()}
    cluster.verify(job)


def test_all_of_a_cluster_with_notice_leave_their_state_in_a_checkpoint(cluster: Cluster) -> None:
    """What a batch system does that wants its machines back; they return, and nothing was lost."""
    job = cluster.client.submit(tiny_job("preempted", train={"steps": 20})).id
    nodes = cluster.at_step(job, 5).nodes
    cluster.slow_down(nodes, SLOW, SLOW_S)
    for node in nodes:
        cluster.terminate(node)
    waiting = cluster.job_in(job, "waiting")
    assert 5 <= waiting.step < 20
    cluster.until(lambda: not set(nodes) & cluster.home.alive().keys() or None, "all have left")
    for node in nodes:
        cluster.ctl("start-node", node)
    done = cluster.job_in(job, "done")
    assert (done.incidents, done.steps_lost) == (0, 0)
    cluster.verify(job)


def test_the_last_copy_lost_goes_back_to_the_checkpoint_and_says_how_far(cluster: Cluster) -> None:
    spec = tiny_job(
        "back",
        train={"steps": 28},
        fault_tolerance={"f": 0},
        checkpoint={"every": 7},
        resources={"device_memory": "6MiB"},  # four nodes at least: six make one pipeline
    )
    job = cluster.client.submit(spec).id
    view = cluster.at_step(job, 12)
    assert view.tolerance == 0
    cluster.kill(view.nodes[1], "device")
    done = cluster.job_in(job, "done")
    (incident,) = [i for i in cluster.client.incidents() if i.job == job]
    assert 1 <= done.steps_lost == incident.steps_lost < 14
    back = incident.parts.rollback
    assert back is not None
    assert (back.cause, back.steps_lost) == ("last-copy-lost", done.steps_lost)
    assert back.source.endswith(f"step-{back.step:08d}")
    cluster.verify(job)
