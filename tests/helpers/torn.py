"""A writer killed in the middle of a checkpoint's file on a real cluster, from a seed: a torn one is never
loaded.

Under a policy that rolls back the job rolls back to the checkpoint before at once; under the others it goes
on, and the next one is whole again. Either way every file that a manifest names must be what the manifest
says, and the job must end bit for bit as a run without failures.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

from oobleckd.ctl.compare import read_checkpoint
from oobleckd.planner.policy import ROLLING_BACK, WITH_REDUNDANT_LAYERS
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import PolicyName
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import Manner

POINT = "checkpoint-write"
EVERY = 3


def manner_of_torn(seed: int) -> Manner:
    """Every second seed one that loads the checkpoint before; the other policies in turn."""
    others = [policy for policy in get_args(PolicyName) if policy not in ROLLING_BACK]
    return Manner(min(ROLLING_BACK) if seed % 2 == 0 else others[seed // 2 % len(others)])  # type: ignore[arg-type]


def tables_of(manner: Manner) -> dict[str, dict[str, Any]]:
    """Of job.toml: those of the manner, with room for the copy that a checkpoint is written from; who holds
    the layers of another has that already.
    """
    tables = manner.tables()
    roomy = tables["resources"] if manner.policy in WITH_REDUNDANT_LAYERS else {"device_memory": "12MiB"}
    return tables | {"checkpoint": {"every": EVERY}, "resources": roomy}


def torn_seed(cluster: Cluster, seed: int, manner: Manner | None = None) -> str:
    """A job one writer of which dies in the middle of a file. Returns what was done."""
    rng = random.Random(f"torn {seed}")
    manner = manner or manner_of_torn(seed)
    cluster.heal()
    job = cluster.client.submit(tiny_job(f"torn-{seed}", train={"steps": 30}, **tables_of(manner))).id
    view = cluster.at_step(job, EVERY)  # the first is on its way: there is one to roll back to, or will be
    victim = rng.choice(sorted({node for pipeline in view.pipelines for node in pipeline.nodes}))
    before = len(cluster.fired())
    cluster.client.kill(victim, "device", at=POINT, round=view.step + 2 + rng.randrange(2 * EVERY))
    hit = cluster.until(lambda: _hit(cluster, before, victim), f"{victim} to die in the middle of a file")
    left = _left_torn(cluster, job)
    done = cluster.job_in(job, "done")
    (incident,) = [i for i in cluster.client.incidents() if i.job == job]
    told = _check_rollback(manner, incident, int(str(hit["round"])))
    for folder in _complete(cluster, job):
        read_checkpoint(folder)
        assert not list(folder.glob("*.tmp")), f"{folder} has what a killed writer left"
    cluster.verify(job)
    assert done.step == done.steps
    return f"{victim} at the boundary before round {hit['round']}, {left} files begun and not whole; {told}"


def _hit(cluster: Cluster, before: int, node: str) -> dict[str, object] | None:
    hits = [hit for hit in cluster.fired()[before:] if hit["point"] == POINT]
    return next((hit for hit in hits if str(hit["device"]).startswith(f"{node}/")), None)


def _check_rollback(manner: Manner, incident: IncidentView, round_: int) -> str:
    """Under a policy that rolls back: to a checkpoint from before the torn one."""
    if manner.policy not in ROLLING_BACK:
        assert incident.steps_lost == 0, incident
        return "went on"
    assert incident.steps_lost > 0, incident
    back = incident.parts.rollback
    assert back is not None, incident
    if back.source == "init":
        return f"back {incident.steps_lost} steps to the start"
    assert back.step < round_, f"{back}, and the one of step {round_} is torn"
    return f"back {incident.steps_lost} steps to step {back.step}"


def _folder(cluster: Cluster, job: str) -> Path:
    return Path(cluster.client.status().state_dir) / "checkpoints" / job


def _left_torn(cluster: Cluster, job: str) -> int:
    """Files that were begun and never will be whole, as they lie there now."""
    return len(list(_folder(cluster, job).glob("*.partial/*.tmp")))


def _complete(cluster: Cluster, job: str) -> list[Path]:
    found = [path for path in _folder(cluster, job).glob("step-*") if (path / "manifest.json").exists()]
    assert found, f"{job} left no checkpoint"
    return found
