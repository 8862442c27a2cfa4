"""Fault-free samples/s of oobleckd against torch.distributed.pipelining and DDP, in pairs that take turns.

    python benchmarks/throughput.py [--tokens 1024] [--pairs 9] [--steps N] [--only 1x4,2x2]
                                    [--sums exact,float] [--aims]

The same GPT-2, batch, micro-batches of ``--tokens`` and four processes everywhere; README.md says what is
compared with what. The last line is one JSON object; exits 1 where a ratio is below the least that it may be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
MET, BELOW, TOO_LOW = "met", "below the aim", "too low"
_TIMEOUT_S = 300.0
Window = Callable[[int], float]
"""Runs so many steps of one system, nothing else running, and says its samples/s."""


class Aim(NamedTuple):
    """A ratio to be reached, and the least there may be."""

    aim: float
    least: float


AIMS = {1024: Aim(1.0, 0.95), 128: Aim(0.95, 0.9)}
"""Of ours against Schedule1F1B, by the tokens of a micro-batch."""
STEPS = {1024: 2, 128: 5}
"""Measured steps of a window, by the tokens of a micro-batch: some seconds on two cores."""


class Comparison(NamedTuple):
    """A layout of ours against a peer; ``aims``: the ratio is to be as high as ``AIMS`` say."""

    layout: str
    peer: str
    aims: bool


LAYOUTS = {"1x4": (0, 4), "2x2": (1, 2)}
"""Name -> (f, nodes of the smallest pipeline): what makes the planner choose the layout on four nodes."""
PEERS = {
    "Schedule1F1B, 4 stages": ("benchmarks.peers.train_1f1b", "--stages", "4"),
    "Schedule1F1B, 2 stages x DDP 2": ("benchmarks.peers.train_1f1b", "--stages", "2"),
    "DDP, 4 replicas": ("benchmarks.peers.train_ddp",),
}
COMPARISONS = (
    Comparison("1x4", "Schedule1F1B, 4 stages", aims=True),
    Comparison("2x2", "Schedule1F1B, 2 stages x DDP 2", aims=True),
    Comparison("2x2", "DDP, 4 replicas", aims=False),
)
SUMS = {"float": False, "exact": True}


def peer_window(programs: Programs, samples: int) -> Window:
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


def our_window(cluster: Cluster, layout: str, exact: bool, micro_batch: shape.MicroBatch) -> Window:
    """Windows of ours: each is a job of its own on the same cluster, which stands still between them."""
    f, depth = LAYOUTS[layout]
    name = f"{layout}-{'exact' if exact else 'float'}"

    def run(steps: int) -> float:
        steps_of_all = WARM_UP + steps + 1
        spec = job_of(name, steps=steps_of_all, f=f, depth=depth, exact=exact, micro_batch=micro_batch)
        cluster.resume()
        job = cluster.submit(spec)
        found = depths(cluster.in_state(job, "running", "done"))
        if found != [depth] * (shape.NUM_PROCESSES // depth):
            raise ClusterFailed(f"{name}: pipelines of {found} stages, wanted {layout}")
        cluster.in_state(job, "done")
        steps_done = cluster.client.steps(job)
        cluster.pause()
        return rate([step.at for step in steps_done][WARM_UP:], micro_batch.global_batch)

    return run


def rate(ends: list[float], samples: int) -> float:
    """Samples/s from the times at which consecutive steps of so many samples ended."""
    return samples * (len(ends) - 1) / (ends[-1] - ends[0])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Samples/s of every system, once a round; only one system is not stopped at a time.

    Every other round goes backwards, so that a machine that becomes slower favours nobody.
    """
    with contextlib.ExitStack() as stack:
        windows: dict[str, Window] = {}
        for comparison in COMPARISONS:
            if comparison.layout in args.only and (comparison.aims or not args.aims):
                windows[comparison.peer] = _start_peer(stack, folder, comparison.peer, args.tokens)
        cluster = stack.enter_context(Cluster(folder / "ours"))
        cluster.pause()
        for layout in args.only:
            for exact in (SUMS[kind] for kind in args.sums):
                micro_batch = shape.MICRO_BATCHES[args.tokens]
                windows[our_name(layout, exact)] = our_window(cluster, layout, exact, micro_batch)
        return _take_turns(windows, args.pairs, args.steps or STEPS[args.tokens])


