"""Fault-free samples/s of oobleckd against torch.distributed.pipelining and DDP, in pairs that take turns.

    python benchmarks/throughput.py [--pairs 7] [--steps 5] [--only 1x4,2x2]

The same GPT-2, batch, micro-batches and four processes everywhere; README.md says what is compared with what.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OOBLECK_BENCH_LONG", "1")  # before anything imports the shape; peers inherit it

from benchmarks.cluster import Cluster, ClusterFailed, depths, job_of
from benchmarks.peers import shape
from benchmarks.peers.attempts import Attempt
from benchmarks.peers.launch import (
    PeerFailed,
    Programs,
    endable,
    isolate,
    start_ranks,
)
from benchmarks.ratios import median_interval
from benchmarks.tables import table

WARM_UP = 1
_TIMEOUT_S = 300.0
Window = Callable[[int], float]
"""Runs so many steps of one system, nothing else running, and says its samples/s."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A layout of ours against a peer, and the least ratio to be reached with float and exact sums."""

    layout: str
    peer: str
    goal_float: float | None = None
    goal_exact: float | None = None


LAYOUTS = {"1x4": (0, 4), "2x2": (1, 2)}
"""Name -> (f, nodes of the smallest pipeline): what makes the planner choose the layout on four nodes."""
PEERS = {
    "Schedule1F1B, 4 stages": ("benchmarks.peers.train_1f1b", "--stages", "4"),
    "Schedule1F1B, 2 stages x DDP 2": ("benchmarks.peers.train_1f1b", "--stages", "2"),
    "DDP, 4 replicas": ("benchmarks.peers.train_ddp",),
}
COMPARISONS = (
    Comparison("1x4", "Schedule1F1B, 4 stages", 1.0, 0.95),
    Comparison("2x2", "Schedule1F1B, 2 stages x DDP 2", 1.0, 0.95),
    Comparison("2x2", "DDP, 4 replicas"),
)


def peer_window(programs: Programs, samples: int = shape.GLOBAL_BATCH) -> Window:
    """Windows of a peer that stands still (SIGSTOP) between them. ``samples``: of a step."""

    def run(steps: int) -> float:
        seen = len(_of_rank_0(programs.attempts()))
        wanted = seen + WARM_UP + steps + 1
        programs.resume()
        ends = programs.until(
            lambda attempts: ends if len(ends := _of_rank_0(attempts)) >= wanted else None,
            f"{wanted - seen} steps", _TIMEOUT_S,
        )  # fmt: skip
        programs.pause()
        return rate(ends[seen + WARM_UP : wanted], samples)

    return run


def _of_rank_0(attempts: list[Attempt]) -> list[float]:
    return [attempt.ended_at for attempt in attempts if attempt.who == "rank0"]


