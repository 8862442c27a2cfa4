"""Can anybody stop the daemon? Floods of an unprivileged user while a node is killed, again and again.

    python benchmarks/flood.py [--seconds 60] [--rounds 5] [--steps 150000] [--only asks,halves]

As root, so that the floods (``flooding.py``) can be nobody's; on a cluster of four nodes that trains a small
job, beside the journal of a long one that is over, whose steps are written before the daemon starts.
``asks``: eight threads ask for everything that there is to ask, read a little and hang up. ``halves``:
connections that begin a request and never end it, at the API's socket and at the port for nodes, while the
daemon may open few descriptors. In the middle of each a node gets a SIGKILL. Ends with 1 where a goal is
missed, of each flood: the daemon's loop was not free for 50 ms at most (by its own counter), no answer came
in a piece above 1 MB, training went on 2 s after the kill, memory is back within 64 MB 30 s after the flood,
and the daemon's log has 100 lines more at most, besides that of each step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.flooding import Reader
from benchmarks.tables import table
from oobleckd.core.entries import AnyEntry, StepEntry
from oobleckd.ctl.local import DAEMON, Home
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.service import step_row
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.unixhttp import ClientError
from tests.helpers.cluster import tiny_job

NODES, VICTIM = 4, "node-2"
FEW_DESCRIPTORS = 128
FLOODS = ("asks", "halves")
_OF_STEP = b" INFO oobleckd.daemon.loop: step: "
_AT_ONCE = 5000  # entries
FLOODING = Path(__file__).with_name("flooding.py")
_LAST_LINES = 40


@dataclass(frozen=True)
class Seen:
    """What a flood did, or may do."""

    not_free_ms: float
    piece_kb: float
    recovered_s: float
    memory_mb: float
    log_lines: int

    def within(self, goal: Seen) -> bool:
        """Whether none is more than its goal."""
        return all(mine <= most for mine, most in zip(astuple(self), astuple(goal), strict=True))

    def cells(self) -> list[str]:
        """For a table."""
        return [
            f"{self.not_free_ms:.1f}", f"{self.piece_kb:.1f}", f"{self.recovered_s:.2f}",
            f"{self.memory_mb:+.1f}", str(self.log_lines),
        ]  # fmt: skip


GOAL = Seen(50.0, 1000.0, 2.0, 64.0, 100)
_HEADER = ["round", "flood", "not free ms", "piece kB", "recovered s", "memory MB", "log lines", "answers"]


def targets(job: str, long: str, incident: str) -> list[str]:
    """Everything that anybody may ask for, and some that nobody may."""
    found = [
        f"/v1/jobs/{long}/steps?since=0", f"/v1/jobs/{long}/steps?limit=10000", f"/v1/jobs/{job}/steps",
        "/v1/jobs", f"/v1/jobs/{job}", f"/v1/jobs/{long}", "/v1/nodes", "/v1/incidents", "/v1/pipelines",
        "/v1/templates", "/v1/layers", f"/v1/story?key=job:{job}", f"/v1/story?key=job:{long}",
        "/v1/events?since=0&follow=0", "/v1/events?since=0", f"/v1/schedules?job={job}",
        f"/v1/schedule?job={job}",
        f"/v1/schedule?job={job}&modelled=1", f"/v1/jobs/{job}/goodput", f"/v1/jobs/{long}/goodput",
        f"/v1/impact?job={job}&nodes=node-1", f"/v1/impact?nodes=node-1,node-{NODES}", "/v1/past",
        "/v1/past?at=0&span=600", f"/v1/incidents/{incident}/bundle", "/metrics", "/v1/status", "/healthz",
        "/openapi.json", "/v1/debug", "/no/such", f"/v1/jobs/{'x' * 4000}", "/v1/jobs?limit=%1b[31m",
    ]  # fmt: skip
    acts = [
        f"POST /v1/jobs/{job}/cancel",
        "POST /v1/jobs",
        "POST /v1/nodes/node-1/drain",
        "DELETE /v1/nodes/node-1",
    ]
    return [*(f"GET {target}" for target in found), *acts]


def write_steps(folder: Path, job: str, steps: int) -> None:
    """Write ``steps`` more committed steps of a job into the journal of a daemon that is away, each like the
    last.
    """
    journal = Journal(folder, step_of=step_row, on_trouble=lambda _: None)
    entries = journal.read(AnyEntry)
    last = [entry for entry in entries if isinstance(entry, StepEntry) and entry.job == job][-1]
    was, made = last.counters, []
    for number in range(1, steps + 1):
        counters = msgspec.structs.replace(
            was, round=was.round + number, step=was.step + number, applied=was.applied + number
        )
        made.append(msgspec.structs.replace(last, counters=counters))
    for begin in range(0, steps, _AT_ONCE):
        journal.append(made[begin : begin + _AT_ONCE]).result()
    journal.close()


def memory_mb(pid: int) -> float:
    """Resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def wait(seconds: float) -> None:
    """For so long."""
    threading.Event().wait(seconds)


