"""What somebody who watches asks of a real daemon: of a job in training, before and after a loss, and of one
without a job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oobleckd.client import Client
from oobleckd.daemon import keys
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.watch import Bundle, ScheduleView
from oobleckd.unixhttp import ApiProblem
from oobleckd.worker.telemetry.figures import rss_bytes
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.daemons import Daemon, daemon

SLOW, SLOW_S = 8, 6.0
"""Times as long as layers take, and for how many seconds: while much is asked the job lasts without work."""


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("watch")
    keys.make_node_keys(folder / "keys", "node-1")
    with daemon(folder) as made:
        yield made


@pytest.mark.parametrize(
    ("ask", "status", "detail"),
    [
        (lambda c: c.schedules(), 404, "no job is active"),
        (lambda c: c.schedule("x"), 404, "no job x"),
        (lambda c: c.goodput("x"), 404, "no job x"),
        (lambda c: c.impact("", ["node-1"]), 404, "no job is active"),
        (lambda c: c.bundle("inc-1"), 404, "no incident inc-1"),
        (lambda c: c.past(0.0, 1e6), 422, "too long"),
        (lambda c: c.past(float("nan"), 1.0), 422, "no time"),
        (lambda c: c._get("/v1/schedule", ScheduleView, step="x"), 422, "no number"),
    ],
)
def test_refusals_have_hints(idle: Daemon, ask: Any, status: int, detail: str) -> None:
    with pytest.raises(ApiProblem) as caught:
        ask(idle.client)
    assert caught.value.status == status
    assert detail in caught.value.problem
    assert caught.value.hint


def test_a_past_without_a_job(idle: Daemon) -> None:
    client = idle.client
    assert client.layers() == ()
    found = client.past(4e9)
    assert found.begins <= found.snapshot.at <= found.until
    assert (found.snapshot.jobs, found.snapshot.layers) == ((), ())


def test_a_daemon_that_keeps_no_past(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path / "keys", "node-1")
    with daemon(tmp_path, "--replay-mb", "0") as made:
        with pytest.raises(ApiProblem, match="not kept"):
            made.client.past(0.0)
        assert not (tmp_path / "state/past.sqlite").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("watched"), 4) as running:
        yield running


def newest(client: Client, job: str) -> ScheduleView | None:
    """The newest step that all devices told of."""
    try:
        found = client.schedule(job)
    except ApiProblem:
        return None
    return found if all(lane.ops for lane in found.lanes if not lane.dead) else None


def figures_and_log(cluster: Cluster, node: str) -> None:
    """What a node tells of itself while it trains."""
    client = cluster.client
    (said,) = next(each for each in client.nodes() if each.name == node).figures
    (pid,) = cluster.device_pids(node)
    assert said.device == f"{node}/0"
    assert said.used_bytes == said.rss_bytes == pytest.approx(rss_bytes(pid), rel=0.9)
    assert said.planned_bytes > 0
    assert said.rss_bytes < said.total_bytes
    metrics = client.metrics()
    assert f'oobleck_device_rss_bytes{{device="{node}/0"}}' in metrics
    assert f'oobleck_job_gradient_bytes_total{{device="{node}/0",' in metrics
    assert "MEMORY" in cluster.ctl("describe", "node", node).stdout
    told = client.node_log(node, 1000)
    assert told.complete, "the log of a cluster of this machine is a file"
    assert any("connected to the daemon" in line for line in told.lines)
    assert any("messages take the transport" in line for line in told.lines), "as its device prints"
    assert client.node_log(node, 1).lines == client.node_log(node, 2).lines[-1:]


def test_a_job_in_training_and_a_loss(cluster: Cluster, tmp_path: Path) -> None:
    client = cluster.client
    cluster.usable(cluster.num_nodes)
    train = {"steps": 24, "global_batch": 8, "micro_batch": 1}
    job = client.submit(tiny_job("watched", train=train)).id
    before = cluster.at_step(job, 3)
    cluster.slow_down(before.nodes, SLOW, SLOW_S)
    with pytest.raises(ApiProblem, match="only what is over is deleted"):
        client.delete(job)
    measured = cluster.until(lambda: newest(client, job), "op times")
    assert measured.step in client.schedules(job).steps
    modelled = client.schedule(job, measured.step, modelled=True)
    assert [lane.device for lane in modelled.lanes] == [lane.device for lane in measured.lanes]
    assert (measured.measured, modelled.measured) == (True, False)
    assert all(view.copies == len(before.pipelines) for view in client.layers(job))
    victim = before.pipelines[0].nodes[0]
    figures_and_log(cluster, victim)
    foretold = client.impact(job, [victim])
    assert not foretold.stops
    assert foretold.lost_layers == ()
    assert cluster.ctl("what-if", "--without", victim).returncode == 0
    assert client.nodes()[0].state == "active", "nothing happens to anybody"
    cluster.kill(victim, "sigkill")

    def recovered() -> IncidentView | None:
        return next((found for found in client.incidents() if found.job == job and not found.open), None)

    incident = cluster.until(recovered, "the recovery")
    spent = client.goodput(job)
    assert spent.total_s == pytest.approx(spent.useful_s + sum(spent.lost_s.values()))
    assert next(node for node in client.nodes() if node.name == victim).figures == ()
    with pytest.raises(ApiProblem, match=f"{victim} is not here"):
        client.node_log(victim)
    past = client.past(incident.at - 1.0, 30.0)
    assert past.snapshot.at <= incident.at
    assert any(change.kind == "incident" for change in past.changes)
    file = tmp_path / "incident.json"
    cluster.ctl("export-incident", incident.id, "--to", str(file))
    assert json.loads(file.read_text())["incident"]["id"] == incident.id
    assert client.bundle(incident.id).version == Bundle(1, "", incident, past).version
    assert f"of {job}" in cluster.ctl("describe", "schedule", "watched").stdout
    cluster.job_in(job, "done")
    cluster.verify(job)
    assert cluster.ctl("logs", job, "-n", "1").stdout.count("\n") == 1
    cluster.ctl("delete", f"job/{job}")
    assert job not in [view.id for view in client.jobs()]
    assert cluster.ctl("get", "job", job, check=False).returncode == 3