def our_window(cluster: Cluster, layout: str, exact: bool) -> Window:
    """Windows of ours: each is a job of its own on the same cluster, which stands still between them."""
    f, depth = LAYOUTS[layout]
    name = f"{layout}-{'exact' if exact else 'float'}"

    def run(steps: int) -> float:
        spec = job_of(name, steps=WARM_UP + steps + 1, f=f, depth=depth, exact=exact)
        cluster.resume()
        job = cluster.submit(spec)
        found = depths(cluster.in_state(job, "running", "done"))
        if found != [depth] * (shape.NUM_PROCESSES // depth):
            raise ClusterFailed(f"{name}: pipelines of {found} stages, wanted {layout}")
        cluster.in_state(job, "done")
        steps_done = cluster.client.steps(job)
        cluster.pause()
        return rate([step.at for step in steps_done][WARM_UP:])

    return run


def rate(ends: list[float], samples: int = shape.GLOBAL_BATCH) -> float:
    """Samples/s from the times at which consecutive steps of so many samples ended."""
    return samples * (len(ends) - 1) / (ends[-1] - ends[0])


def measure(layouts: list[str], pairs: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """Samples/s of every system, once a round; only one system is not stopped at a time.

    Every other round goes backwards, so that a machine that becomes slower favours nobody.
    """
    with contextlib.ExitStack() as stack:
        windows: dict[str, Window] = {}
        for comparison in COMPARISONS:
            if comparison.layout in layouts:
                windows[comparison.peer] = _start_peer(stack, folder, comparison.peer)
        cluster = stack.enter_context(Cluster(folder / "ours"))
        cluster.pause()
        for layout in layouts:
            for exact in (False, True):
                name = our_name(layout, exact)
                windows[name] = our_window(cluster, layout, exact)
        return _take_turns(windows, pairs, steps)


def our_name(layout: str, exact: bool) -> str:
    """Of one of our systems, in tables and JSON."""
    return f"oobleckd {layout}, {'exact' if exact else 'float'} sums"


def _start_peer(stack: contextlib.ExitStack, folder: Path, peer: str) -> Window:
    programs = stack.enter_context(Programs(folder / peer.replace(" ", "-").replace(",", "")))
    start_ranks(programs, *PEERS[peer])
    window = peer_window(programs)
    window(1)
    return window


def _take_turns(windows: dict[str, Window], pairs: int, steps: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in windows}
    for turn in range(pairs):
        for name in ordered(list(windows), backwards=turn % 2 == 1):
            rates[name].append(windows[name](steps))
            print(f"{turn + 1}/{pairs} {name}: {rates[name][-1]:.1f} samples/s", file=sys.stderr, flush=True)
    return rates


def ordered(names: list[str], *, backwards: bool) -> list[str]:
    """Ours between the peers, each pair side by side as far as it goes."""
    layouts = [name for layout in LAYOUTS for name in _block(layout, names)]
    return layouts[::-1] if backwards else layouts


def _block(layout: str, names: list[str]) -> list[str]:
    peers = [c.peer for c in COMPARISONS if c.layout == layout and c.peer in names]
    if not peers:
        return []
    return [our_name(layout, False), peers[0], our_name(layout, True), *peers[1:]]


def report(rates: dict[str, list[float]]) -> dict[str, object]:
    """Print the tables; returns what the JSON line says."""
    medians = {name: median_interval(values).median for name, values in rates.items()}
    print(
        table(["system", "samples/s"], [[name, f"{value:.1f}"] for name, value in medians.items()]),
        end="\n\n",
    )
    ratios, rows = [], []
    for comparison in COMPARISONS:
        if comparison.peer not in rates:
            continue
        for exact, goal in ((False, comparison.goal_float), (True, comparison.goal_exact)):
            ours = our_name(comparison.layout, exact)
            interval = median_interval(
                [a / b for a, b in zip(rates[ours], rates[comparison.peer], strict=True)]
            )
            met = None if goal is None else interval.median >= goal
            verdict = "" if met is None else "met" if met else "missed"
            ratios.append(
                {"ours": ours, "peer": comparison.peer, "goal": goal, "met": met, **asdict(interval)}
            )
            rows.append([
                f"{ours} / {comparison.peer}", f"{interval.median:.3f}",
                f"{interval.low:.3f}-{interval.high:.3f}",
                f"{interval.confidence:.1%}", f">= {goal}" if goal else "", verdict,
            ])  # fmt: skip
    print(table(["ratio", "median", "interval", "confidence", "goal", ""], rows), end="\n\n")
    return {
        "bench": "throughput", "samples_per_s": medians, "ratios": ratios,
        "load1": os.getloadavg()[0], "rates": rates,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a window")
    parser.add_argument("--only", default="1x4,2x2", help="layouts")
    args = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if layout in args.only.split(",")]
    isolate()
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            rates = measure(layouts, args.pairs, args.steps, Path(folder))
    except (ClusterFailed, PeerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report(rates)))
    return 0


if __name__ == "__main__":
    sys.exit(endable(main))
