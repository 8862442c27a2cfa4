"""Deaths while copies are made beforehand, on a real cluster: of a source, of the node that is to leave, of the target, and of the daemon.

Owns the shape of a job whose copies take about as long as a step, so that they are made beforehand at all, and how such a run goes: four nodes train, a
fifth stands by, and one of the four is drained. The one that stood by gets its layers while all four train on, and then its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from oobleckd.protocol.api import JobView, TemplateView
from oobleckd.protocol.job import Job
from planner.beforehand import LEAST_STEPS, MOST_STEPS
from planner.policy import SHADOWING
from planner.profile import Profile
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import Manner

PREPARING = (("ahead", "source"), ("ahead", "leaver"), ("stage", "target"), ("prepared", "daemon"))
"""(phase, who dies in it). A source dies once it has sent something, a target once it has something, the daemon once it has told both."""
STEPS = 60
_BLOCKS = 6
_BYTES = 12  # of a parameter: weight and two moments
_NODES = 4
_MARGIN = 1.1  # what is modelled stays so far inside of the bounds between which copies are made beforehand
_GUESSES = 5  # at a shape for it: each job measures anew how fast this machine is
_names = count(1)


@dataclass(frozen=True)
class Cast:
    """Nodes by what they are to do. ``source`` holds what ``leaver`` holds, and each of them sends about half of it."""

    leaver: str
    source: str
    target: str


def die_preparing(cluster: Cluster, phase: str, victim: str, manner: Manner) -> JobView:
    """Carry it out; returns the finished job. AssertionError says what broke. One node of the cluster is drained already."""
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
        cluster.until(lambda: _begun(cluster, view.id) or None, "copies to begin")
        cluster.kill_daemon()
        cluster.start_daemon()
    cluster.until(lambda: _left(cluster, view.id, cast.leaver) or None, f"{cast.leaver} to leave")
    cluster.client.undrain(cast.leaver, "preparing")
    done = cluster.job_in(view.id, "done")
    assert (done.steps_lost, done.step) == (0, done.steps), done
    cluster.verify(view.id)
    return done


@dataclass(frozen=True)
class Shape:
    """Of a job: blocks of ``width``, ``share`` micro-batches of ``tokens`` for each pipeline. Wide layers and few tokens: much to copy for what is computed."""

    width: int = 256
    tokens: int = 8
    share: int = 2

    def num_bytes(self, manner: Manner) -> int:
        """Of a stage's state: half of the blocks, and those of the other stage where devices shadow it."""
        stages = 2 if manner.policy in SHADOWING else 1
        return stages * _BLOCKS // 2 * 12 * self.width**2 * _BYTES

    def next(self, copies_s: float, fill_s: float, period_s: float) -> Shape:
        """What to try where copies of ``copies_s`` met steps of ``fill_s + (share - 1) * period_s``."""
        shortest_s = fill_s  # a step of one micro-batch
        if copies_s < LEAST_STEPS * _MARGIN * shortest_s:
            return Shape(2 * self.width, max(2, self.tokens // 2), self.share)
        return Shape(self.width, self.tokens, max(1, 1 + round((copies_s - fill_s) / period_s)))


def _started(cluster: Cluster, manner: Manner) -> JobView:
    """A job at work in which a stage's copies take about as long as a step: of a shape that makes it so on this machine."""
    shape, seen = Shape(), []
    for _ in range(_GUESSES):
        job = cluster.client.submit(_job(manner, shape)).id
        view = cluster.at_step(job, 2)
        manner.check(view)
        (template,) = [each for each in cluster.client.templates(job) if each.instances]
        copies_s, step_s = _copies_s(manner, shape), _step_s(template, shape.share)
        if LEAST_STEPS * _MARGIN <= copies_s / step_s <= MOST_STEPS / _MARGIN:
            return view
        cluster.client.control(job, "cancel")
        cluster.job_in(job, "cancelled")
        seen.append(f"{shape}: copies of {copies_s:.3g} s, a step of {step_s:.3g} s")
        shape = shape.next(copies_s, template.fill_s, template.period_s)
    raise AssertionError("\n".join(seen))


def _job(manner: Manner, shape: Shape) -> Job:
    """Two pipelines of two nodes."""
    config = {
        "n_layer": _BLOCKS, "n_embd": shape.width, "n_head": 4, "n_positions": 32, "vocab_size": 256,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return tiny_job(
        f"preparing-{next(_names)}-{manner.name}",
        **manner.tables()
        | {
            "model": {"config": config},
            "train": {
                "steps": STEPS,
                "global_batch": 2 * shape.share,
                "micro_batch": 1,
                "sequence": shape.tokens,
            },
            "resources": {"device_memory": 0, "min_pipeline_nodes": 2, "max_nodes": _NODES},
        },
    )


def _copies_s(manner: Manner, shape: Shape) -> float:
    """Of a stage, as the planner has it."""
    profile = Profile("", "", ())
    return profile.link_latency_s + shape.num_bytes(manner) / profile.link_bytes_per_s


def _step_s(template: TemplateView, share: int) -> float:
    return template.fill_s + (share - 1) * template.period_s


def _cast(cluster: Cluster, view: JobView) -> Cast:
    first, second = view.pipelines
    assert [len(first.nodes), len(second.nodes)] == [2, 2], view
    (target,) = [node.name for node in cluster.client.nodes() if node.state == "standby"]
    return Cast(first.nodes[0], second.nodes[0], target)


def _begun(cluster: Cluster, job: str) -> bool:
    changes = cluster.client.events(since=0, follow=False)
    return any(
        change.kind == "plan"
        and change.text.startswith(f"{job}: ")
        and "are copied beforehand" in change.text
        for change in changes
    )


def _fired(cluster: Cluster, before: int, phase: str, node: str) -> bool:
    hits = cluster.fired()[before:]
    return any(hit["point"] == phase and str(hit["device"]).startswith(f"{node}/") for hit in hits)


def _left(cluster: Cluster, job: str, node: str) -> bool:
    """Whether ``job`` runs without ``node``, or has ended."""
    view = cluster.client.job(job)
    return view.state == "done" or (view.state == "running" and node not in view.nodes)
