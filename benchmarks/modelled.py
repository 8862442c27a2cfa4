"""The planner's time of a step beside the one that the engine takes.

    python benchmarks/modelled.py [--steps 12] [--only NAME,...]

Layers that sleep, on up to four nodes of this machine, in pipelines of different depth; then layers that
compute, on two nodes. The modelled time is that of the templates in use, for their pipelines' micro-batches.
The last line is one JSON object; exits 1 when the median error of those that sleep is above the goal.
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
from benchmarks.sleeping import environment_asleep
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job

GOAL = 0.05
"""Most that the median error may be."""
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT-2 of ``blocks`` blocks, its batch, the nodes of a pipeline, and copies of each layer.

    ``asleep``: seconds of a forward pass of embedding, block and head; none: they compute as they are.
    """

    blocks: int
    width: int
    vocabulary: int
    sequence: int
    micro_batches: int
    depth: int = 2
    copies: int = 1
    asleep: tuple[float, float, float] | None = None


def sleeping(blocks: int, micro_batches: int, depth: int, copies: int = 1, head: float = 1.0) -> Shape:
    """Layers that compute next to nothing, blocks that sleep 15 ms forward; ``head``: its time in blocks."""
    asleep = (0.003, 0.015, 0.015 * head)
    return Shape(blocks, 32, 256, 16, micro_batches, depth, copies, asleep)


ASLEEP = {
    "asleep 1x2 few": sleeping(6, 2, 2),
    "asleep 1x2 many": sleeping(6, 12, 2),
    "asleep 1x3 with a heavy head": sleeping(7, 6, 3, head=3.0),
    "asleep 1x4 few": sleeping(7, 4, 4),
    "asleep 1x4 many": sleeping(7, 16, 4),
    "asleep 2x2 even": sleeping(6, 8, 2, copies=2),
    "asleep 2x2 uneven": sleeping(5, 7, 2, copies=2),
}
COMPUTING = {
    "few micro-batches": Shape(6, 128, 256, 256, 2),
    "many micro-batches": Shape(6, 128, 256, 256, 12),
    "wide": Shape(4, 384, 256, 128, 6),
    "a heavy head": Shape(4, 128, 8192, 256, 4),
    "long samples": Shape(4, 128, 256, 1024, 4),
    "five blocks": Shape(5, 192, 1024, 256, 8),
}
SHAPES = ASLEEP | COMPUTING


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
    """As many pipelines as copies, exact sums."""
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
            "fault_tolerance": {"f": shape.copies - 1},
            "resources": {"min_pipeline_nodes": shape.depth, "max_nodes": shape.depth * shape.copies},
            "checkpoint": {"every": 0},
        }
    )


def measured(cluster: Cluster, name: str, shape: Shape, steps: int) -> Row:
    """Train ``steps`` steps, and compare."""
    job = cluster.submit(job_of(name, shape, _WARM_UP + steps))
    pipelines = cluster.in_state(job, "running", "done").pipelines
    if [len(pipeline.stages) for pipeline in pipelines] != [shape.depth] * shape.copies:
        raise ClusterFailed(
            f"{name}: wanted {shape.copies} pipelines of {shape.depth} stages, got {pipelines}"
        )
    (template,) = [found for found in cluster.client.templates(job) if found.instances]
    share = max(len(pipeline.micro_batches) for pipeline in pipelines)
    modelled_s = template.fill_s + (share - 1) * template.period_s
    cluster.in_state(job, "done")
    taken = [step.step_s for step in cluster.client.steps(job)][_WARM_UP:]
    return Row(name, modelled_s, statistics.median(taken))


def measure(names: list[str], steps: int, folder: Path) -> list[Row]:
    """A row for each job, one after the other on a cluster of each kind."""
    times = folder / "asleep.json"
    asleep = environment_asleep(times)
    rows = []
    for kind, num_nodes, environment in ((ASLEEP, 4, asleep), (COMPUTING, 2, {})):
        if here := [name for name in names if name in kind]:
            with Cluster(folder / str(num_nodes), num_nodes, environment=environment) as cluster:
                for name in here:
                    times.write_text(json.dumps(kind[name].asleep))
                    rows.append(measured(cluster, name, kind[name], steps))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a job")
    parser.add_argument("--only", default="", help="names, separated by commas")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(SHAPES)
    if unknown := set(names) - set(SHAPES):
        parser.error(f"no job is called {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    isolate()
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            rows = measure(names, args.steps, Path(folder))
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    medians = {
        kind: statistics.median(errors)
        for kind, shapes in (("asleep", ASLEEP), ("computing", COMPUTING))
        if (errors := [abs(row.error) for row in rows if row.name in shapes])
    }
    met = medians.get("asleep", 0.0) <= GOAL
    lines = [
        [r.name, f"{r.modelled_s * 1e3:.0f}", f"{r.measured_s * 1e3:.0f}", f"{r.error:+.1%}"] for r in rows
    ]
    print(table(["job", "modelled ms", "measured ms", "error"], lines), end="\n\n")
    print("; ".join(f"median error {kind}: {median:.1%}" for kind, median in medians.items()))
    if "asleep" in medians:
        print(f"goal asleep {GOAL:.0%}: {'met' if met else 'missed'}")
    report = {
        "bench": "modelled", "median_errors": medians, "goal": GOAL, "met": met,
        "rows": [asdict(row) for row in rows], "load1": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(report))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(endable(main))
