"""The simulator against a live cluster: the same small job, the same events at the same times, the live run's
profile.

    python benchmarks/simulated.py [--only adaptive,varuna]

Layers sleep 25 ms in F, I and W, so that six processes are six devices. The live run comes first: nodes are
killed and started again (``SCRIPT``); then the simulator is given what the workers measured of the layers,
when each event happened, and what a step takes besides its timeline, as it was before the first of them
(``apart``). Compared are samples committed until the end, and the decisions that the core made durable, in
their order, by the names of the nodes; shown besides is where both are apart. Definitions: README.md. The
last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from benchmarks.apart import Overhead, Stretch, Two, overhead, steps_by, stretch
from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.peers.launch import endable
from benchmarks.sleeping import PIPELINES, STAGES, job_of, parser_of, policies_of, under_each
from benchmarks.tables import table
from oobleckd.core.entries import (
    AnyEntry,
    Detoured,
    LayoutDeployed,
    RolledBack,
    TemplatesMade,
)
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.service import step_row
from oobleckd.protocol.job import Job
from oobleckd.simulator.costs import ONE_MACHINE
from oobleckd.simulator.outcome import Question
from oobleckd.simulator.traces import Trace, TraceEvent
from oobleckd.simulator.world import World

SCRIPT = ((8.0, (0, 1)), (24.0, (1, 0)), (36.0, None), (52.0, (2, 1)), (63.0, None))
"""(seconds after the first step began, whose node is killed: (pipeline, stage) of the first plan). None:
whoever is dead starts again.

No kill near where ``varuna`` ends a checkpoint: ten steps more or less would hang on milliseconds. The table
has how old the newest one is.
"""
END_S = 86.0
ALONE_STEPS = 7
"""Of a pipeline by itself, before all."""
CLOSE = 0.1
"""How far apart the samples of both may be."""


@dataclass(frozen=True, slots=True)
class Live:
    """What happened, in the daemon's time: the job's ``entries``, those of a pipeline that was ``alone``
    before it, and the events.
    """

    entries: list[AnyEntry]
    alone: list[AnyEntry]
    happened: list[tuple[float, str, str]]
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy: committed steps of both, the decisions in which they differ, what the simulator was given
    of steps, and every stretch between events.
    """

    policy: str
    live_steps: int
    simulated_steps: int
    decisions: int
    differ: tuple[tuple[str, str], ...]
    given: Overhead
    stretches: tuple[Two, ...]

    @property
    def apart(self) -> float:
        """Share by which the simulator has more, or less."""
        return self.simulated_steps / self.live_steps - 1


class Recorder(World):
    """A simulated run that keeps what the core makes durable."""

    def __init__(self, question: Question) -> None:
        self.entries: list[AnyEntry] = []
        super().__init__(question)

    def _note(self, entry: msgspec.Struct) -> None:
        self.entries.append(cast("AnyEntry", entry))
        super()._note(entry)


def decisions_of(entries: Iterable[msgspec.Struct]) -> tuple[str, ...]:
    """What was decided, by the names of the nodes: plans, ways around the dead, rollbacks."""
    found = []
    for entry in entries:
        match entry:
            case LayoutDeployed():
                pipelines = sorted("+".join(pipeline.nodes) for pipeline in entry.plan.pipelines)
                without = f" without {', '.join(entry.plan.vacant)}" if entry.plan.vacant else ""
                found.append(f"plan {' | '.join(pipelines)}{without}")
            case Detoured():
                around = sorted(
                    {segment.device for route in entry.detours.routes for segment in route.segments}
                )
                found.append(f"re-routed over {', '.join(around)}")
            case RolledBack():
                found.append("rollback")
            case _:
                pass
    return tuple(found)


def alone_of(job: Job) -> Job:
    """One pipeline of the same model, without a replica."""
    return msgspec.structs.replace(
        job,
        name="alone",
        train=msgspec.structs.replace(job.train, steps=ALONE_STEPS),
        fault_tolerance=msgspec.structs.replace(job.fault_tolerance, f=0, policy="oobleck"),
        resources=msgspec.structs.replace(job.resources, max_nodes=STAGES),
    )


def live(policy: str, folder: Path, environment: dict[str, str]) -> Live:
    """The script on a cluster of its own."""
    happened: list[tuple[float, str, str]] = []
    with Cluster(folder, PIPELINES * STAGES, environment=environment) as cluster:
        alone = cluster.submit(alone_of(job_of(policy)))
        cluster.in_state(alone, "done")
        job = cluster.submit(job_of(policy))
        view = cluster.in_state(job, "running")
        first = cluster.until(lambda: next(iter(cluster.client.steps(job, since=0)), None), "the first step")
        began_at, down = first.at - first.step_s, list[str]()
        for at_s, place in SCRIPT:
            time.sleep(max(0.0, began_at + at_s - time.time()))
            if place is not None:
                node = view.pipelines[place[0]].nodes[place[1]]
                happened.append((time.time(), "fail", node))
                cluster.kill(node)
                down.append(node)
                continue
            for node in down:
                cluster.start(node)
                happened.append((time.time(), "join", node))
            down.clear()
        time.sleep(max(0.0, began_at + END_S - time.time()))
        ended_at = time.time()
        cluster.end(job)
    entries = [entry for entry in journaled(folder) if getattr(entry, "at", 0.0) <= ended_at]
    return Live(
        [entry for entry in entries if getattr(entry, "job", job) == job],
        [entry for entry in entries if getattr(entry, "job", "") == alone],
        happened,
        began_at,
        ended_at,
    )


