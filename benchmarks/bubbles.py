"""Bubbles without failures: our schedules beside torch's, with layers that sleep in F, I and W.

    python benchmarks/bubbles.py [--rounds 5] [--steps 4]

Four processes, four stages (or eight chunks, two a process), eight micro-batches, eight blocks that sleep 25
ms each in F, in I and in W, and compute next to nothing: so four processes on any machine are four devices.
Efficiency: the sleep of a device's layers over the time of a step. The systems take turns, each in a window
of its own; the last line is one JSON object; exits 1 where ours is not above torch's best.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault(
    "OOBLECK_BENCH_ASLEEP_S", "0.025"
)  # before anything imports the shape; peers inherit it

from benchmarks.cluster import Cluster, ClusterFailed, depths, job_of
from benchmarks.peers import shape
from benchmarks.peers.launch import PeerFailed, Programs, endable, isolate, start_ranks
from benchmarks.ratios import median_interval
from benchmarks.sleeping import environment_asleep
from benchmarks.tables import table
from benchmarks.throughput import WARM_UP, Window, peer_window, rate

STAGES = 4
PEERS = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
OURS: dict[str, dict[str, Any]] = {
    "fused": {"backward": "fused"},
    "decoupled": {"backward": "decoupled", "chunks": 1},
    "decoupled, staggered": {"backward": "decoupled", "chunks": 1, "update": "staggered"},
    "two chunks": {"backward": "decoupled", "chunks": 2},
    "two chunks, staggered": {"backward": "decoupled", "chunks": 2, "update": "staggered"},
}
MIN_S = 3 * shape.ASLEEP_S * shape.NUM_LAYERS * (shape.GLOBAL_BATCH // shape.MICRO_BATCH) / STAGES
"""What a device sleeps in a step."""


def efficiency(samples_per_s: float) -> float:
    """The share of a step in which a device works."""
    return MIN_S * samples_per_s / shape.GLOBAL_BATCH


def our_window(cluster: Cluster, name: str) -> Window:
    """Windows of ours: each is a job of its own on the same cluster, which stands still between them."""

    def run(steps: int) -> float:
        # A staggered update is tried once a step has gone through: it takes effect a step later.
        warm_up = WARM_UP + 2
        spec = job_of("bubbles", steps=warm_up + steps + 1, f=0, depth=STAGES, schedule=OURS[name])
        cluster.resume()
        job = cluster.submit(spec)
        found = depths(cluster.in_state(job, "running", "done"))
        if found != [STAGES]:
            raise ClusterFailed(f"{name}: pipelines of {found} stages")
        cluster.in_state(job, "done")
        ends = [step.at for step in cluster.client.steps(job)]
        cluster.pause()
        return rate(ends[warm_up:], shape.GLOBAL_BATCH)

    return run


def measure(rounds: int, steps: int, names: list[str], folder: Path) -> dict[str, list[float]]:
    """Efficiencies of every system, once a round; every other round goes backwards."""
    asleep = environment_asleep(folder / "asleep.json", (0.0, shape.ASLEEP_S, 0.0))
    with contextlib.ExitStack() as stack:
        windows: dict[str, Window] = {}
        for name in PEERS:
            if f"torch, {name}" in names:
                programs = stack.enter_context(Programs(folder / name))
                start_ranks(programs, "benchmarks.peers.train_schedules", "--schedule", name)
                windows[f"torch, {name}"] = peer_window(programs, shape.GLOBAL_BATCH)
                windows[f"torch, {name}"](1)
        cluster = stack.enter_context(Cluster(folder / "ours", environment=asleep))
        cluster.pause()
        windows |= {
            f"oobleckd, {name}": our_window(cluster, name) for name in OURS if f"oobleckd, {name}" in names
        }
        found: dict[str, list[float]] = {name: [] for name in windows}
        for turn in range(rounds):
            for name in sorted(windows, reverse=turn % 2 == 1):
                found[name].append(efficiency(windows[name](steps)))
                print(f"{turn + 1}/{rounds} {name}: {found[name][-1]:.3f}", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, list[float]]) -> bool:
    """Print the table and the JSON line; whether the best of ours is above the best of torch."""
    rows, medians = [], {}
    for name, values in found.items():
        interval = median_interval(values)
        medians[name] = interval.median
        rows.append([name, f"{interval.median:.3f}", f"{interval.low:.3f} to {interval.high:.3f}"])
    print(table(["system", "efficiency", "interval"], rows), end="\n\n")
    best = {
        whose: max(((value, name) for name, value in medians.items() if name.startswith(whose)), default=None)
        for whose in ("oobleckd", "torch")
    }
    met = True
    if best["oobleckd"] and best["torch"]:
        ratios = [a / b for a, b in zip(found[best["oobleckd"][1]], found[best["torch"][1]], strict=True)]
        met = statistics.median(ratios) > 1.0
        print(
            f"{best['oobleckd'][1]} / {best['torch'][1]}: {statistics.median(ratios):.3f}, goal > 1: "
            f"{'met' if met else 'MISSED'}"
        )
    load1 = os.getloadavg()[0]
    print(json.dumps({"bench": "bubbles", "efficiency": medians, "found": found, "met": met, "load1": load1}))
    return met


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a window")
    parser.add_argument("--only", default="", help="systems, separated by semicolons")
    args = parser.parse_args()
    every = [*(f"torch, {name}" for name in PEERS), *(f"oobleckd, {name}" for name in OURS)]
    names = args.only.split(";") if args.only else every
    isolate()
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            found = measure(args.rounds, args.steps, names, Path(folder))
    except (ClusterFailed, PeerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(endable(main))
