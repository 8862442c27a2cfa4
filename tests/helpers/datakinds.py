"""A job's way through everything that can happen to it, on each kind of data: nobody may remember which
sample comes next, so no bit may tell that way.

Owns the kinds, and the way: a death inside a step, half of the nodes gone and back, a checkpoint taken up by
another job. A job on the same data that nothing happens to is compared with by the caller (``verify``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oobleckd.planner.policy import ROLLING_BACK
from oobleckd.protocol.job import Job
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import Manner
from tests.helpers.mixture import three_sources

NODES = 6
STEPS = 70
"""Of the whole job: it is cancelled before, and taken up by another one."""
MIXES_AT = 20
HALF = NODES // 2


@dataclass(frozen=True)
class DataKind:
    """``tables``: of a job on such data, which lies under a folder."""

    name: str
    tables: Callable[[Path], dict[str, Any]]


def _mixture(folder: Path) -> dict[str, Any]:
    return {"data": three_sources(folder, MIXES_AT)}


KINDS = (DataKind("mixture", _mixture),)


def job_on(name: str, data: Mapping[str, dict[str, Any]], manner: Manner) -> Job:
    """A job with the tables ``data`` that trains in ``manner``, and has a checkpoint now and then to fall
    back to.
    """
    tables = manner.tables()
    for section, values in data.items():
        tables[section] = tables.get(section, {}) | values
    tables["checkpoint"] = {"every": 6, "keep": 4}
    memory = tables["resources"].get("device_memory")
    if memory and manner.policy not in ROLLING_BACK:  # for the copy that a checkpoint is written from
        tables["resources"] = tables["resources"] | {"device_memory": f"{int(memory[:-3]) + 4}MiB"}
    return tiny_job(name, train={"steps": STEPS}, **tables)


def go_through(cluster: Cluster, kind: DataKind, folder: Path, manner: Manner, phase: str) -> str:
    """All of it, one after the other; a device dies in ``phase``. Returns the id of the job that ended."""
    cluster.heal()
    cluster.usable(NODES)
    name, data = f"{kind.name}-{manner.name}", kind.tables(folder)
    job = cluster.client.submit(job_on(name, data, manner)).id
    view = cluster.at_step(job, 3)
    before = len(cluster.fired())
    cluster.client.kill(view.nodes[0], "device", at=phase, round=view.step + 2)
    cluster.until(lambda: cluster.fired()[before:] or None, f"a death in {phase}")
    cluster.usable(NODES)
    cluster.at_step(job, MIXES_AT - 2)
    gone = cluster.client.job(job).nodes[:HALF]
    for node in gone:
        cluster.kill(node, "sigkill")
    cluster.at_step(job, MIXES_AT + 2)
    for node in gone:
        cluster.ctl("start-node", node)
    cluster.usable(NODES)
    cluster.at_step(job, cluster.client.job(job).step + 2)
    cluster.client.control(job, "cancel")
    assert cluster.job_in(job, "cancelled").incidents
    resumed = cluster.client.submit(job_on(name, data, manner), resume="latest").id
    cluster.job_in(resumed, "done")
    return resumed