@contextlib.contextmanager
def flooded(how: str, path: Path, what: str) -> Iterator[Callable[[], dict[str, object]]]:
    """A flood, as nobody. What is given ends it, and says what came of it."""
    command = [sys.executable, "-P", FLOODING, how, str(path), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def end() -> dict[str, object]:
            said, _ = process.communicate("\n", timeout=30)
            found: dict[str, object] = json.loads(said)
            return found

        try:
            yield end
        finally:
            process.kill()


class Round:
    """Floods over one cluster, ``seconds`` each and a rest after it."""

    def __init__(self, cluster: Cluster, state: Path, asks: list[str], seconds: float, rest_s: float) -> None:
        self.cluster, self.client, self.asks = cluster, cluster.client, asks
        self.seconds, self.rest_s = seconds, rest_s
        self._log = Home(state).log(DAEMON)
        self._pid = Home(state).alive()[DAEMON].pid

    def run(self, how: str) -> tuple[Seen, str]:
        """One flood; also what answers it got."""
        few = how == "halves"
        was = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)
        what = self.client.status().endpoint.removeprefix("tcp://") if few else "\n".join(self.asks)
        before_mb, before, piece = memory_mb(self._pid), self._num_lines(), self.largest_piece()
        try:
            if few:
                resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, was[1]))
            with flooded(how, self.client.socket_path, what) as end:
                began = time.monotonic()
                wait(self.seconds / 2)
                not_free = self._not_free_ms()
                recovered_s = self._recovery()
                wait(began + self.seconds - time.monotonic())
                not_free = max(not_free, self._not_free_ms())
                came = end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._pid, resource.RLIMIT_NOFILE, was)
        said = self._num_lines() - before
        wait(self.rest_s)
        piece = max(piece, int(str(came["largest"])))
        seen = Seen(not_free, piece / 1e3, recovered_s, memory_mb(self._pid) - before_mb, said)
        self.cluster.start(VICTIM)
        return seen, json.dumps(came["statuses"])

    def largest_piece(self) -> int:
        """Bytes of the largest piece of an answer to us."""
        most = 0
        for ask in self.asks:
            if ask.startswith("GET /") and not ask.endswith("/v1/events?since=0"):  # which does not end
                most = max(most, Reader(str(self.client.socket_path), *ask.split(" ", 1)).read()[1])
        return most

    def _recovery(self) -> float:
        """Kill a node; seconds until training went on."""
        known = {each.id for each in self.client.incidents()}
        killed_at = time.time()
        self.cluster.kill(VICTIM)

        def closed() -> IncidentView | None:
            return next(
                (each for each in self.client.incidents() if each.id not in known and not each.open), None
            )

        found = self.cluster.until(closed, "training to go on")
        return found.at + found.total_s - killed_at

    def _not_free_ms(self) -> float:
        for _ in range(100):
            with contextlib.suppress(ClientError):
                return self.client.debug().counters["loop_longest_us"] / 1e3
            wait(0.1)
        raise ClusterFailed("the daemon does not say how long its loop was not free")

    def _num_lines(self) -> int:
        """Lines that not every run has."""
        return sum(_OF_STEP not in line for line in self._log.read_bytes().splitlines())


def gone(pid: int, ending: Callable[[], None]) -> None:
    """End a process, and wait until it is no more."""
    fd = os.pidfd_open(pid)
    ending()
    select.select([fd], [], [], 30.0)
    os.close(fd)


@contextlib.contextmanager
def told(log: Path) -> Iterator[None]:
    """Where something fails, the end of the log."""
    try:
        yield
    except BaseException:
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if _OF_STEP.decode() not in line
        ]
        print(*lines[-_LAST_LINES:], sep="\n", file=sys.stderr)
        raise


def prepared(cluster: Cluster, state: Path, steps: int) -> list[str]:
    """A job that is over and was long, one that trains, and one loss behind it; what there is to ask."""
    long = cluster.submit(tiny_job("long", train={"steps": 3}))
    cluster.in_state(long, "done")
    gone(Home(state).alive()[DAEMON].pid, lambda: cluster.kill(DAEMON))
    write_steps(Home(state).state / "daemon", long, steps)
    cluster.start(DAEMON)
    job = cluster.submit(tiny_job("running", train={"steps": 10_000_000}))
    cluster.in_state(job, "running")
    cluster.kill(VICTIM)

    def closed() -> str | None:
        return next((each.id for each in cluster.client.incidents() if not each.open), None)

    incident = cluster.until(closed, "training to go on")
    cluster.start(VICTIM)
    return targets(job, long, incident)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each flood")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150_000, help="of the job that is over")
    parser.add_argument("--settle", type=float, default=5.0, help="s before the first flood")
    parser.add_argument(
        "--rest", type=float, default=30.0, help="s after each flood, until memory is looked at"
    )
    parser.add_argument("--only", default=",".join(FLOODS))
    args = parser.parse_args(arguments)
    if os.geteuid():
        parser.error("run it as root: the floods are to be nobody's")
    rows, found, met = [], [], True
    with tempfile.TemporaryDirectory(prefix="flood-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        Path(folder).chmod(0o755)
        with Cluster(state, NODES) as cluster, told(Home(state).log(DAEMON)):
            asks = prepared(cluster, state, args.steps)
            wait(args.settle)
            for number in range(1, args.rounds + 1):
                for how in [each for each in FLOODS if each in args.only.split(",")]:
                    seen, answers = Round(cluster, state, asks, args.seconds, args.rest).run(how)
                    rows.append([str(number), how, *seen.cells(), answers])
                    found.append({"round": number, "flood": how, **asdict(seen), "answers": answers})
                    met = met and seen.within(GOAL)
                    print(*rows[-1], flush=True)
    print(table(_HEADER, [*rows, ["goal", "", *GOAL.cells(), ""]]))
    print(json.dumps({"floods": found, "goal": asdict(GOAL), "met": met, "load1": os.getloadavg()[0]}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
