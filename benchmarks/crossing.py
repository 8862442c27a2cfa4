"""Real processes after a loss: layers that sleep, nodes killed, steps in the planner's order against its
timeline.

Owns the live part of ``rerouted.py``. A job is killed from once it has run a few steps; what counts are the
steps after the planner's order is in force, which is when the incident is over.
"""

from __future__ import annotations

import re
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, ClusterFailed, depths
from benchmarks.sleeping import BLOCKS, environment_asleep
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobviews import StepView

_WARM_UP = 3
_STEP = re.compile(r"step ([0-9.e+-]+) s as modelled")


@dataclass(frozen=True, slots=True)
class Shape:
    """``pipelines`` of ``stages``, ``micro_batches`` in all; ``dead``: (pipeline, stage) of those who are
    killed.
    """

    pipelines: int
    stages: int
    micro_batches: int
    dead: tuple[tuple[int, int], ...]


LIVE = {
    "2x2 one": Shape(2, 2, 8, ((0, 1),)),
    "2x3 one": Shape(2, 3, 8, ((0, 1),)),
    "2x4 one": Shape(2, 4, 8, ((0, 1),)),
    "4x2 one": Shape(4, 2, 16, ((0, 1),)),
    "3x2 two": Shape(3, 2, 9, ((0, 1), (1, 0))),
    "4x2 two": Shape(4, 2, 16, ((0, 1), (1, 0))),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "fused": {},
    "decoupled": {"backward": "decoupled", "chunks": 1},
    "staggered": {"backward": "decoupled", "chunks": 1, "update": "staggered"},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a step: before the loss as the template has it (0 with staggered updates: it has none) and
    as measured; after it as measured, the median and the fastest, and as the planner's timeline has it.
    """

    name: str
    schedule: str
    template_s: float
    before_s: float
    measured_s: float
    fastest_s: float
    modelled_s: float

    @property
    def error(self) -> float:
        """Of what was measured, as a share of the timeline."""
        return self.measured_s / self.modelled_s - 1

    @property
    def error_before(self) -> float | None:
        """The same before the loss: of engine and machine, routes do not cross."""
        return self.before_s / self.template_s - 1 if self.template_s else None


def job_of(name: str, shape: Shape, schedule: str) -> Job:
    """Blocks that sleep; embedding and head compute next to nothing."""
    config: dict[str, Any] = {
        "n_layer": BLOCKS * shape.stages, "n_embd": 32, "n_head": 4, "vocab_size": 256, "n_positions": 16,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return parse_job(
        {
            "name": re.sub(r"[^a-z0-9]+", "-", f"{name}-{schedule}"),
            "model": {"family": "gpt2", "config": config},
            "train": {"steps": 10_000, "global_batch": shape.micro_batches, "micro_batch": 1, "sequence": 16},
            "optimizer": {"clip_norm": 0.0},
            "fault_tolerance": {"f": shape.pipelines - 1, "policy": "slipstream"},
            "schedule": SCHEDULES[schedule],
            "resources": {
                "min_pipeline_nodes": shape.stages,
                "max_nodes": shape.stages * shape.pipelines,
            },
            "checkpoint": {"every": 0},
        }
    )


def measure(names: list[str], steps: int, times: int, folder: Path) -> list[Measured]:
    """A row for each shape and schedule, medians of ``times`` jobs; one cluster for shapes of as
    many nodes.
    """
    environment = environment_asleep(folder / "asleep.json")
    found = []
    for num_nodes in sorted({LIVE[name].pipelines * LIVE[name].stages for name in names}):
        with Cluster(folder / str(num_nodes), num_nodes, environment=environment) as cluster:
            for name in names:
                if LIVE[name].pipelines * LIVE[name].stages != num_nodes:
                    continue
                for schedule in SCHEDULES:
                    runs = [_job(cluster, name, schedule, steps) for _ in range(times)]
                    found.append(sorted(runs, key=lambda row: row.error)[len(runs) // 2])
                    print(found[-1], f"{found[-1].error:+.1%}", file=sys.stderr, flush=True)
    return found


def _job(cluster: Cluster, name: str, schedule: str, steps: int) -> Measured:
    shape = LIVE[name]
    job = cluster.submit(job_of(name, shape, schedule))
    view = cluster.in_state(job, "running")
    if depths(view) != [shape.stages] * shape.pipelines:
        raise ClusterFailed(f"{name}: pipelines of {depths(view)} stages")
    template_s = 0.0
    if SCHEDULES[schedule].get("update") != "staggered":
        (template,) = [found for found in cluster.client.templates(job) if found.instances]
        share = max(len(pipeline.micro_batches) for pipeline in view.pipelines)
        template_s = template.fill_s + (share - 1) * template.period_s
    before_s = statistics.median(_steps(cluster, job, 1, steps))
    dead = [view.pipelines[pipeline].nodes[stage] for pipeline, stage in shape.dead]
    for number, node in enumerate(dead, 1):
        cluster.kill(node)
        incident = _over(cluster, job, number)
    modelled_s = _modelled_s(incident)
    after = _steps(cluster, job, cluster.client.job(job).step, steps)
    cluster.end(job)
    for node in dead:
        cluster.start(node)
    return Measured(name, schedule, template_s, before_s, statistics.median(after), min(after), modelled_s)


def _steps(cluster: Cluster, job: str, since: int, steps: int) -> list[float]:
    """Seconds of ``steps`` steps, some after step ``since``."""
    wanted = since + _WARM_UP + steps + 1

    def check() -> list[StepView] | None:
        found = list(cluster.client.steps(job))
        return found if found and found[-1].step >= wanted else None

    ends = [step.at for step in cluster.until(check, f"step {wanted}") if step.step >= since + _WARM_UP]
    return [after - before for before, after in pairwise(ends)]


def _over(cluster: Cluster, job: str, number: int) -> IncidentView:
    """The last incident of ``job``, once it and ``number`` in all are over."""

    def check() -> IncidentView | None:
        mine = [incident for incident in cluster.client.incidents() if incident.job == job]
        over = len(mine) == number and not any(incident.open for incident in mine)
        return mine[-1] if over else None

    return cluster.until(check, f"incident {number} of {job} to be over")


def _modelled_s(incident: IncidentView) -> float:
    match = _STEP.search(incident.reason)
    if match is None:
        raise ClusterFailed(f"no timeline: {incident.reason}")
    return float(match[1])
