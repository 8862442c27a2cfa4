"""A sink that hangs: what that does to steps, to the sink beside it, and to its own output.

    python benchmarks/hanging_sink.py [--seconds 60]

A job trains on two nodes with two sinks that write JSON lines: one as it is, and one of another package,
whose writes wait in a FIFO. For as long each it writes, hangs, and writes again; then the job is ended, and
both outputs are compared with what the daemon committed. Ends with 1 if a step is missing or there twice, or
if the median step took more than a tenth longer while it hung than before and after. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.launch import endable
from benchmarks.sleeping import environment_asleep
from benchmarks.tables import table
from oobleckd.protocol.job import parse_job, table_of
from oobleckd.protocol.jobviews import StepView
from tests.helpers import stuck_sink
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.committed import read_steps

NODES = 2
ASLEEP_S = (0.0, 0.004, 0.0)
"""Of a pass of embedding, block and head: a step is made of waiting, so that what else the machine does is
less of it.
"""
TOLERATED = 1.1
KINDS = ("jsonl", "stuck")
PHASES = ("before", "while", "after")


class Hang(NamedTuple):
    """When each phase ended (POSIX seconds), the first one begins with the second time; steps in the output
    of the sink that hangs when it began to hang and when it was let go, of how many that were committed then;
    and how long it took to have all of them.
    """

    times: tuple[float, float, float, float]
    held: tuple[int, int]
    committed: int
    behind_s: float


def main() -> int:
    """Hang; 0 if nothing is lost and nothing is late."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oobleck-sink-") as name:
        folder = Path(name)
        package = folder / "package"
        offered = {"OOBLECK_SINKS": ",".join(KINDS)}
        found = environment_asleep(folder / "asleep.json", ASLEEP_S) | offered
        installed = stuck_sink.install(package)
        paths = os.pathsep.join((found.pop("PYTHONPATH"), installed.pop("PYTHONPATH")))
        (package / "hang").unlink()  # it writes until it is told to hang
        os.environ.update(found | installed | {"PYTHONPATH": paths})
        with Cluster(folder / "c", NODES) as cluster:
            return _report(*_run(cluster, package, args.seconds))


def _run(cluster: Cluster, package: Path, seconds: float) -> tuple[Hang, tuple[StepView, ...], list[str]]:
    """The hang, what was committed, and what is wrong with an output."""
    cluster.usable(NODES)
    raw = table_of(tiny_job("hung", train={"steps": 1_000_000}, fault_tolerance={"f": 0}))
    job = cluster.client.submit(parse_job(raw | {"sink": [{"kind": kind} for kind in KINDS]})).id
    home = Path(cluster.client.status().state_dir) / "sinks"
    stuck = home / "stuck" / job
    cluster.at_step(job, 20)
    cluster.until(lambda: _count(stuck) or None, "the first steps in the output")
    times = [time.time()]
    times.append(_wait(seconds))
    os.mkfifo(package / "hang")
    cluster.until(lambda: (package / "hangs").exists() or None, "the sink to hang")
    began = _count(stuck)
    times.append(_wait(seconds))
    held, committed = (began, _count(stuck)), cluster.client.job(job).step
    stuck_sink.free(package)
    freed = time.monotonic()
    cluster.until(lambda: _count(stuck) >= committed or None, "what was missed")
    behind_s = time.monotonic() - freed
    times.append(_wait(seconds))
    cluster.client.control(job, "cancel", discard=True)
    cluster.job_in(job, "cancelled")
    steps = cluster.client.steps(job)
    wanted = [(each.step, each.loss) for each in steps]
    assert [step for step, _ in wanted] == list(range(1, len(wanted) + 1)), "the daemon's own"
    outputs = [(kind, home / kind / job) for kind in KINDS]
    cluster.until(
        lambda: all(_count(output) >= len(wanted) for _, output in outputs) or None, "complete outputs"
    )
    wrong = [kind for kind, output in outputs if read_steps("jsonl", output) != wanted]
    return Hang((times[0], times[1], times[2], times[3]), held, committed, behind_s), steps, wrong


def _wait(seconds: float) -> float:
    """When it was over."""
    time.sleep(seconds)
    return time.time()


def _count(output: Path) -> int:
    file = output / "steps.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _report(hang: Hang, steps: Sequence[StepView], wrong: Sequence[str]) -> int:
    took = {name: _took(steps, *span) for name, span in zip(PHASES, pairwise(hang.times), strict=True)}
    rows = [
        [
            name,
            str(len(found)),
            *(f"{1e3 * value:.1f} ms" for value in (median(found), quantiles(found, n=100)[98])),
        ]
        for name, found in took.items()
    ]
    print(table(["sink", "steps", "median step", "p99"], rows))
    usual = median([*took["before"], *took["after"]])
    ratio = median(took["while"]) / usual
    print(
        f"its output had {hang.held[0]} steps when it began to hang and {hang.held[1]} when it was let go, "
        f"of {hang.committed} that were committed then; all of them {hang.behind_s:.2f} s later"
    )
    print(
        f"{len(steps)} steps committed; "
        + (f"not so in {', '.join(wrong)}" if wrong else "each is once in both outputs, with its loss")
    )
    said = {"ratio": ratio, "behind_s": hang.behind_s, "held": hang.held, "steps": len(steps), "wrong": wrong}
    print(json.dumps(said | {"took_s": took, "load1": os.getloadavg()[0]}))
    return 1 if wrong or ratio > TOLERATED else 0


def _took(steps: Sequence[StepView], begin: float, end: float) -> list[float]:
    """From commit to commit, in seconds."""
    at = [each.at for each in steps if begin <= each.at < end]
    return [after - before for before, after in pairwise(at)]


if __name__ == "__main__":
    sys.exit(endable(main))
