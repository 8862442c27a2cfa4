"""Chaos on a real cluster: random kills by seed, or the whole kill matrix; every run compared bit by bit.

python benchmarks/chaos.py --seeds 50          50 seeds from 0 on
python benchmarks/chaos.py --seed 17           one seed again
python benchmarks/chaos.py --matrix [--cell N] every phase x victim x one or two at once
python benchmarks/chaos.py --daemon --seeds 20 kill -9 of the daemon in the middle of training
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.matrix import all_cells, run_cell, survivable

NODES = 5


def one_seed(cluster: Cluster, seed: int) -> str:
    """A job during which one or two devices or nodes die at random times. Returns what was done."""
    rng = random.Random(seed)
    cluster.heal()
    cluster.usable(NODES)
    job = cluster.client.submit(tiny_job(f"chaos-{seed}", train={"steps": 40})).id
    story = []
    for _ in range(rng.choice([1, 1, 2])):
        view = cluster.at_step(job, 2 + len(story))
        time.sleep(rng.random() * 1.5)
        view = cluster.client.job(job)
        if view.state != "running":
            break
        wanted = rng.choice([1, 1, 2])
        doomed: list[str] = []
        nodes = [n for p in view.pipelines for n in p.nodes]
        for node in rng.sample(nodes, len(nodes)):
            if len(doomed) < wanted and survivable(view, {*doomed, node}):
                doomed.append(node)
        how = rng.choice(["device", "device", "sigkill", "agent-only"])
        story.append(f"step {view.step}: {how} {'+'.join(doomed)}")
        for node in doomed:
            cluster.kill(node, how)
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0, f"{done.steps_lost} steps lost"
    cluster.verify(job)
    return "; ".join(story) or "nothing killed"


def one_daemon_seed(cluster: Cluster, seed: int, *, with_node: bool) -> str:
    """kill -9 of the daemon in the middle of training; with ``with_node`` a node dies while it is away."""
    rng = random.Random(seed)
    cluster.heal()
    cluster.usable(NODES)
    incidents = len(cluster.client.incidents())
    job = cluster.client.submit(tiny_job(f"daemon-{seed}", train={"steps": 80})).id
    cluster.at_step(job, 3)
    time.sleep(rng.random())
    before = cluster.client.job(job)
    cluster.kill_daemon()
    story = f"daemon at step {before.step}"
    if with_node:
        nodes = [n for p in before.pipelines for n in p.nodes]
        victim = rng.choice([n for n in nodes if survivable(before, {n})])
        os.kill(cluster.device_pids(victim)[0], signal.SIGKILL)
        story += f", {victim} while it was away"
    time.sleep(0.3 + rng.random())
    cluster.start_daemon()
    done = cluster.job_in(job, "done")
    steps = cluster.client.steps(job)
    assert [s.step for s in steps] == list(range(1, done.steps + 1)), "steps are missing"
    opened = len(cluster.client.incidents()) - incidents
    assert opened == (1 if with_node else 0), f"{opened} incidents"
    cluster.verify(job)
    return story


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds; 0: until it is stopped")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--cell", help="this cell of the matrix only")
    parser.add_argument("--daemon", action="store_true", help="kill the daemon instead of nodes")
    parser.add_argument(
        "--with-node", action="store_true", help="with --daemon: a node dies while it is away"
    )
    args = parser.parse_args()
    threading.excepthook = lambda hook: sys.__excepthook__(
        hook.exc_type, hook.exc_value or Exception(), hook.exc_traceback
    )
    with (
        tempfile.TemporaryDirectory(prefix="oobleck-chaos-") as state,
        Cluster(Path(state), NODES) as cluster,
    ):
        failed, total = (matrix if args.matrix else seeds)(cluster, args)
    print(f"{total - failed} of {total} bit-identical")
    return 1 if failed else 0


def matrix(cluster: Cluster, args: argparse.Namespace) -> tuple[int, int]:
    """All cells, or one."""
    cells = [cell for cell in all_cells() if args.cell in {None, cell.name}]
    failed = 0
    for cell in cells:
        began = time.monotonic()
        try:
            cluster.heal()
            run_cell(cluster, cell)
            print(f"{cell.name}: identical, {time.monotonic() - began:.1f} s", flush=True)
        except AssertionError as error:
            failed += 1
            print(
                f"{cell.name}: FAILED {error}\n  again: python benchmarks/chaos.py --matrix --cell {cell.name}",
                flush=True,
            )
            cluster.restart()
    return failed, len(cells)


def seeds(cluster: Cluster, args: argparse.Namespace) -> tuple[int, int]:
    """Seeds one after the other."""
    failed = total = 0
    flags = (" --daemon" if args.daemon else "") + (" --with-node" if args.with_node else "")
    last = args.seeds or sys.maxsize
    for seed in [args.seed] if args.seed is not None else range(last):
        total += 1
        try:
            story = (
                one_daemon_seed(cluster, seed, with_node=args.with_node)
                if args.daemon
                else one_seed(cluster, seed)
            )
            print(f"seed {seed}: identical ({story})", flush=True)
        except AssertionError as error:
            failed += 1
            print(
                f"seed {seed}: FAILED {error}\n  again: python benchmarks/chaos.py{flags} --seed {seed}",
                flush=True,
            )
            cluster.restart()
    return failed, total


if __name__ == "__main__":
    sys.exit(main())
