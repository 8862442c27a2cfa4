"""No false deaths: train under load for a while, and count nodes that were given up without a reason. Must be
none.

python benchmarks/quiet.py --minutes 30 --load 2

The load is what makes it a test: processes that never sleep, and one that writes and syncs. The cluster has
five nodes; job after job trains on it until the time is up. Ends with 1 if any node was lost.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.launch import endable
from tests.helpers.cluster import Cluster, tiny_job

NODES = 5
BUSY = "while True: pass"
SYNCING = """
import os, sys
with open(sys.argv[1], "wb") as file:
    while True:
        file.seek(0)
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
"""


def main() -> int:
    """Train for the time asked for; 0 if nobody was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=int, default=2, help="busy processes beside the cluster")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oobleck-quiet-") as folder:
        state = Path(folder)
        with Cluster(state / "c", NODES) as cluster, load(args.load, state / "scratch"):
            rounds, jobs = train(cluster, 60 * args.minutes)
            lost = evictions(cluster)
    print(f"{args.minutes:g} min, load {args.load}: {jobs} jobs, {rounds} steps, {len(lost)} nodes lost")
    for text in lost:
        print(f"  {text}")
    return 1 if lost else 0


@contextmanager
def load(num_busy: int, scratch: Path) -> Iterator[None]:
    """Busy processes, and one that writes to the disk, for as long as it lasts."""
    commands = [[sys.executable, "-c", BUSY]] * num_busy
    commands += [[sys.executable, "-c", SYNCING, str(scratch)]] if num_busy else []
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def train(cluster: Cluster, seconds: float) -> tuple[int, int]:
    """Job after job; how many steps and jobs there were."""
    began, steps, jobs = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        job = cluster.client.submit(tiny_job(f"quiet-{jobs}", train={"steps": 400})).id
        left = seconds - (time.monotonic() - began)
        steps += _until_done(cluster, job, time.monotonic() + left)
        jobs += 1
        print(f"{time.monotonic() - began:6.0f} s: {job}, {steps} steps in all", flush=True)
    return steps, jobs


def _until_done(cluster: Cluster, job: str, deadline: float) -> int:
    """Its steps, when it is done or cancelled because the time is up."""

    def check() -> int | None:
        view = cluster.client.job(job)
        assert view.state not in {"failed", "cancelled"}, view.reason
        return view.step if view.state == "done" or time.monotonic() >= deadline else None

    steps = cluster.until(check, f"{job} done", timeout_s=7200.0)
    if cluster.client.job(job).state != "done":
        cluster.client.control(job, "cancel", discard=True)
    return steps


def evictions(cluster: Cluster) -> list[str]:
    """Nodes that were lost or evicted, as the event log says it."""
    changes = [change for n in range(1, NODES + 1) for change in cluster.client.story(f"node:node-{n}")]
    return [change.text for change in changes if " lost: " in change.text or "evicted" in change.text]


if __name__ == "__main__":
    sys.exit(endable(main))
