"""kill -9 of one of four processes, side by side: oobleckd, torchrun's restart from a checkpoint, torchft.
Of oobleckd also what other failures cost.

    python benchmarks/recovery.py [--rounds 20] [--peer-rounds 5] [--only oobleckd,spare,torchrun,torchft,...]

Definitions, and how each system is set up: README.md. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import surviving
from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.cost import Cost, Summary, summarise
from benchmarks.goals import Goal, goals_of
from benchmarks.peers import recovering
from benchmarks.peers.environments import NotAvailable, torchft_python
from benchmarks.peers.launch import ROOT, PeerFailed, Programs, endable, isolate
from benchmarks.tables import table

OURS = "oobleckd"
OTHER_FAULTS = tuple(name for name in surviving.FAULTS if name != OURS)
PEERS = ("torchrun", "torchft", "torchft-2x2")
NAMES = {
    **{name: fault.name for name, fault in surviving.FAULTS.items()},
    "torchrun": recovering.TORCHRUN.name,
    "torchft": recovering.TORCHFT.name,
    "torchft-2x2": recovering.TORCHFT_2X2.name,
}
Measure = Callable[[Path, int, random.Random], Iterator[Cost]]


def our_faults(fault: surviving.Fault) -> Measure:
    """A cluster of our own, from its start to its end."""

    def measure(folder: Path, rounds: int, rng: random.Random) -> Iterator[Cost]:
        with Cluster(folder, fault.nodes, spare=fault.spare) as cluster:
            yield from surviving.rounds_of(fault, cluster, rounds, rng)

    return measure


def torchrun_kills(folder: Path, rounds: int, rng: random.Random) -> Iterator[Cost]:
    """torchrun's job, from its start to its end."""
    with Programs(folder) as programs:
        recovering.start_torchrun(programs)
        yield from recovering.kills(recovering.TORCHRUN, programs, rounds, rng)


def torchft_kills(python: Path, peer: recovering.Peer) -> Measure:
    """torchft's job in one of its two shapes."""

    def measure(folder: Path, rounds: int, rng: random.Random) -> Iterator[Cost]:
        with Programs(folder) as programs:
            recovering.start_torchft(programs, python, groups=peer.full)
            yield from recovering.kills(peer, programs, rounds, rng)

    return measure