def journaled(folder: Path) -> list[AnyEntry]:
    """What the daemon of a cluster that has ended wrote down."""
    journal = Journal(next(folder.rglob("journal.sqlite")).parent, step_of=step_row, on_trouble=print)
    try:
        return journal.read(AnyEntry)
    finally:
        journal.close()


def trace_of(found: Live, began_s: float) -> Trace:
    """Of what happened, where the first step begins after ``began_s``."""
    nodes = tuple(f"node-{number}" for number in range(1, PIPELINES * STAGES + 1))
    events = tuple(
        TraceEvent(at - found.began_at + began_s, kind, node)  # type: ignore[arg-type]
        for at, kind, node in found.happened
    )
    return Trace("live", nodes, events, found.ended_at - found.began_at + began_s)


def simulated(question: Question, found: Live) -> tuple[Recorder, float]:
    """The same events in simulation, and when its first step began: what comes before is no part of it,
    neither did it count live.
    """
    calm = Recorder(msgspec.structs.replace(question, trace=Trace("calm", question.trace.nodes, (), 60.0)))
    calm.run()
    began_s = next(entry.at for entry in calm.entries if isinstance(entry, LayoutDeployed))
    world = Recorder(msgspec.structs.replace(question, trace=trace_of(found, began_s)))
    world.run()
    return world, began_s


def compared(policy: str, found: Live) -> Compared:
    """Both, and the stretches between events."""
    setup = next(entry.setup for entry in found.entries if isinstance(entry, TemplatesMade))
    job, first_at = job_of(policy), found.happened[0][0]
    given = overhead(job, setup.profile, found.alone, found.entries, first_at)
    costs = msgspec.structs.replace(
        ONE_MACHINE, start_s=0.0, **asdict(given)
    )  # a node joins when it can be used
    question = Question(
        job,
        policy,
        setup.profile,
        setup.device_memory_bytes,
        setup.devices_per_node,
        trace_of(found, 0.0),
        costs,
    )
    world, began_s = simulated(question, found)
    ours, theirs = decisions_of(found.entries), decisions_of(world.entries)
    longest = max(len(ours), len(theirs))
    pairs = zip(*(each + ("",) * (longest - len(each)) for each in (ours, theirs)), strict=True)
    length_s = found.ended_at - found.began_at
    bounds = [0.0, *(at - found.began_at for at, _, _ in found.happened), length_s]
    what = ["begins", *(f"{kind} {node}" for _, kind, node in found.happened)]
    return Compared(
        policy,
        steps_by(found.entries, found.ended_at),
        steps_by(world.entries, began_s + length_s),
        len(ours),
        tuple((a, b) for a, b in pairs if a != b),
        given,
        tuple(
            Two(
                began,
                start,
                stretch(found.entries, found.began_at + start, found.began_at + end),
                stretch(world.entries, began_s + start, began_s + end),
            )
            for began, start, end in zip(what, bounds, bounds[1:], strict=False)
        ),
    )


def show(row: Compared) -> None:
    """Where both are apart."""
    print(
        f"{row.policy}: besides its timeline a step takes {row.given.commit_s * 1e3:.0f} ms, and sums travel "
        f"at {row.given.sums_bytes_per_s / 1e6:.0f} MB/s"
    )
    print(table(("from", "at s", "steps live", "simulated", "a step ms", "simulated", "first commit after s",
        "simulated", "checkpoint s ago", "simulated"), [
        [each.began, f"{each.at_s:.1f}", str(each.live.steps), str(each.simulated.steps),
        f"{each.live.step_s * 1e3:.0f}",
         f"{each.simulated.step_s * 1e3:.0f}", f"{each.live.first_s:.2f}", f"{each.simulated.first_s:.2f}",
         ago(each.live), ago(each.simulated)]
        for each in row.stretches
    ]), end="\n\n")  # fmt: skip
    for ours, theirs in row.differ:
        print(f"{row.policy}: live {ours!r}, simulated {theirs!r}")


def ago(found: Stretch) -> str:
    return "-" if found.checkpoint_s is None else f"{found.checkpoint_s:.1f}"


def main() -> int:
    """Measure, compare and report."""
    parser = parser_of(__doc__)
    names = policies_of(parser, parser.parse_args().only)
    try:
        rows = under_each(names, lambda policy, *where: compared(policy, live(policy, *where)))
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for row in rows:
        show(row)
    print(table(("policy", "steps live", "simulated", "apart", "decisions", "the same"), [
        [row.policy, str(row.live_steps), str(row.simulated_steps), f"{row.apart:+.1%}", str(row.decisions),
        "no" if row.differ else "yes"]
        for row in rows
    ]))  # fmt: skip
    met = all(abs(row.apart) <= CLOSE and not row.differ for row in rows)
    print(f"within {CLOSE:.0%}, and the same decisions in the same order: {'met' if met else 'missed'}")
    print(
        json.dumps({"bench": "simulated", "rows": [asdict(row) for row in rows], "load1": os.getloadavg()[0]})
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(endable(main))
