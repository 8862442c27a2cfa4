"""Evaluations on a real cluster: the same bits whoever computes them, and no bit of the weights moved by
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from oobleckd.ctl import reference
from oobleckd.ctl.compare import compare
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.datakinds import KINDS, data_of, eval_of
from tests.helpers.matrix import rounds_of_evaluation

pytestmark = pytest.mark.slow

NODES, STEPS = 6, 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("evaluation"), NODES) as running:
        yield running


def job_on(cluster: Cluster, name: str, kind: str, *, evaluates: bool = True, **resources: Any) -> Job:
    """A job whose layers fit one node, on data of a kind; every evaluation is of several rounds."""
    job = tiny_job(
        f"{name}-{kind}",
        data=data_of(kind, cluster.state),
        train={"steps": STEPS},
        eval=eval_of(kind, cluster.state),
        resources={"device_memory": "64MiB", **resources},
        fault_tolerance={"f": 0 if resources.get("max_nodes") == 1 else 1, "policy": "oobleck"},
    )
    return job if evaluates else msgspec.structs.replace(job, eval=Eval())


def losses_of(cluster: Cluster, job: str) -> dict[tuple[int, str], tuple[str, int]]:
    """Of every evaluation, by step and source: the loss, bit by bit, and its targets."""
    found = cluster.client.evaluations(job)
    return {(done.step, each.source): (each.loss_hex, each.targets) for done in found for each in done.losses}


def trained(cluster: Cluster, spec: Job, num_pipelines: int) -> JobView:
    """The job when it has begun: in so many pipelines."""
    cluster.heal()
    view = cluster.at_step(cluster.client.submit(spec).id, 1)
    assert len(view.pipelines) == num_pipelines, view.pipelines
    return view


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_any_nodes(cluster: Cluster, kind: str) -> None:
    """One node, two pipelines of two, and six nodes of which three die, the first in an evaluation."""
    one = trained(cluster, job_on(cluster, "one", kind, max_nodes=1), 1)
    cluster.job_in(one.id, "done")
    square = trained(cluster, job_on(cluster, "square", kind, max_nodes=4, min_pipeline_nodes=2), 2)
    cluster.job_in(square.id, "done")
    spec = job_on(cluster, "fewer", kind, min_pipeline_nodes=2)
    fewer, before = trained(cluster, spec, 3), len(cluster.fired())
    doomed = [pipeline.nodes[-1] for pipeline in fewer.pipelines]
    round_ = rounds_of_evaluation(spec, fewer.step + 2)[1]
    cluster.client.kill(doomed[0], "device", at="forward", round=round_)
    cluster.until(lambda: cluster.fired()[before:] or None, "a death in an evaluation")
    for number, node in enumerate(doomed, 1):
        cluster.kill(node, "sigkill")
        cluster.until(lambda left=NODES - number: trains_on(cluster, fewer.id, left), "the recovery")
    cluster.job_in(fewer.id, "done")
    number = len(spec.eval_sources) * sum(map(spec.eval_rounds.due, range(STEPS + 1)))
    first, *others = (losses_of(cluster, view.id) for view in (one, square, fewer))
    assert len(first) == number
    assert others == [first, first]
    for view in (one, square, fewer):
        assert f"{number} of {number} evaluations" in cluster.verify(view.id)


def trains_on(cluster: Cluster, job: str, nodes: int) -> bool | None:
    """Whether the job is in training on so many nodes; None: not yet."""
    view = cluster.client.job(job)
    assert view.state != "done", "it was over before its nodes were gone"
    return (view.state == "running" and len(view.nodes) == nodes) or None


@pytest.mark.parametrize("kind", ["bytes"])
def test_no_bit_of_the_weights_tells_whether_there_are_evaluations(cluster: Cluster, kind: str) -> None:
    """Of a job that trains on the same text: what is held out is not trained on."""
    runs = []
    for name, evaluates in (("with", True), ("without", False)):
        spec = job_on(cluster, name, kind, evaluates=evaluates, min_pipeline_nodes=2)
        view = cluster.job_in(trained(cluster, spec, 3).id, "done")
        assert bool(losses_of(cluster, view.id)) == evaluates
        facts = reference.facts_of(cluster.client.steps(view.id))
        runs.append(reference.evidence(spec, facts, view.checkpoint))
    verdict = compare(*runs)
    assert verdict.identical, verdict.findings
    assert verdict.losses == STEPS


def test_a_checkpoint_is_evaluated_as_it_was_in_training(cluster: Cluster) -> None:
    """By its job and by its folder, on the job's own text and on some that is named; no state is written."""
    spec = job_on(cluster, "asked", "bytes", min_pipeline_nodes=2)
    view = cluster.job_in(trained(cluster, spec, 3).id, "done")
    last = {source: found for (step, source), found in losses_of(cluster, view.id).items() if step == STEPS}
    named = [word for each in spec.eval.source for word in ("--source", f"{each.name}={each.path}")]
    for words in ([view.id], [view.checkpoint, "--sequences", "16", *named]):
        said = msgspec.json.decode(cluster.ctl("eval", *words, "-o", "json").stdout)
        assert {each["source"]: (each["loss_hex"], each["targets"]) for each in said["items"]} == last
        job = cluster.client.jobs()[-1]
        assert (job.name, job.state, job.step, job.checkpoint) == (f"{spec.name}-eval", "done", STEPS, "")


def test_a_checkpoint_is_evaluated_while_nodes_die(cluster: Cluster) -> None:
    spec = job_on(cluster, "deadly", "bytes", min_pipeline_nodes=2)
    begun = trained(cluster, spec, 3)
    view = cluster.job_in(begun.id, "done")
    before, victim = len(cluster.fired()), begun.nodes[0]
    cluster.client.kill(victim, "device", at="forward", round=1)
    said = msgspec.json.decode(cluster.ctl("eval", view.id, "-o", "json").stdout)
    assert cluster.fired()[before:], "nobody died"
    last = {source: found for (step, source), found in losses_of(cluster, view.id).items() if step == STEPS}
    assert {each["source"]: (each["loss_hex"], each["targets"]) for each in said["items"]} == last
    assert cluster.client.jobs()[-1].incidents
