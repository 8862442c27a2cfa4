"""What evaluations cost beside what was planned: a job whose layers sleep, on a live cluster.

    python benchmarks/evaluation.py

Layers sleep 25 ms in F, I and W, so that six processes are six devices. The job evaluates every few steps on
as many micro-batches as a step and a half has, so that an evaluation has a whole round and a shorter one.
Compared are the seconds of an evaluation as planned and as the daemon measured them, and its share of the
time. Definitions: README.md. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import Cluster
from benchmarks.peers.launch import endable, isolate
from benchmarks.sleeping import MICRO_BATCHES, PIPELINES, STAGES, environment_asleep, job_of
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job, table_of

STEPS, EVERY = 24, 4
SEQUENCES = MICRO_BATCHES * 3 // 2
CLOSE = 0.1
"""How far apart planned and measured may be."""


@dataclass(frozen=True, slots=True)
class EvalCost:
    """Seconds of an evaluation, the median, and of all of them the share of the time of rounds: planned, and
    measured.
    """

    planned_s: float
    measured_s: float
    planned_share: float
    measured_share: float

    @property
    def apart(self) -> float:
        """Share by which the measured share is more than the planned one, or less."""
        return self.measured_share / self.planned_share - 1


def evaluating(text: Path) -> Job:
    """The job of ``sleeping``, with evaluations on ``text``."""
    text.write_bytes(bytes(range(256)) * 16)
    source = {"name": "text", "kind": "text", "path": str(text)}
    job = table_of(job_of("oobleck", checkpoint_every=0))
    job["train"]["steps"] = STEPS
    job["eval"] = {"every": EVERY, "sequences": SEQUENCES, "at_start": True, "source": [source]}
    return parse_job(job | {"name": "evaluation"})


def measured(folder: Path) -> EvalCost:
    """On a cluster of its own. Raises ClusterFailed."""
    environment = environment_asleep(folder / "asleep.json")
    with Cluster(folder / "cluster", PIPELINES * STAGES, environment=environment) as cluster:
        job = cluster.submit(evaluating(folder / "text.txt"))
        planned = cluster.in_state(job, "running").evaluation
        assert planned is not None
        cluster.in_state(job, "done")
        seconds = [each.seconds for each in cluster.client.evaluations(job)]
        steps_s = sum(step.step_s for step in cluster.client.steps(job))
    share = sum(seconds) / (sum(seconds) + steps_s)
    return EvalCost(planned.planned_s, statistics.median(seconds), planned.planned_share, share)


def main() -> int:
    """0: as planned."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    isolate()
    with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
        found = measured(Path(folder))
    rows = [
        ["an evaluation", f"{found.planned_s:.3f} s", f"{found.measured_s:.3f} s"],
        ["share of the time", f"{found.planned_share:.1%}", f"{found.measured_share:.1%}"],
    ]
    print(table(["", "planned", "measured"], rows))
    print(json.dumps({"evaluation": asdict(found), "apart": found.apart, "load1": os.getloadavg()[0]}))
    return 0 if abs(found.apart) <= CLOSE else 1


if __name__ == "__main__":
    sys.exit(endable(main))