def measure_all(plan: list[tuple[str, int]], python: Path | None, rng: random.Random) -> tuple[
    dict[str, list[Cost]], dict[str, str]
]:  # fmt: skip
    """The costs of every system's kills, and for systems that failed, why. One system runs at a time."""
    measures = {name: our_faults(fault) for name, fault in surviving.FAULTS.items()}
    measures["torchrun"] = torchrun_kills
    if python:
        measures["torchft"] = torchft_kills(python, recovering.TORCHFT)
        measures["torchft-2x2"] = torchft_kills(python, recovering.TORCHFT_2X2)
    costs: dict[str, list[Cost]] = {}
    failures: dict[str, str] = {}
    for system, rounds in plan:
        if system not in measures:
            continue
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            try:
                for cost in measures[system](Path(folder) / "run", rounds, rng):
                    costs.setdefault(system, []).append(cost)
                    print(
                        f"{NAMES[system]}: next step after {cost.next_step_s:.2f} s "
                        f"= {cost.in_steps:.2f} normal ones",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
            except (ClusterFailed, PeerFailed) as error:
                failures[system] = str(error)
                print(f"{NAMES[system]}: {error}", file=sys.stderr, flush=True)
    return costs, failures


def plan_of(only: list[str], rounds: int, peer_rounds: int) -> list[tuple[str, int]]:
    """Our kills before and after the others, half of the rounds each, so that a drift of the machine shows on
    both.
    """
    peers = [(system, peer_rounds) for system in (*OTHER_FAULTS, *PEERS) if system in only]
    if OURS not in only:
        return peers
    if not peers:
        return [(OURS, rounds)]
    return [(OURS, rounds - rounds // 2), *peers, *([(OURS, rounds // 2)] if rounds > 1 else [])]


HEADER = (
    "kill -9 of 1 of 4", "kills", "normal step", "next step", "in steps", "worst", "stall", "steps redone",
    "discarded", "samples lost", "short", "whole again", "missing", "cost", "copied",
)  # fmt: skip


def row_of(name: str, summary: Summary) -> list[str]:
    """A line of the table; times in seconds, medians but for ``worst``; counts over all kills."""
    return [
        name, str(summary.kills), f"{summary.median_step_s:.3f} s", f"{summary.median_next_step_s:.2f} s",
        f"{summary.median_in_steps:.2f}", f"{summary.worst_in_steps:.2f}", f"{summary.median_stall_s:.2f} s",
        str(summary.steps_redone), str(summary.attempts_discarded), str(summary.samples_lost),
        str(summary.samples_short), f"{summary.median_whole_s:.1f} s",
        f"{summary.max_missing:.0%}", f"{summary.median_cost_s:.2f} s",
        f"{summary.max_copied_bytes / 2**20:.0f} MiB" if summary.max_copied_bytes else "",
    ]  # fmt: skip


PHASES = ("detect", "plan", "reconfigure", "copy", "resume")
OURS_HEADER = (
    "of ours",
    "policy",
    "boundaries",
    "sums",
    "gradients again",
    "forwards again",
    "of the step",
    *PHASES,
)


def row_of_ours(name: str, summary: Summary) -> list[str]:
    """How the recovery came about: shares of a step, and seconds of its phases (medians)."""
    fault = surviving.FAULTS[name]
    shares = [summary.median_redone, summary.median_forwards, summary.median_again]
    return [
        fault.name, fault.policy, "kept" if fault.kept else "not kept",
        f"{fault.sum_copies} copies" if fault.sum_copies else "not copied",
        *("" if share is None else f"{share:.1%}" for share in shares),
        *(
            f"{1000 * summary.median_phases[phase]:.1f} ms" if phase in summary.median_phases else ""
            for phase in PHASES
        ),
    ]  # fmt: skip


def report(summaries: dict[str, Summary], failures: dict[str, str], goals: list[Goal]) -> None:
    """Print the tables."""
    rows = [row_of(NAMES[system], summary) for system, summary in summaries.items()]
    rows += [
        [f"{NAMES[name]}: {why}", *[""] * (len(HEADER) - 1)] for name, why in failures.items() if not rows
    ]
    print(table(HEADER, rows), end="\n\n")
    if ours := [row_of_ours(name, found) for name, found in summaries.items() if found.median_phases]:
        print(table(OURS_HEADER, ours), end="\n\n")
    for name, why in failures.items():
        print(f"{NAMES[name]}: {why}\n")
    if goals:
        lines = [[g.what, f"{g.value:.3g}", f"<= {g.most:.3g}", "met" if g.met else "missed"] for g in goals]
        print(table(["goal", "measured", "wanted", ""], lines), end="\n\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="kills of ours")
    parser.add_argument(
        "--peer-rounds", type=int, default=5, help="of every other failure, and kills of others"
    )
    parser.add_argument("--only", default=",".join(NAMES), help="systems")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / "build" / "peers", help="folder for their environments"
    )
    args = parser.parse_args()
    only, failures, python = args.only.split(","), {}, None
    if any(system.startswith("torchft") for system in only):
        try:
            python = torchft_python(args.peers)
        except NotAvailable as error:
            failures = {
                system: str(error) for system in PEERS if system.startswith("torchft") and system in only
            }
    isolate()
    plan = plan_of(only, args.rounds, args.peer_rounds)
    costs, broke = measure_all(plan, python, random.Random(args.seed))
    failures |= broke
    summaries = {system: summarise(costs[system]) for system in NAMES if system in costs}
    goals = goals_of(summaries)
    report(summaries, failures, goals)
    print(json.dumps({
        "bench": "recovery", "systems": {name: asdict(summary) for name, summary in summaries.items()},
        "goals": [asdict(goal) | {"met": goal.met} for goal in goals], "not_measured": failures,
        "load1": os.getloadavg()[0], "kills": {name: [asdict(c) for c in of] for name, of in costs.items()},
    }))  # fmt: skip
    return 1 if OURS in failures else 0


if __name__ == "__main__":
    sys.exit(endable(main))
