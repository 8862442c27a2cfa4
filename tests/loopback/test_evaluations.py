"""Evaluations on a real cluster: a node that dies in one changes no bit of it, nor of what is trained."""

from __future__ import annotations

from pathlib import Path

from oobleckd.planner.plan import node_of
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.matrix import rounds_of_evaluation

BEGIN, EVERY = 4, 8


def test_a_death_in_an_evaluation_does_not_show(tmp_path: Path) -> None:
    """The head dies with losses that nobody has heard."""
    text = tmp_path / "held.txt"
    text.write_bytes(bytes(range(32, 127)) * 20)
    source = {"name": "held", "kind": "text", "path": str(text)}
    table = {"every": EVERY, "sequences": 20, "at_start": True, "source": [source]}
    spec = tiny_job("evaluated", train={"steps": 24}, eval=table)
    with Cluster(tmp_path / "state", 4) as cluster:
        job = cluster.client.submit(spec).id
        view = cluster.at_step(job, BEGIN)
        victim = view.pipelines[0].nodes[-1]
        first, second = rounds_of_evaluation(spec, view.step + EVERY // 2)
        cluster.client.kill(victim, "device", at="forward", round=second)
        done = cluster.job_in(job, "done")
        assert [(node_of(hit["device"]), hit["round"]) for hit in cluster.fired()] == [(victim, first + 1)]
        assert (done.step, done.steps_lost) == (24, 0)
        (incident,) = [each for each in cluster.client.incidents() if each.job == job]
        assert incident.layer_gradients == 0
        assert "4 of 4 evaluations" in cluster.verify(job)
