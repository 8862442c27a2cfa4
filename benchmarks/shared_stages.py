"""Stages of four devices beside stages of one, with layers that sleep.

    python benchmarks/shared_stages.py [--pairs 9] [--steps 3]

A cluster of two nodes of four devices, and a GPT-2 of eight blocks that sleep 25 ms in a forward pass and 50
in a backward pass, and compute next to nothing: so eight processes on any machine are eight devices. The same
job has stages of four devices, and of one in the split that the planner finds best. Both take turns, each in
a window of its own; ratios of steps are formed within a turn. Told is as well how long a device waits in a
step for weights of the others, and what it reads of them, by its own counters. The last line is one JSON
object; exits 1 where a step with four devices a stage takes more than 1.05 of one without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.goals import Goal
from benchmarks.peers.launch import endable, isolate
from benchmarks.sleeping import environment_asleep
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobviews import JobView

NODES, DEVICES = 2, 4
SIZES = (4, 1)
"""Devices a stage: of ours, and of what it is compared with."""
BLOCKS, WIDTH, MICRO_BATCHES = 8, 128, 16
ASLEEP_S = 0.025
WARM_UP = 1
MOST = 1.05
_TOLD_S = 0.3  # after a commit: all have told of it
WAITED, GATHERED = "oobleck_job_gather_wait_seconds", "oobleck_job_gathered_bytes"


@dataclass(frozen=True, slots=True)
class Window:
    """Of ``devices_per_stage``: the median of its steps, and what a device waits and reads in one on average.
    ``layout``: devices of each pipeline.
    """

    devices_per_stage: int
    layout: tuple[int, ...]
    step_s: float
    waited_s: float
    gathered_bytes: float


def job_of(devices_per_stage: int, steps: int) -> Job:
    """Two pipelines or one, as the planner likes."""
    config: dict[str, Any] = {
        "n_layer": BLOCKS, "n_embd": WIDTH, "n_head": 4, "vocab_size": 256, "n_positions": 8,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return parse_job({
        "name": f"shared-{devices_per_stage}",
        "model": {"family": "gpt2", "config": config},
        "train": {"steps": steps, "global_batch": MICRO_BATCHES, "micro_batch": 1, "sequence": 8},
        "optimizer": {"clip_norm": 0.0},
        "fault_tolerance": {"f": 0},
        "resources": {"devices_per_stage": devices_per_stage},
        "checkpoint": {"every": 0},
    })  # fmt: skip


def window(cluster: Cluster, devices_per_stage: int, steps: int) -> Window:
    """A job of its own on the cluster, which stands still between windows."""
    last = WARM_UP + steps
    cluster.resume()
    job = cluster.submit(job_of(devices_per_stage, last + 1))  # behind them a checkpoint is written

    def stands() -> JobView | None:
        view = cluster.client.job(job)
        if view.state in {"done", "failed", "cancelled"}:
            raise ClusterFailed(f"{view.name} is {view.state}: {view.reason}")
        return view if view.step >= last else None

    view = cluster.until(stands, f"step {last} of {job}")
    time.sleep(_TOLD_S)  # only of the active job
    told = counted(cluster.client.metrics())
    cluster.in_state(job, "done")
    ends = [step.at for step in cluster.client.steps(job)][WARM_UP - 1 : last]
    cluster.pause()
    return Window(
        devices_per_stage,
        tuple(len(pipeline.stages) for pipeline in view.pipelines),
        statistics.median(after - before for before, after in pairwise(ends)),
        told.get(WAITED, 0.0) / (NODES * DEVICES * last),
        told.get(GATHERED, 0.0) / (NODES * DEVICES * last),
    )


def counted(text: str) -> Mapping[str, float]:
    """Of all devices together."""
    return {
        family.name: sum(sample.value for sample in family.samples)
        for family in text_string_to_metric_families(text)
        if family.name in {WAITED, GATHERED}
    }


def measure(pairs: int, steps: int, folder: Path) -> dict[int, list[Window]]:
    """Windows by devices a stage, A B A B."""
    asleep = environment_asleep(folder / "asleep.json", (0.0, ASLEEP_S, 0.0))
    found: dict[int, list[Window]] = {size: [] for size in SIZES}
    with Cluster(folder / "state", NODES, devices=DEVICES, environment=asleep) as cluster:
        cluster.pause()
        for turn in range(pairs):
            for size in SIZES:
                found[size].append(window(cluster, size, steps))
                print(f"{turn + 1}/{pairs} {found[size][-1]}", file=sys.stderr, flush=True)
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first, the median and the third; of one value it thrice."""
    first, median, third = statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    return first, median, third


def ratios(found: Mapping[int, Sequence[Window]]) -> list[float]:
    """A step of ours over one of the other, turn by turn."""
    ours, other = (found[size] for size in SIZES)
    return [a.step_s / b.step_s for a, b in zip(ours, other, strict=True)]


def report(found: Mapping[int, Sequence[Window]]) -> bool:
    """Print the table and the JSON line; whether the goal is met."""
    rows = []
    for size, windows in found.items():
        first, median, third = quartiles([each.step_s for each in windows])
        rows.append([
            str(size), " ".join(map(str, windows[-1].layout)), f"{median:.3f} ({first:.3f} to {third:.3f})",
            f"{statistics.median(each.waited_s for each in windows) * 1e3:.1f}",
            f"{statistics.median(each.gathered_bytes for each in windows) / 1e6:.1f}",
        ])  # fmt: skip
    header = [
        "devices a stage",
        "devices of pipelines",
        "step s",
        "waits for weights, ms a step",
        "reads, MB a step",
    ]
    print(table(header, rows), end="\n\n")
    first, median, third = quartiles(ratios(found))
    goal = Goal(f"step with {SIZES[0]} devices a stage over one with {SIZES[1]}", median, MOST)
    said = "met" if goal.met else "MISSED"
    print(f"{goal.what}: {median:.3f} ({first:.3f} to {third:.3f}), at most {MOST:g}: {said}")
    print(json.dumps({
        "bench": "shared_stages", "ratio": [first, median, third], "ratios": ratios(found),
        "windows": {size: [asdict(each) for each in windows] for size, windows in found.items()},
        "met": goal.met, "load1": os.getloadavg()[0],
    }))  # fmt: skip
    return goal.met


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9, help="turns")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a window")
    args = parser.parse_args()
    isolate()
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            found = measure(args.pairs, args.steps, Path(folder))
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(endable(main))
