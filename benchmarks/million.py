"""What a long job costs a daemon that starts: the records it reads, processor time, memory; and how long its
steps and its curve take to ask for.

    python benchmarks/million.py [--steps 1000 1000000]

A journal of a job that trains, with so many steps, is written through the daemon's own journal, with
snapshots of the state as the daemon keeps them: the next one was about to come. Then the installed daemon is
started on it, as a process of its own. Processor time (the kernel's count for that process) and the peak of
its memory are those of the moment when it is ready; answers are those of its API, the best of five. At last
the old part of the journal is verified, as the daemon has it done in the background.

Ends with 1 where a goal is missed: 20,000 records, 3 s, 200 MB (also of verifying), and no answer more than
twice (and 20 ms) later than from the shortest job. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import table
from oobleckd.client import Client
from oobleckd.core import snapshot
from oobleckd.core.apply import apply
from oobleckd.core.config import CoreConfig
from oobleckd.core.entries import Entry, StepEntry
from oobleckd.core.state import State
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.segments import closed_segments
from oobleckd.daemon.service import step_row
from oobleckd.daemon.verify import Verified
from oobleckd.host import interpreter
from tests.helpers.daemons import daemon
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

GOAL_RECORDS = 20_000
GOAL_CPU_S = 3.0
GOAL_PEAK_MB = 200.0
GOAL_SLOWER, GOAL_MORE_S = 2.0, 0.02
EVERY = CoreConfig(daemon="d").snapshot_every
_AT_ONCE = 500
_WAITING = 20
_TRIES = 5
_JOB = "job-1"
_BEGUN = 3
_LOOK_S = 0.01


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000, 1_000_000])
    given = parser.parse_args()
    results = [measured(steps) for steps in given.steps]
    header = (
        "steps",
        "records read",
        "CPU s",
        "peak MB",
        "first page ms",
        "last page ms",
        "curve ms",
        "verify CPU s",
        "verify MB",
        "disk MB",
    )
    print(table(header, [_cells(result) for result in results]))
    failed = [text for result in results for text in missed(result, results[0])]
    for text in failed:
        print(f"missed: {text}")
    print(json.dumps({"results": results, "failed": failed}))
    return 1 if failed else 0


def _cells(result: dict[str, float]) -> list[str]:
    ms = [f"{1e3 * result[key]:.1f}" for key in ("first_s", "last_s", "curve_s")]
    return [
        f"{result['steps']:,.0f}", f"{result['records']:,.0f}", f"{result['cpu_s']:.2f}",
        f"{result['peak_mb']:.0f}", *ms, f"{result['verify_s']:.1f}",
        f"{result['verify_mb']:.0f}", f"{result['disk_mb']:.0f}",
    ]  # fmt: skip


def missed(result: dict[str, float], shortest: dict[str, float]) -> list[str]:
    """Goals that were not met."""
    goals = {"records": GOAL_RECORDS, "cpu_s": GOAL_CPU_S, "peak_mb": GOAL_PEAK_MB, "verify_mb": GOAL_PEAK_MB}
    for key in ("first_s", "last_s", "curve_s"):
        goals[key] = GOAL_SLOWER * shortest[key] + GOAL_MORE_S
    steps = f"{result['steps']:,.0f} steps"
    return [
        f"{steps}: {key} = {result[key]:g}, not {goal:g}" for key, goal in goals.items() if result[key] > goal
    ]


def measured(num_steps: int) -> dict[str, float]:
    """A daemon that starts on a journal of so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        write(Path(folder) / "state", num_steps)
        print(f"{num_steps:,} steps written in {time.perf_counter() - began:.1f} s", flush=True)
        disk = sum(path.stat().st_size for path in Path(folder).rglob("journal.*"))
        with daemon(Path(folder)) as process:
            cpu_s, peak_mb = _used(process.process.pid)
            client = process.client
            records = client.debug().counters["records_read"]
            result = {
                "steps": num_steps, "records": records, "cpu_s": cpu_s, "peak_mb": peak_mb,
                "disk_mb": disk / 1e6, **_answers(client, num_steps),
            }  # fmt: skip
            assert client.job(_JOB).step == num_steps
        return result | _verified(Path(folder) / "state")


