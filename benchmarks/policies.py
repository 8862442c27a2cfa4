"""The same failures under every policy, live: what each of them costs, side by side.

    python benchmarks/policies.py [--only adaptive,oobleck] [--steps 8]

Layers sleep 25 ms in F, I and W, so that six processes are six devices: three pipelines of two stages, 12
micro-batches. The script, the same for each: kill -9 of a node (first pipeline, second stage) at a moment of
a step; kill -9 of another (second pipeline, first stage) once that is over; both come back. Definitions:
README.md. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.peers.launch import endable
from benchmarks.sleeping import (
    PIPELINES,
    STAGES,
    job_of,
    parser_of,
    policies_of,
    under_each,
)
from benchmarks.tables import table
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, StepView

LOOK_S = 0.02
"""Between two looks at what device processes hold."""
WIDE = 768
"""Width of the job whose memory is looked at: what the layers are trained with is then hundreds of MiB, and
what else a process has is little beside it.
"""
LOOKED_AT = 6
"""Steps of it."""
DEAD = ((0, 1), (1, 0))
"""(pipeline, stage) of those who are killed, one after the other."""
INTO_STEP = 0.6
"""Share of a normal step after which a kill comes: most forwards and some backwards are done."""
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Phase:
    """After one event of the script: ``stall_s`` beyond a normal step until the next commit; what was done
    again, in steps; steps rolled back; seconds until the last step that the event still disturbed; ``step_s``
    from then on.
    """

    what: str
    stall_s: float
    again: float
    rolled_back: int
    settled_s: float
    step_s: float
    copied_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """One policy through the script. ``normal_s``: a step before any failure; bytes of the fullest device, as
    measured and as planned, in a job of its own of ``WIDE`` layers that writes no checkpoints: the plan has
    room for a device that alone is left to write all it holds.
    """

    policy: str
    normal_s: float
    memory_bytes: int
    planned_bytes: int
    phases: tuple[Phase, ...]


def through_the_script(cluster: Cluster, policy: str, steps: int) -> Run:
    """Submit, fail, mend; one phase an event."""
    memory, planned = _max_bytes(cluster, policy)
    job = cluster.submit(job_of(policy))
    view = cluster.in_state(job, "running")
    shape = [len(pipeline.nodes) for pipeline in view.pipelines]
    if shape != [STAGES] * PIPELINES:
        raise ClusterFailed(f"{policy}: pipelines of {shape} nodes")
    normal_s = statistics.median(_durations(_after(cluster, job, 0, steps)))
    doomed = [view.pipelines[pipeline].nodes[stage] for pipeline, stage in DEAD]
    phases = []
    for node in doomed:
        before = cluster.until(lambda: _just_begun(cluster, job), "a step to begin")
        time.sleep(INTO_STEP * normal_s)
        struck_at = time.time()
        cluster.kill(node)
        phases.append(_phase(cluster, job, f"kill {len(phases) + 1}", before, struck_at, normal_s, steps))
    before, struck_at = cluster.client.job(job), time.time()
    for node in doomed:
        cluster.start(node)
    phases.append(_phase(cluster, job, "both come back", before, struck_at, normal_s, steps, back=True))
    cluster.end(job)
    return Run(policy, normal_s, memory, planned, tuple(phases))


def _just_begun(cluster: Cluster, job: str) -> JobView | None:
    """The job within a few milliseconds of a commit."""
    view = cluster.client.job(job)
    last = list(cluster.client.steps(job, since=max(0, view.step - 1)))
    return view if last and time.time() - last[-1].at < 0.05 else None


def _phase(
    cluster: Cluster, job: str, what: str, before: JobView, struck_at: float, normal_s: float, steps: int,
    *, back: bool = False,
) -> Phase:  # fmt: skip
    """Wait until the event is over, and for ``steps`` undisturbed steps after it."""
    over = cluster.until(lambda: _over(cluster, job, before, back=back), f"{what}: to be over")
    after = _after(cluster, job, over.step, steps)
    every = list(cluster.client.steps(job, since=max(0, before.step - over.steps_lost - 1)))
    later = [step for step in every if step.at > struck_at]
    incidents = [i for i in cluster.client.incidents() if i.job == job][before.incidents :]
    step_s = statistics.median(_durations(after))
    return Phase(
        what,
        max(0.0, later[0].at - struck_at - normal_s),
        sum(map(_again, incidents)),
        over.steps_lost - before.steps_lost,
        _settled_at(later, step_s) - struck_at,
        step_s,
        sum(incident.copied_bytes for incident in incidents),
        over.reason or (incidents[-1].reason if incidents else ""),
    )


def _over(cluster: Cluster, job: str, before: JobView, *, back: bool) -> JobView | None:
    """The job once it runs on whoever is to be in it, with no incident open, and a step was committed so."""
    view = cluster.client.job(job)
    if view.state != "running" or any(incident.open for incident in cluster.client.incidents()):
        return None
    if back:
        usable = [node for node in cluster.client.nodes() if node.state in {"active", "standby"}]
        settled = len(usable) == cluster.nodes and view.epoch > before.epoch
    else:
        settled = view.incidents > before.incidents
    last = list(cluster.client.steps(job, since=max(0, view.step - 1)))
    return view if settled and last and last[-1].epoch == view.epoch else None


def _again(incident: IncidentView) -> float:
    """Work of one step that was done again; of a layer's, gradients are two thirds."""
    work = 3 * incident.step_layer_gradients
    return (2 * incident.layer_gradients + incident.layer_forwards) / work if work else 0.0


