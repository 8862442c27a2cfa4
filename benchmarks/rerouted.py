"""Throughput with dead stages: what the planner makes of routes that cross, against bounds, the optimum, and
real processes.

    python benchmarks/rerouted.py [--live] [--only "2x4 one,..."]

First the model: equal stages, D pipelines of P of them, one or several dead, in memory for twice as many
micro-batches as 1F1B has on its first stage. ``lost``: the step after the loss over the 1F1B step that the
field has without one. Where bubbles suffice at most 1 % may be lost. They do where staggered updates let the
busiest device do its share within a 1F1B step; of a flushed step, where there is a step that loses so little
at all: ours, or one that constraint programming finds, free to choose who computes for the dead. What it
cannot decide counts as if they did. Then small cases by mixed-integer programming, whose optimum is to be
within 3 %. With ``--live`` real processes too, of layers that sleep 25 ms in F, I and W: nodes are killed,
and once the planner's order is in force steps are to take what the planner said, within 5 %. The last line is
one JSON object; exits 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import ClusterFailed
from benchmarks.crossed import shortest_period, shortest_step
from benchmarks.crossing import LIVE, Measured, measure
from benchmarks.goals import Goal
from benchmarks.peers.launch import endable, isolate
from benchmarks.possible import Step, Verdict, possible
from benchmarks.tables import table
from oobleckd.planner.plan import Pipeline, Plan, Range, Segment
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedules.jobshop import shop_of
from oobleckd.planner.schedules.routed import crossing, min_s, ready_first_s

LOST, WITHIN, LIVE_WITHIN = 0.01, 0.03, 0.05
KINDS = {"fused": (False, False), "decoupled": (True, False), "staggered": (True, True)}
"""Name -> decoupled, staggered."""
PIPELINES, STAGES, MICRO_BATCHES = (2, 3, 4), (2, 4, 6, 8), (8, 16, 32, 64)
UNIT_S = 0.025
"""F, I and W of a stage."""
STATE_BYTES, HELD_BYTES, KEPT_BYTES = 18, 1000, 770
"""Of a stage; of a micro-batch from its forward on, and between I and W."""
Dead = tuple[tuple[int, int], ...]
"""(pipeline, stage)."""


@dataclass(frozen=True, slots=True)
class Case:
    """``pipelines`` of ``stages`` equal stages, ``micro_batches`` in all; seconds of F, I and W ``unit_s``
    each, where not ``times_s``.
    """

    pipelines: int
    stages: int
    micro_batches: int
    dead: Dead
    kind: str
    times_s: tuple[tuple[float, float, float], ...] = ()

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.pipelines}x{self.stages}"

    def setup(self) -> Setup:
        """Layers that are a stage each, in memory for twice as many micro-batches as 1F1B has on
        the first.
        """
        times = self.times_s or ((UNIT_S,) * 3,) * self.stages
        layers = tuple(
            LayerCost(f"layer{n}", f, i + w, 4, STATE_BYTES, HELD_BYTES, 0, weight_s=w, kept_bytes=KEPT_BYTES)
            for n, (f, i, w) in enumerate(times)
        )
        profile = Profile("rerouted", "none", layers, link_latency_s=0.0)
        decoupled, staggered = KINDS[self.kind]
        memory = STATE_BYTES + 2 * self.stages * HELD_BYTES
        return Setup(
            profile, self.micro_batches, 0, memory, 1, self.stages, decoupled=decoupled, staggered=staggered
        )

    def shares(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        least, more = divmod(self.micro_batches, self.pipelines)
        return tuple(least + (p < more) for p in range(self.pipelines))

    def units(self) -> Step:
        """The same with equal stages, in whole units of time and memory."""
        backwards = (1, 1) if KINDS[self.kind][0] else (2,)
        room = 2 * self.stages * HELD_BYTES
        return Step(
            self.shares(), self.stages, frozenset(self.dead), 1, backwards, room, HELD_BYTES, KEPT_BYTES
        )

    def plan(self) -> Plan:
        """Pipelines in which the dead have places."""
        pipelines, first = [], 0
        for p, share in enumerate(self.shares()):
            segments = tuple(Segment(f"n{p}{s}/0", Range(s, s + 1)) for s in range(self.stages))
            nodes = tuple(f"n{p}{s}" for s in range(self.stages))
            pipelines.append(Pipeline(nodes, segments, tuple(range(first, first + share))))
            first += share
        return Plan(tuple(pipelines), vacant=tuple(f"n{p}{s}/0" for p, s in self.dead))


@dataclass(frozen=True, slots=True)
class Row:
    """A case in seconds: ``plain_s`` 1F1B without failures, ``before_s`` its own kind without, ``ready_s``
    ready-first after the loss, ``step_s`` what is run, ``bound_s`` no order is shorter, ``busiest_s`` the
    busiest device works; ``took_s`` to plan. ``suffice``: whether bubbles do.
    """

    case: Case
    plain_s: float
    before_s: float
    ready_s: float
    step_s: float
    bound_s: float
    busiest_s: float
    took_s: float
    suffice: Verdict

    @property
    def lost(self) -> float:
        """Of the throughput of 1F1B without failures."""
        return self.step_s / self.plain_s - 1


def suffice(case: Case, plain_s: float, step_s: float, busiest_s: float, limit_s: float) -> Verdict:
    """Whether the bubbles of a 1F1B step of ``plain_s`` are enough for the work of the dead. ``step_s``: of
    ours.
    """
    if busiest_s > plain_s * (1 + 1e-9):
        return "no"
    if case.kind == "staggered" or step_s <= plain_s * (1 + LOST):
        return "yes"
    return possible(case.units(), int(plain_s * (1 + LOST) / UNIT_S + 1e-6), limit_s)


def modelled(case: Case, limit_s: float) -> Row:
    """``case`` as the planner has it; ``limit_s`` for a proof."""
    setup = case.setup()
    whole = shop_of(layout_of(Plan(case.plan().pipelines), 1, case.stages), setup)
    began = time.process_time()
    shop = shop_of(layout_of(case.plan(), 1, case.stages), setup)
    staggered = setup.staggered
    found = crossing(shop, staggered=staggered)
    took_s = time.process_time() - began
    most, busiest_s = -(-case.micro_batches // case.pipelines), max(shop.busy_s())
    plain_s = (most + case.stages - 1) * 3 * UNIT_S
    return Row(
        case,
        plain_s,
        crossing(whole, staggered=staggered).step_s,
        ready_first_s(shop, staggered=staggered),
        found.step_s,
        min_s(shop, staggered=staggered),
        busiest_s,
        took_s,
        suffice(case, plain_s, found.step_s, busiest_s, limit_s),
    )


def losses(pipelines: int, stages: int) -> dict[str, Dead]:
    """One dead stage in the middle; one more in another pipeline, of another stage or of the same."""
    middle = stages // 2
    found: dict[str, Dead] = {
        "one": ((0, middle),),
        "two stages": ((0, middle), (1, (middle + 1) % stages)),
    }
    if pipelines > 2:
        found["one stage twice"] = ((0, middle), (1, middle))
    return found


def sweep(limit_s: float) -> list[tuple[str, Row]]:
    """Every shape, loss and kind of schedule."""
    return [
        (what, modelled(Case(pipelines, stages, num, dead, kind), limit_s))
        for kind in KINDS
        for pipelines in PIPELINES
        for stages in STAGES
        for what, dead in losses(pipelines, stages).items()
        for num in MICRO_BATCHES
    ]


def show_sweep(rows: list[tuple[str, Row]]) -> list[Goal]:
    """Print what it says; its goals."""
    kinds: list[list[str]] = []
    for kind in KINDS:
        for what in ("one", "two stages", "one stage twice"):
            mine = [row for named, row in rows if named == what and row.case.kind == kind]
            enough = [row for row in mine if row.suffice != "no"]
            over = [row.step_s / row.bound_s - 1 for row in mine]
            kinds.append(
                [
                    kind,
                    what,
                    str(len(mine)),
                    f"{statistics.median(row.ready_s / row.plain_s for row in mine):.2f}",
                    f"{statistics.median(row.step_s / row.plain_s for row in mine):.2f}",
                    f"{statistics.median(row.step_s / row.before_s for row in mine):.2f}",
                    f"{statistics.median(over):.1%} {max(over):.1%}",
                    str(len(enough)),
                    f"{max((row.lost for row in enough), default=0.0):+.1%}",
                    f"{sum(row.lost > LOST for row in enough)}",
                    f"{max(row.took_s for row in mine):.2f}",
                ]
            )
    header = [
        "schedule", "dead", "cases", "ready-first/1F1B", "step/1F1B", "step/own",
        "over the bound: median, most",
        "bubbles suffice", "most lost there", "above 1 %", "CPU s",
    ]  # fmt: skip
    print("steps after a loss, medians; 1F1B and own: without failures")
    print(table(header, kinds), end="\n\n")
    shown = [
        [
            row.case.kind, row.case.name, str(row.case.micro_batches), what, f"{row.plain_s:.3f}",
            f"{row.before_s:.3f}",
            f"{row.ready_s:.3f}", f"{row.step_s:.3f}", f"{row.bound_s:.3f}", f"{row.lost:+.1%}", row.suffice,
        ]
        for what, row in rows
        if row.case.stages in {4, 8} and row.case.micro_batches in {16, 64} and row.case.pipelines in {2, 4}
    ]  # fmt: skip
    header = [
        "schedule", "shape", "micro-batches", "dead", "1F1B s", "own s", "ready-first s", "step s", "bound s",
        "lost", "bubbles suffice",
    ]  # fmt: skip
    print(table(header, shown), end="\n\n")
    goals = []
    for kind in KINDS:
        enough = [row for _, row in rows if row.case.kind == kind and row.suffice != "no"]
        open_ = sum(row.suffice == "unknown" for row in enough)
        print(
            f"{kind}: bubbles suffice in {len(enough)} of {len(rows) // len(KINDS)} cases, {open_} of them "
            "undecided"
        )
        goals.append(Goal(f"{kind}: lost where the bubbles suffice", max(row.lost for row in enough), LOST))
    print()
    return goals


def small(num_cases: int, limit_s: float, seed: int) -> list[Goal]:
    """Small steps of uneven stages against the optimum."""
    dice, rows, goals = random.Random(seed), [], []
    for kind in KINDS:
        gaps: list[float] = []
        proven = 0
        for _ in range(num_cases):
            pipelines, stages, num = dice.choice([(2, 2, 4), (2, 3, 4), (3, 2, 6), (3, 3, 3)])
            dead = dice.choice(list(losses(pipelines, stages).values()))
            if pipelines == 2:
                dead = dead[:1]
            elif len(dead) > 1:
                num = 3  # more of them on one device are beyond a proof
            times = tuple(
                (dice.randint(2, 9) / 100, dice.randint(2, 9) / 100, dice.randint(2, 9) / 100)
                for _ in range(stages)
            )
            case = Case(pipelines, stages, num, dead, kind, times)
            setup = case.setup()
            shop = shop_of(layout_of(case.plan(), 1, stages), setup)
            ours_s = crossing(shop, staggered=setup.staggered).step_s
            bound_s = min_s(shop, staggered=setup.staggered)
            if ours_s > bound_s * (1 + 1e-6):
                search = shortest_period if setup.staggered else shortest_step
                bound_s = max(bound_s, search(shop, 1.01 * ours_s, limit_s).min_s)
            gaps.append(ours_s / bound_s - 1)
            proven += gaps[-1] < 1e-4
        rows.append([kind, str(num_cases), str(proven), f"{statistics.mean(gaps):.2%}", f"{max(gaps):.2%}"])
        goals.append(Goal(f"{kind}: over what is proven of small cases", max(gaps), WITHIN))
    print("2 or 3 pipelines of 2 or 3 uneven stages, 3 to 6 micro-batches, against mixed-integer programming")
    print(table(["schedule", "cases", "optimal", "mean", "worst"], rows), end="\n\n")
    return goals


def live(names: list[str], steps: int, times: int) -> tuple[list[Measured], list[Goal]]:
    """Real processes; prints and returns what was measured."""
    with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
        found = measure(names, steps, times, Path(folder))
    rows = [
        [row.name, row.schedule, f"{row.before_s * 1e3:.0f}",
        "-" if row.error_before is None else f"{row.error_before:+.1%}", f"{row.measured_s * 1e3:.0f}",
        f"{row.fastest_s * 1e3:.0f}", f"{row.modelled_s * 1e3:.0f}", f"{row.error:+.1%}"]
        for row in found
    ]  # fmt: skip
    header = ["shape, dead", "schedule", "before ms", "error", "after ms", "fastest", "timeline ms", "error"]
    print(table(header, rows), end="\n\n")
    worst = {(row.name, row.schedule): abs(row.error) for row in found}
    return found, [Goal("live: off the timeline, the worst", max(worst.values()), LIVE_WITHIN)]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=12, help="small cases of a schedule against the optimum")
    parser.add_argument("--proof-s", type=float, default=20.0, help="seconds for a proof")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--live", action="store_true", help="real processes as well")
    parser.add_argument("--only", default="", help="live alone, of these shapes, separated by commas")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a live job")
    parser.add_argument(
        "--times", type=int, default=1, help="live jobs of a kind, of which the median counts"
    )
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(LIVE)
    if unknown := set(names) - set(LIVE):
        parser.error(f"no shape is called {', '.join(unknown)}; there are {', '.join(LIVE)}")
    rows: list[tuple[str, Row]] = []
    measured: list[Measured] = []
    goals: list[Goal] = []
    if not args.only:
        rows = sweep(args.proof_s)
        goals += show_sweep(rows) + small(args.cases, args.proof_s, args.seed)
    if args.live or args.only:
        isolate()
        try:
            measured, more = live(names, args.steps, args.times)
        except ClusterFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        goals += more
    for goal in goals:
        print(
            f"{goal.what}: {goal.value:.2%}, goal at most {goal.most:.0%}: {'met' if goal.met else 'MISSED'}"
        )
    report = {
        "bench": "rerouted", "model": [{"loss": what, **asdict(row)} for what, row in rows],
        "live": [asdict(row) for row in measured], "goals": [asdict(goal) for goal in goals],
        "load1": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(report))
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(endable(main))
