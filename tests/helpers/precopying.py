"""Deaths while pre-copies are made, on a real cluster: of a source, of the node that is to leave, of the
target, and of the daemon.

Owns a job whose copies take about as long as a step, so that they are pre-copied at all, and how such a run
goes: four nodes train, a fifth stands by, and one of the four is drained. The one that stood by gets its
layers while all four train on, and then its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS
from oobleckd.protocol.changes import CopiesBegun
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import Manner

PRECOPYING = (("ahead", "source"), ("ahead", "leaver"), ("stage", "target"), ("prepared", "daemon"))
"""(phase, who dies in it). A source dies once it has sent something, a target once it has something, the
daemon once it has told both.
"""
STEPS = 24
_SLOW, _SLOW_S = 4.0, 6.0  # while the daemon is away the job lasts, without work
_BLOCKS, _WIDTH = 6, 128
_BYTES = 12  # of a parameter: weight and two moments
_NODES = 4
_SHARE = 2  # micro-batches of a pipeline
_names = count(1)


@dataclass(frozen=True)
class Cast:
    """Nodes by what they are to do. ``source`` holds what ``leaver`` holds, and each of them sends about half
    of it.
    """

    leaver: str
    source: str
    target: str


def die_in_precopy(cluster: Cluster, phase: str, victim: str, manner: Manner) -> JobView:
    """Carry it out; returns the finished job. AssertionError says what broke. One node of the cluster is
    drained already.
    """
    before = len(cluster.fired())
    view = _started(cluster, manner)
    cast = _cast(cluster, view)
    doomed = "" if victim == "daemon" else getattr(cast, victim)
    if doomed:
        cluster.client.kill(doomed, "device", at=phase, round=0)
    cluster.client.drain(cast.leaver, "preparing")
    if doomed:
        cluster.until(lambda: _fired(cluster, before, phase, doomed) or None, f"{doomed} to die at {phase}")
    else:
        cluster.told(CopiesBegun, lambda begun: begun.job == view.id, "copies to begin")
        cluster.slow_down(view.nodes, _SLOW, _SLOW_S)
        cluster.kill_daemon()
        cluster.start_daemon()
    cluster.until(lambda: _left(cluster, view.id, cast.leaver) or None, f"{cast.leaver} to leave")
    cluster.client.undrain(cast.leaver, "preparing")
    done = cluster.job_in(view.id, "done")
    assert (done.steps_lost, done.step) == (0, done.steps), done
    cluster.verify(view.id)
    return done


def _started(cluster: Cluster, manner: Manner) -> JobView:
    """A job at work, of which a stage's copies take about as long as a step.

    How long a step takes is the machine's; so a first job is measured, and the one that counts says that its
    nodes are linked accordingly.
    """
    measured = _at_work(cluster, _job(manner, link=0))
    (template,) = [each for each in cluster.client.templates(measured.id) if each.instances]
    cluster.client.control(measured.id, "cancel")
    cluster.job_in(measured.id, "cancelled")
    step_s = template.fill_s + (_SHARE - 1) * template.period_s
    view = _at_work(cluster, _job(manner, link=round(_state_bytes(manner) / step_s)))
    manner.check(view)
    return view


def _at_work(cluster: Cluster, job: Job) -> JobView:
    return cluster.at_step(cluster.client.submit(job).id, 2)


def _job(manner: Manner, link: int) -> Job:
    """Two pipelines of two nodes, between which ``link`` bytes go in a second (0: not said)."""
    config = {
        "n_layer": _BLOCKS, "n_embd": _WIDTH, "n_head": 4, "n_positions": 32, "vocab_size": 256,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return tiny_job(
        f"preparing-{next(_names)}-{manner.name}",
        **manner.tables()
        | {
            "model": {"config": config},
            "train": {"steps": STEPS, "global_batch": 2 * _SHARE, "micro_batch": 1, "sequence": 8},
            "resources": {"device_memory": 0, "min_pipeline_nodes": 2, "max_nodes": _NODES, "link": link},
        },
    )


def _state_bytes(manner: Manner) -> int:
    """Of a stage's state: half of the blocks, and those of the other stage where devices hold it
    redundantly.
    """
    stages = 2 if manner.policy in WITH_REDUNDANT_LAYERS else 1
    return stages * _BLOCKS // 2 * 12 * _WIDTH**2 * _BYTES


def _cast(cluster: Cluster, view: JobView) -> Cast:
    first, second = view.pipelines
    assert [len(first.nodes), len(second.nodes)] == [2, 2], view
    (target,) = [node.name for node in cluster.client.nodes() if node.state == "standby"]
    return Cast(first.nodes[0], second.nodes[0], target)


def _fired(cluster: Cluster, before: int, phase: str, node: str) -> bool:
    hits = cluster.fired()[before:]
    return any(hit["point"] == phase and str(hit["device"]).startswith(f"{node}/") for hit in hits)


def _left(cluster: Cluster, job: str, node: str) -> bool:
    """Whether ``job`` runs without ``node``, or has ended."""
    view = cluster.client.job(job)
    return view.state == "done" or (view.state == "running" and node not in view.nodes)
