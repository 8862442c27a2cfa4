"""oobleckd under kill -9 of device processes, 2 pipelines of 2 stages: what each kill costs."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from benchmarks.cluster import Cluster, depths, job_of
from benchmarks.cost import Cost
from benchmarks.peers import shape
from benchmarks.peers.recovering import NORMAL_STEPS
from oobleckd.protocol.api import IncidentView, JobView, StepView

_WHOLE = [2, 2]
_STEPS_FOR_MEDIAN = 20


def kills(cluster: Cluster, rounds: int, rng: random.Random) -> Iterator[Cost]:
    """Kill one device process after the other, each at a random moment of a step of a job that is whole again."""
    job = cluster.submit(job_of("recovery", steps=10**6, f=1, cap_bytes=cluster.caps()[2]))
    cluster.in_state(job, "running")
    for _ in range(rounds):
        before = _normal(cluster, job)
        time.sleep(rng.random() * before.step_s)
        before = cluster.client.job(job)
        victim = rng.choice([node for pipeline in before.pipelines for node in pipeline.nodes])
        pid = next(node.pids[0] for node in cluster.client.nodes() if node.name == victim)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        after = _whole(cluster, job, before.incidents)
        steps = cluster.client.steps(job, since=max(0, before.step - _STEPS_FOR_MEDIAN))
        incidents = [incident for incident in cluster.client.incidents() if incident.job == job]
        yield cost_of(steps, incidents[before.incidents :], killed_at, before.epoch, after.epoch)
    cluster.end(job)


def _normal(cluster: Cluster, job: str) -> JobView:
    """Wait for some steps that nothing disturbs, on two pipelines of two stages."""
    start = -1

    def check() -> JobView | None:
        nonlocal start
        view = cluster.client.job(job)
        whole = view.state == "running" and depths(view) == _WHOLE
        start = -1 if not whole else view.step if start < 0 else start
        return view if whole and view.step >= start + NORMAL_STEPS else None

    return cluster.until(check, f"{NORMAL_STEPS} undisturbed steps on pipelines of {_WHOLE} stages")


def _whole(cluster: Cluster, job: str, incidents_before: int) -> JobView:
    """Wait until the incident is closed and a step is committed on two pipelines of two stages again."""

    def check() -> JobView | None:
        view = cluster.client.job(job)
        closed = view.state == "running" and view.incidents > incidents_before and depths(view) == _WHOLE
        if not closed or any(incident.open for incident in cluster.client.incidents()):
            return None
        last = cluster.client.steps(job, since=view.step)
        return view if last and last[-1].epoch >= view.epoch else None

    return cluster.until(check, "two pipelines of two stages again after a kill")


def cost_of(
    steps: Sequence[StepView],
    incidents: Sequence[IncidentView],
    killed_at: float,
    epoch: int,
    whole_epoch: int,
) -> Cost:
    """What a kill cost, from the steps around it.

    ``epoch`` was in force at the kill, so the first step of a later one is the first that was committed without
    the dead device; ``whole_epoch`` is that of the plan with all devices again.
    """
    earlier = [step.at for step in steps if step.at <= killed_at][-_STEPS_FOR_MEDIAN:]
    after = [step for step in steps if step.epoch > epoch]
    numbers = [step.step for step in steps]
    missing = sum(later - earlier - 1 for earlier, later in pairwise(sorted(set(numbers))))
    redone = sum(incident.steps_lost for incident in incidents)
    work = sum(incident.step_layer_gradients for incident in incidents)
    return Cost(
        step_s=statistics.median(later - before for before, later in pairwise(earlier)),
        next_step_s=after[0].at - killed_at,
        steps_redone=redone,
        attempts_discarded=sum(step.outcome == "repeated" for step in after),
        samples_lost=missing * shape.GLOBAL_BATCH,
        samples_short=sum(shape.GLOBAL_BATCH - step.samples for step in after),
        whole_s=next(step.at for step in after if step.epoch >= whole_epoch) - killed_at,
        redone_share=sum(i.layer_gradients for i in incidents) / work if work else None,
    )
