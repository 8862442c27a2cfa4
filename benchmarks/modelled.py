"""The planner's time of a step beside the one that the engine takes.

    python benchmarks/modelled.py [--steps 12] [--only NAME,...]

Two nodes of this machine, one pipeline of both (two devices that compute, on two cores or more), jobs of different
shape: the modelled time is that of the template in use, for all micro-batches. The last line is one JSON object;
exits 1 when the median of the errors is above the goal.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.peers.launch import endable, isolate
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job

GOAL = 0.05
"""Most that the median error may be."""
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT-2 of ``blocks`` blocks, and its batch."""

    blocks: int
    width: int
    vocabulary: int
    sequence: int
    micro_batches: int


SHAPES = {
    "few micro-batches": Shape(6, 128, 256, 256, 2),
    "many micro-batches": Shape(6, 128, 256, 256, 12),
    "wide": Shape(4, 384, 256, 128, 6),
    "a heavy head": Shape(4, 128, 8192, 256, 4),
    "long samples": Shape(4, 128, 256, 1024, 4),
    "five blocks": Shape(5, 192, 1024, 256, 8),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step, modelled and measured (the median)."""

    name: str
    modelled_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the model, as a share of what was measured."""
        return self.modelled_s / self.measured_s - 1


def job_of(name: str, shape: Shape, steps: int) -> Job:
    """One pipeline of two nodes, exact sums."""
    config: dict[str, Any] = {
        "n_layer": shape.blocks, "n_embd": shape.width, "n_head": 4, "vocab_size": shape.vocabulary,
        "n_positions": shape.sequence, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    train = {
        "steps": steps, "global_batch": shape.micro_batches, "micro_batch": 1, "sequence": shape.sequence,
    }  # fmt: skip
    return parse_job(
        {
            "name": name.replace(" ", "-"),
            "model": {"family": "gpt2", "config": config},
            "train": train,
            "fault_tolerance": {"f": 0},
            "resources": {"min_pipeline_nodes": 2},
        }
    )


def measured(cluster: Cluster, name: str, shape: Shape, steps: int) -> Row:
    """Train ``steps`` steps, and compare."""
    job = cluster.submit(job_of(name, shape, _WARM_UP + steps))
    cluster.in_state(job, "running", "done")
    (template,) = [found for found in cluster.client.templates(job) if found.instances]
    modelled_s = template.fill_s + (shape.micro_batches - 1) * template.period_s
    cluster.in_state(job, "done")
    taken = [step.step_s for step in cluster.client.steps(job)][_WARM_UP:]
    return Row(name, modelled_s, statistics.median(taken))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a job")
    parser.add_argument("--only", default="", help="names, separated by commas")
    args = parser.parse_args()
    names = [name for name in SHAPES if not args.only or name in args.only.split(",")]
    isolate()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder,
            Cluster(Path(folder), 2) as cluster,
        ):
            rows = [measured(cluster, name, SHAPES[name], args.steps) for name in names]
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    median = statistics.median(abs(row.error) for row in rows)
    lines = [
        [r.name, f"{r.modelled_s * 1e3:.0f}", f"{r.measured_s * 1e3:.0f}", f"{r.error:+.1%}"] for r in rows
    ]
    print(table(["job", "modelled ms", "measured ms", "error"], lines), end="\n\n")
    print(f"median error {median:.1%}, goal {GOAL:.0%}: {'met' if median <= GOAL else 'missed'}")
    report = {
        "bench": "modelled", "median_error": median, "goal": GOAL, "met": median <= GOAL,
        "rows": [asdict(row) for row in rows], "load1": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(report))
    return 0 if median <= GOAL else 1


if __name__ == "__main__":
    sys.exit(endable(main))