def our_name(layout: str, exact: bool) -> str:
    """Of one of our systems, in tables and JSON."""
    return f"oobleckd {layout}, {'exact' if exact else 'float'} sums"


def _start_peer(stack: contextlib.ExitStack, folder: Path, peer: str, tokens: int) -> Window:
    programs = stack.enter_context(Programs(folder / peer.replace(" ", "-").replace(",", "")))
    start_ranks(programs, *PEERS[peer], **{shape.TOKENS: str(tokens)})
    window = peer_window(programs, shape.MICRO_BATCHES[tokens].global_batch)
    window(1)
    return window


def _take_turns(windows: dict[str, Window], pairs: int, steps: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in windows}
    for turn in range(pairs):
        for name in ordered(list(windows), backwards=turn % 2 == 1):
            rates[name].append(windows[name](steps))
            print(f"{turn + 1}/{pairs} {name}: {rates[name][-1]:#.4g} samples/s", file=sys.stderr, flush=True)
    return rates


def ordered(names: list[str], *, backwards: bool) -> list[str]:
    """Ours between the peers, each pair side by side as far as it goes."""
    layouts = [name for layout in LAYOUTS for name in _block(layout, names)]
    return layouts[::-1] if backwards else layouts


def _block(layout: str, names: list[str]) -> list[str]:
    peers = [c.peer for c in COMPARISONS if c.layout == layout and c.peer in names]
    if not peers:
        return []
    wanted = [our_name(layout, False), peers[0], our_name(layout, True), *peers[1:]]
    return [name for name in wanted if name in names]


def report(tokens: int, rates: dict[str, list[float]]) -> tuple[dict[str, object], bool]:
    """Print the tables; returns what the JSON line says, and whether every ratio is as high as it must be."""
    medians = {name: median_interval(values).median for name, values in rates.items()}
    print(
        table(["system", "samples/s"], [[name, f"{value:#.4g}"] for name, value in medians.items()]),
        end="\n\n",
    )
    ratios, rows, passes = [], [], True
    for comparison in COMPARISONS:
        for exact in SUMS.values():
            ours, peer = our_name(comparison.layout, exact), comparison.peer
            if not {ours, peer} <= rates.keys():
                continue
            interval = median_interval([a / b for a, b in zip(rates[ours], rates[peer], strict=True)])
            aim = AIMS[tokens] if comparison.aims else None
            verdict = verdict_of(interval.median, aim)
            passes = passes and verdict != TOO_LOW
            ratios.append({"ours": ours, "peer": peer, "verdict": verdict, **asdict(interval)})
            rows.append([
                f"{ours} / {peer}", f"{interval.median:.3f}",
                f"{interval.low:.3f}-{interval.high:.3f}",
                f"{interval.confidence:.1%}", f"{aim.aim} (at least {aim.least})" if aim else "", verdict,
            ])  # fmt: skip
    print(table(["ratio", "median", "interval", "confidence", "aim", ""], rows), end="\n\n")
    told = {
        "bench": "throughput", "tokens": tokens, "samples_per_s": medians, "ratios": ratios,
        "load1": os.getloadavg()[0], "rates": rates,
    }  # fmt: skip
    return told, passes


def verdict_of(ratio: float, aim: Aim | None) -> str:
    """In a word or two; empty where nothing is asked for."""
    if aim is None:
        return ""
    return MET if ratio >= aim.aim else BELOW if ratio >= aim.least else TOO_LOW


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, choices=sorted(shape.MICRO_BATCHES), default=1024,
                        help="of a micro-batch")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, help="measured steps of a window (2 of 1,024 tokens, 5 of 128)")
    parser.add_argument("--only", type=_some_of(LAYOUTS), default=[*LAYOUTS], help="layouts")
    parser.add_argument("--sums", type=_some_of(SUMS), default=[*SUMS], help="of ours")
    parser.add_argument("--aims", action="store_true", help="only peers against which there is an aim")
    args = parser.parse_args()
    isolate()
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            rates = measure(args, Path(folder))
    except (ClusterFailed, PeerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    told, passes = report(args.tokens, rates)
    print(json.dumps(told))
    return 0 if passes else 1


def _some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    """What an option is that takes some of ``names``, separated by commas."""

    def some(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := [name for name in wanted if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return [name for name in names if name in wanted]

    return some


if __name__ == "__main__":
    sys.exit(endable(main))