def _verified(state: Path) -> dict[str, float]:
    """What it costs to look at all old records."""
    closed = closed_segments(state / "journal.copy")
    until = closed[-1].last if closed else 0
    words = interpreter.command("oobleckd.daemon.verify", str(state / "journal.sqlite"), str(until))
    with tempfile.TemporaryFile() as output:
        pid = os.posix_spawn(
            words[0], words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1)]
        )
        peak_mb = 0.0
        while not (ended := os.wait4(pid, os.WNOHANG))[0]:
            with suppress(OSError, ValueError):  # it has just ended
                peak_mb = max(peak_mb, _used(pid)[1])
            time.sleep(_LOOK_S)
        _, status, used = ended
        assert not status
        output.seek(0)
        found = msgspec.msgpack.decode(output.read(), type=Verified)
    assert (found.wrong, found.num_damaged, found.lost, found.num_rows) == ("", 0, (), until)
    return {"verify_s": used.ru_utime + used.ru_stime, "verify_mb": peak_mb}


def _answers(client: Client, num_steps: int) -> dict[str, float]:
    def first() -> object:
        return client._get(f"/v1/jobs/{_JOB}/steps", msgspec.Raw, since=1, limit=100)  # noqa: SLF001 - one page

    return {
        "first_s": _best(first),
        "last_s": _best(lambda: client.steps(_JOB, last=100)),
        "curve_s": _best(lambda: client.curve(_JOB)),
    }


def _best(act: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    return min(once() for _ in range(_TRIES))


def _used(pid: int) -> tuple[float, float]:
    """Processor seconds of a process so far, and the peak of its memory in MB."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (peak,) = [line.split()[1] for line in status if line.startswith("VmHWM:")]
    return ticks / os.sysconf("SC_CLK_TCK"), int(peak) / 1e3


# ---------------------------------------------------------------------- the journal


def write(folder: Path, num_steps: int) -> None:
    """A journal of a job that has trained so many steps, as a daemon would have written it."""
    with _journal(folder) as journal:
        state, waiting, batch = State(), deque[Future[None]](), list[Entry]()
        begun = beginning(num_steps)
        kept = (len(begun) + num_steps - _BEGUN + 1) % EVERY - EVERY  # so that the next one is about to come
        for count, entry in enumerate(itertools.chain(begun, steps_after(begun, num_steps)), 1):
            apply(state, entry)
            batch.append(entry)
            if len(batch) >= _AT_ONCE or count - kept >= EVERY:
                waiting.append(journal.append(batch))
                batch = []
            if count - kept >= EVERY:
                journal.keep_state(snapshot.encode(state))
                kept = count
            while len(waiting) > _WAITING:
                waiting.popleft().result()
        journal.append(batch).result()


@contextmanager
def _journal(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder, step_of=step_row, on_trouble=print, decode=snapshot.decode)
    try:
        yield journal
    finally:
        journal.close()


def beginning(num_steps: int) -> list[Entry]:
    """The entries of a simulated job that has just begun to train."""
    world = World(5, 4)
    world.run_for(1.0)
    world.submit(make_job(steps=num_steps + 1_000_000, memory=350, every=1_000_000))
    world.until_step(_BEGUN)
    return [*world.daemon.disk.entries()]


def steps_after(begun: list[Entry], num_steps: int) -> Iterator[Entry]:
    """All steps that come after these."""
    told = [entry for entry in begun if isinstance(entry, StepEntry)]
    last, step = told[-1], told[-1].counters
    for number in range(step.step + 1, num_steps):
        step = step.after("applied")
        seq, at = last.seq + number, last.at + number * 0.5
        yield msgspec.structs.replace(
            last, counters=step, seq=seq, at=at, loss=10 / (1 + number / 1000), ledger=f"{number:032x}"
        )


if __name__ == "__main__":
    sys.exit(main())