def _after(cluster: Cluster, job: str, since: int, steps: int) -> list[StepView]:
    """``steps`` + 1 steps that begin some after ``since``."""
    wanted = since + _WARM_UP + steps + 1

    def check() -> list[StepView] | None:
        found = list(cluster.client.steps(job, since=since))
        return found if found and found[-1].step >= wanted else None

    return [
        step for step in cluster.until(check, f"step {wanted}") if since + _WARM_UP <= step.step <= wanted
    ]


def _durations(steps: Sequence[StepView]) -> list[float]:
    return [later.at - earlier.at for earlier, later in pairwise(steps)]


def _settled_at(later: Sequence[StepView], step_s: float) -> float:
    """When the last step that took a tenth more than the steps that follow was committed."""
    slow = [two.at for one, two in pairwise(later) if two.at - one.at > 1.1 * step_s]
    return max([later[0].at, *slow])


def _held_bytes(cluster: Cluster) -> dict[str, int]:
    """Node -> bytes that its device process has of its own."""
    return {node.name: sum(map(_anonymous, node.pids)) for node in cluster.client.nodes() if node.pids}


def _max_bytes(cluster: Cluster, policy: str) -> tuple[int, int]:
    """The most that a device process of a job holds beyond what it held before, of many looks in some steps;
    and as it was planned.
    """
    idle = _held_bytes(cluster)
    job = cluster.submit(job_of(policy, width=WIDE, checkpoint_every=0))
    cluster.in_state(job, "running")
    most, last = 0, _WARM_UP + LOOKED_AT
    while (step := cluster.client.job(job).step) < last:
        if step >= _WARM_UP:
            held = _held_bytes(cluster)
            most = max(most, *(held[name] - idle[name] for name in held))
        time.sleep(LOOK_S)
    planned = max(max(t.memory_bytes) for t in cluster.client.templates(job) if t.instances)
    cluster.end(job)
    return most, planned


def _anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise ClusterFailed(f"/proc/{pid}/smaps_rollup has no line of anonymous memory")


def rows_of(run: Run) -> list[list[str]]:
    """Lines of the table, one a phase."""
    return [
        [
            run.policy, phase.what, f"{phase.stall_s:.2f}", f"{phase.again:.1%}", str(phase.rolled_back),
            f"{phase.settled_s:.1f}",
            f"{phase.copied_bytes / 2**20:.1f}", f"{run.normal_s / phase.step_s:.0%}",
            f"{run.memory_bytes / 2**20:.0f}", f"{run.planned_bytes / 2**20:.0f}",
        ]
        for phase in run.phases
    ]  # fmt: skip


HEADER = (
    "policy", "event", "stall s", "again", "steps back", "settled after s", "copied MiB", "throughput then",
    "MiB a device", "planned",
)  # fmt: skip


def main() -> int:
    """Measure and report."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="measured steps after an event")
    args = parser.parse_args()

    def measure(policy: str, folder: Path, environment: dict[str, str]) -> Run:
        with Cluster(folder, PIPELINES * STAGES, environment=environment) as cluster:
            return through_the_script(cluster, policy, args.steps)

    try:
        runs = under_each(policies_of(parser, args.only), measure)
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(HEADER, [row for run in runs for row in rows_of(run)]))
    print(
        json.dumps({"bench": "policies", "runs": [asdict(run) for run in runs], "load1": os.getloadavg()[0]})
    )
    return 0


if __name__ == "__main__":
    sys.exit(endable(main))
