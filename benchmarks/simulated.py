"""The simulator against a live cluster: the same small job, the same events at the same times, the live run's profile.

    python benchmarks/simulated.py [--only adaptive,varuna]

Layers sleep 25 ms in F, I and W, so that six processes are six devices. The live run comes first: nodes are killed and started again (``SCRIPT``); then the
simulator is given what the workers measured of the layers, and when each event happened. Compared are samples committed until the end, and
the decisions that the core made durable, in their order, by the names of the nodes. Definitions: README.md. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.peers.launch import endable
from benchmarks.sleeping import PIPELINES, STAGES, job_of, parser_of, policies_of, under_each
from benchmarks.tables import table
from oobleckd.core.entries import (
    AnyEntry,
    Detoured,
    LayoutDeployed,
    RolledBack,
    StepEntry,
    TemplatesMade,
)
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.service import step_row
from oobleckd.simulator.costs import OURS
from oobleckd.simulator.outcome import Question
from oobleckd.simulator.traces import Event, Trace
from oobleckd.simulator.world import World

SCRIPT = ((8.0, (0, 1)), (20.0, (1, 0)), (32.0, None), (52.0, (2, 1)), (64.0, None))
"""(seconds after the first step began, whose node is killed: (pipeline, stage) of the first plan). None: whoever is dead starts again."""
END_S = 84.0
CLOSE = 0.1
"""How far apart the samples of both may be."""


@dataclass(frozen=True, slots=True)
class Live:
    """What happened: ``decisions`` in words, and what the simulator is given."""

    steps: int
    decisions: tuple[str, ...]
    made: TemplatesMade
    trace: Trace


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy: committed steps of both, and the decisions in which they differ."""

    policy: str
    live_steps: int
    simulated_steps: int
    decisions: int
    differ: tuple[tuple[str, str], ...]

    @property
    def apart(self) -> float:
        """Share by which the simulator has more, or less."""
        return self.simulated_steps / self.live_steps - 1


class Recorder(World):
    """A simulated run that keeps what the core makes durable."""

    def __init__(self, question: Question) -> None:
        self.entries: list[msgspec.Struct] = []
        super().__init__(question)

    def _note(self, entry: msgspec.Struct) -> None:
        self.entries.append(entry)
        super()._note(entry)


def decisions_of(entries: Iterable[msgspec.Struct]) -> tuple[str, ...]:
    """What was decided, by the names of the nodes: plans, ways around the dead, ways back."""
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
                found.append("back to the checkpoint")
            case _:
                pass
    return tuple(found)


def live(policy: str, folder: Path, environment: dict[str, str]) -> Live:
    """The script on a cluster of its own."""
    happened: list[tuple[float, str, str]] = []
    with Cluster(folder, PIPELINES * STAGES, environment=environment) as cluster:
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
    entries = journaled(folder)
    return Live(
        steps_by(entries, ended_at), decisions_of(e for e in entries if getattr(e, "at", 0.0) <= ended_at),
        next(entry for entry in entries if isinstance(entry, TemplatesMade)),
        trace_of(happened, began_at, ended_at),
    )  # fmt: skip


def journaled(folder: Path) -> list[AnyEntry]:
    """What the daemon of a cluster that has ended wrote down."""
    journal = Journal(next(folder.rglob("journal.sqlite")).parent, step_of=step_row, on_trouble=print)
    try:
        return journal.read(AnyEntry)
    finally:
        journal.close()


def steps_by(entries: Iterable[AnyEntry], when: float) -> int:
    """Committed by then, without those that were taken back."""
    steps = 0
    for entry in entries:
        if isinstance(entry, StepEntry) and entry.at <= when:
            steps = entry.counters.step + (entry.outcome != "repeated")
        elif isinstance(entry, RolledBack) and entry.at <= when:
            steps = entry.counters.step
    return steps


def trace_of(happened: Iterable[tuple[float, str, str]], began_at: float, ended_at: float) -> Trace:
    """Of what happened, in seconds after the first step began."""
    nodes = tuple(f"node-{number}" for number in range(1, PIPELINES * STAGES + 1))
    events = tuple(Event(at - began_at, kind, node) for at, kind, node in happened)  # type: ignore[arg-type]
    return Trace("live", nodes, events, ended_at - began_at)


def compared(policy: str, found: Live) -> Compared:
    """The same in simulation. What comes before the first step is no part of it: neither did it count live."""
    setup = found.made.setup
    costs = msgspec.structs.replace(OURS, init_s=0.0, start_s=0.0)
    question = Question(
        job_of(policy),
        policy,
        setup.profile,
        setup.device_memory_bytes,
        setup.devices_per_node,
        found.trace,
        costs,
    )
    world = Recorder(question)
    outcome = world.run()
    theirs = decisions_of(world.entries)
    longest = max(len(found.decisions), len(theirs))
    pairs = zip(*(each + ("",) * (longest - len(each)) for each in (found.decisions, theirs)), strict=True)
    differ = tuple((a, b) for a, b in pairs if a != b)
    return Compared(policy, found.steps, outcome.steps, len(found.decisions), differ)


def main() -> int:
    """Measure, compare and report."""
    parser = parser_of(__doc__)
    names = policies_of(parser, parser.parse_args().only)
    try:
        rows = under_each(names, lambda policy, *where: compared(policy, live(policy, *where)))
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(("policy", "steps live", "simulated", "apart", "decisions", "the same"), [
        [row.policy, str(row.live_steps), str(row.simulated_steps), f"{row.apart:+.1%}", str(row.decisions), "no" if row.differ else "yes"]
        for row in rows
    ]))  # fmt: skip
    for row in rows:
        for ours, theirs in row.differ:
            print(f"{row.policy}: live {ours!r}, simulated {theirs!r}")
    met = all(abs(row.apart) <= CLOSE and not row.differ for row in rows)
    print(f"within {CLOSE:.0%}, and the same decisions in the same order: {'met' if met else 'missed'}")
    print(
        json.dumps({"bench": "simulated", "rows": [asdict(row) for row in rows], "load1": os.getloadavg()[0]})
    )
    return 0


if __name__ == "__main__":
    sys.exit(endable(main))
