"""A training cluster whose messages go by groups: a node dies in the middle of a step, and it shows in no
bit.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.matrix import survivable

NODES = 4
STEPS = 28


class Logs:
    """What the nodes have written about their groups."""

    def __init__(self, cluster: Cluster) -> None:
        self.text = "\n".join(file.read_text() for file in cluster.home.logs.glob("node-*.log"))
        self.opened = {
            int(epoch) for epoch in re.findall(r"channel \S+ > \S+ is open in epoch (\d+)", self.text)
        }
        self.lost = {int(epoch) for epoch in re.findall(r"group of epoch (\d+) is over: without", self.text)}


def test_a_kill_under_gloo_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_BACKEND", "gloo")
    with Cluster(tmp_path, NODES) as cluster:
        job = cluster.client.submit(tiny_job("backends", train={"steps": STEPS, "global_batch": 6})).id
        cluster.until(lambda: Logs(cluster).opened or None, "a channel to open")
        view = cluster.at_step(job, 2)
        victim = next(node for p in view.pipelines for node in p.nodes if survivable(view, {node}))
        cluster.client.kill(victim, "device", at="backward", round=view.step + 4)
        done = cluster.job_in(job, "done")
        logs = Logs(cluster)
        assert [hit["point"] for hit in cluster.fired()] == ["backward"]
        assert (done.step, done.steps_lost) == (STEPS, 0)
        cluster.verify(job)
    assert "gloo groups, for a test" in logs.text
    assert logs.lost & logs.opened, "the loss ended no group that had carried messages"
    assert max(logs.opened) > max(logs.lost), "no new group was used after the loss"
