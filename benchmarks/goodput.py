"""What is left of a cluster's work when its nodes fail: every policy, simulated, on traces and on failures
that are drawn.

python benchmarks/goodput.py [--traces DIR] [--seeds 5] [--hours 24] [--jobs J] [--only WORD ...] [--keep
FILE] [-o json]

Jobs are GPT shapes of 350M, 2.7B and 6.7B parameters, as in Oobleck (SOSP'23), section 7, on 32 nodes of one
A40 each. Every policy at its best setting (our engine's costs, the better of two schedules) and as published
(costs with that name, docs/simulator.md). All policies of a cell meet the same failures, seed by seed; the
bound is the oracle, which has the best plan for whoever is alive at once and at no cost. ``--traces DIR``:
the .csv files below it, as cells of their own. ``--keep FILE``: what has been simulated is kept there, job by
job, and not simulated again while the code is what it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.keeping import Kept
from benchmarks.tables import table
from oobleckd.ctl.profiles import analytic
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.protocol.job import FaultTolerance, Job, Model, PolicyName, Train
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.simulator.costs import AS_PUBLISHED, OURS, costs_named
from oobleckd.simulator.failures import memoryless, usual_duration_s
from oobleckd.simulator.outcome import Question
from oobleckd.simulator.report import PolicyLine, lines_of, percent
from oobleckd.simulator.runs import Answer, Told, apart, run_all
from oobleckd.simulator.traces import Trace, TraceError, read_trace

NUM_NODES = 32
DEVICE = "a40"
SEQUENCE = 1024
GOALS = (
    0.99,
    0.95,
    0.85,
)  # of the best single policy; of the oracle; of the ideal, on the largest job at 10 min
BEST, PUBLISHED = "best", "published"


class Shape(msgspec.Struct, frozen=True):
    """A GPT of so many blocks, trained with ``global_batch`` sequences a step."""

    name: str
    num_blocks: int
    hidden: int
    heads: int
    global_batch: int
    micro_batch: int


SHAPES = (
    Shape("350M", 24, 1024, 16, 512, 4),
    Shape("2.7B", 32, 2560, 32, 256, 2),
    Shape("6.7B", 32, 4096, 32, 256, 2),
)
SCHEDULES = {"fused": Schedule(), "decoupled": Schedule(backward="decoupled", update="staggered")}
OWN_SCHEDULE = {"slipstream": "decoupled"}  # as published: others have one backward pass
MTBFS = {"6 h": 21600.0, "1 h": 3600.0, "30 min": 1800.0, "10 min": 600.0}
REPAIR_S = 2 * 3600.0
TOLD_EVERY_S = 60.0


class Cell(msgspec.Struct, frozen=True):
    """A job and the failures that it meets; ``mtbf_s`` between two of them, on average."""

    shape: Shape
    failures: str
    traces: tuple[Trace, ...]
    mtbf_s: float


class Row(msgspec.Struct, frozen=True):
    """A policy in a cell. ``setting``: best or published; ``schedule``: which was the better one. Without a
    ``line`` there is a ``problem``: it cannot run the job there, with either schedule.
    """

    setting: str
    policy: str
    schedule: str
    line: PolicyLine | None
    problem: str = ""


class Result(msgspec.Struct, frozen=True):
    """A cell with all of its rows."""

    job: str
    failures: str
    duration_s: float
    rows: tuple[Row, ...]
    mtbf_s: float


def job_of(shape: Shape, schedule: Schedule) -> Job:
    config = {
        "n_layer": shape.num_blocks, "n_embd": shape.hidden, "n_head": shape.heads, "n_positions": SEQUENCE,
    }  # fmt: skip
    return Job(
        name=f"gpt-{shape.name.lower()}",
        model=Model(config=config),
        train=Train(10, shape.global_batch, shape.micro_batch, SEQUENCE, precision="bf16"),
        fault_tolerance=FaultTolerance(f=1),
        schedule=schedule,
    )


def cells(folder: Path | None, seeds: int, hours: float) -> Iterator[Cell]:
    for shape in SHAPES:
        for name, mtbf_s in MTBFS.items():
            for repair_s in (REPAIR_S, 0.0):
                until_s = min(hours * 3600.0, usual_duration_s(NUM_NODES, mtbf_s, repair_s))
                back = "back after 2 h" if repair_s else "none comes back"
                drawn = tuple(memoryless(NUM_NODES, mtbf_s, repair_s, until_s, seed) for seed in range(seeds))
                yield Cell(shape, f"every {name}, {back}", drawn, mtbf_s)
        for path in sorted(folder.rglob("*.csv")) if folder is not None else ():
            trace = read_trace(path)
            yield Cell(shape, path.stem, (trace,), mtbf_of(trace))


def mtbf_of(trace: Trace) -> float:
    """Of the cluster, in seconds: a node that is taken away counts as one that fails."""
    num_lost = sum(event.kind in {"fail", "leave"} for event in trace.events)
    return trace.duration_s / max(1, num_lost)


def questions_of(cell: Cell, setting: str) -> dict[tuple[str, str], list[Question]]:
    """(policy, schedule) -> its runs."""
    found: dict[tuple[str, str], list[Question]] = {}
    for policy in get_args(PolicyName):
        named = list(SCHEDULES) if setting == BEST else [OWN_SCHEDULE.get(policy, "fused")]
        costs = OURS if setting == BEST else costs_named(AS_PUBLISHED, policy)
        if setting == PUBLISHED and costs == OURS:
            continue
        for schedule in named:
            job = job_of(cell.shape, SCHEDULES[schedule])
            sheet = SHEETS[DEVICE]
            profile = analytic(job, sheet)
            found[policy, schedule] = [
                Question(job, policy, profile, sheet.memory_bytes, 1, trace, costs, setting, seed)
                for seed, trace in enumerate(cell.traces)
            ]
    return found


def results_of(wanted: Sequence[Cell], num_jobs: int, told: Told | None = None) -> list[Result]:
    """All cells at once, so that templates are made once for a job and a policy, and not once a cell."""
    asked = [(setting, questions_of(cell, setting)) for cell in wanted for setting in (BEST, PUBLISHED)]
    flat = [question for _, kinds in asked for each in kinds.values() for question in each]
    answers = iter(run_all(flat, num_jobs, told))
    found = iter([rows_of(setting, kinds, answers) for setting, kinds in asked])
    return [
        Result(
            cell.shape.name,
            cell.failures,
            cell.traces[0].duration_s,
            (*next(found), *next(found)),
            cell.mtbf_s,
        )
        for cell in wanted
    ]


def kept_results(
    wanted: Sequence[Cell], num_jobs: int, kept: Kept[Result], told: Told | None = None
) -> list[Result]:
    """As ``results_of``, job by job; what ``kept`` has is not simulated, and all else is kept when its job is
    through.
    """
    keys = {
        id(cell): kept.key([cell, *(_asked(cell, setting) for setting in (BEST, PUBLISHED))])
        for cell in wanted
    }
    found: dict[str, Result] = {}
    for shape in dict.fromkeys(cell.shape for cell in wanted):
        of_shape = [cell for cell in wanted if cell.shape == shape]
        missing = [cell for cell in of_shape if kept.get(keys[id(cell)]) is None]
        if missing:
            results = results_of(missing, num_jobs, told)
            kept.put({keys[id(cell)]: result for cell, result in zip(missing, results, strict=True)})
        found |= {key: result for cell in of_shape if (result := kept.get(key := keys[id(cell)])) is not None}
    return [found[keys[id(cell)]] for cell in wanted]


def _asked(cell: Cell, setting: str) -> list[Question]:
    return [question for each in questions_of(cell, setting).values() for question in each]


def rows_of(
    setting: str, kinds: Mapping[tuple[str, str], Sequence[Question]], answers: Iterator[Answer]
) -> list[Row]:
    """A row a policy, with the better schedule; takes the answers to the questions of ``kinds``."""
    by_policy: dict[str, list[Row]] = {}
    for (policy, schedule), each in kinds.items():
        row = row_of(setting, policy, schedule, list(islice(answers, len(each))))
        by_policy.setdefault(policy, []).append(row)
    return [max(each, key=lambda row: row.line.samples if row.line else -1.0) for each in by_policy.values()]


def row_of(setting: str, policy: str, schedule: str, answers: Sequence[Answer]) -> Row:
    runs, unable = apart(answers)
    if unable:
        return Row(setting, policy, schedule, None, unable[0].problem)
    return Row(setting, policy, schedule, lines_of(runs, None)[0])


# ---------------------------------------------------------------------- goals


class Standing(msgspec.Struct, frozen=True):
    """``adaptive`` in a cell (``where``), its ``best`` single policy there, and what it has of it."""

    where: str
    result: Result
    adaptive: PolicyLine
    best: PolicyLine

    @property
    def share(self) -> float:
        """Of the best's samples."""
        return self.adaptive.samples / self.best.samples


def standings(results: Sequence[Result]) -> Iterator[Standing]:
    """Cell by cell; none where there is no such policy, or nothing to compare it with."""
    for result in results:
        lines = {row.policy: row.line for row in result.rows if row.setting == BEST and row.line}
        adaptive = lines.pop("adaptive", None)
        if adaptive is not None and lines:
            best = max(lines.values(), key=lambda line: line.samples)
            yield Standing(f"{result.job}, {result.failures}", result, adaptive, best)


def missed(results: Sequence[Result]) -> list[str]:
    """What was promised of adaptive and is not so; nothing where there is no such policy."""
    of_best, of_oracle, of_ideal = GOALS
    said, found = [], list(standings(results))
    for each in found:
        result, where = each.result, f"{each.where}: adaptive"
        if each.share < of_best:
            said.append(f"{where} has {percent(each.share)} of {each.best.policy}")
        if result.mtbf_s >= MTBFS["10 min"] and each.adaptive.of_oracle < of_oracle:
            said.append(f"{where} has {percent(each.adaptive.of_oracle)} of the oracle")
        is_largest = result.job == SHAPES[-1].name
        if is_largest and "10 min" in result.failures and each.adaptive.of_ideal < of_ideal:
            said.append(f"{where} has {percent(each.adaptive.of_ideal)} of the ideal")
    num_better = sum(each.share > 1 for each in found)
    if found and 2 * num_better <= len(found):
        said.append(f"adaptive is better than the best single policy in {num_better} of {len(found)} cells")
    return said


def compared(results: Sequence[Result]) -> str:
    """``adaptive`` against the best single policy of each cell, in a sentence."""
    shares = sorted(each.share for each in standings(results))
    if not shares:
        return ""
    num_better, num_same = sum(share > 1 for share in shares), sum(share == 1 for share in shares)
    return (
        f"adaptive against the best single policy: better in {num_better} of {len(shares)} cells, the same "
        f"in {num_same}, "
        f"{percent(shares[0])} to {percent(shares[-1])} of it, {percent(shares[len(shares) // 2])} in the "
        "median"
    )


def shown(results: Sequence[Result]) -> str:
    header = (
        "job, failures", "policy", "setting", "schedule", "samples/s", "of ideal", "worst", "of oracle",
        "redone",
        "reconfigure + copy", "degraded", "waiting",
    )  # fmt: skip
    rows = [
        (f"{result.job}, {result.failures}", row.policy, row.setting, row.schedule, *numbers(row))
        for result in results
        for row in result.rows
    ]
    reasons = dict.fromkeys(
        f"{result.job}: {row.policy} cannot run: {row.problem}"
        for result in results
        for row in result.rows
        if row.problem
    )
    return "\n".join([table(header, rows), *reasons, *filter(None, [compared(results)])])


def numbers(row: Row) -> tuple[str, ...]:
    line = row.line
    if line is None:
        return ("-",) * 8
    lost = line.lost
    moved = lost["reconfigure"] + lost["copy"]
    shares = (
        line.of_ideal, line.worst_of_ideal, line.of_oracle, lost["redone"], moved, lost["degraded"],
        lost["waiting"],
    )  # fmt: skip
    return (f"{line.samples_per_s:.2f}", *map(percent, shares))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="cells whose name has all of these"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    asked = arguments(words)
    try:
        wanted = [
            cell
            for cell in cells(asked.traces, asked.seeds, asked.hours)
            if all(word in f"{cell.shape.name}, {cell.failures}" for word in asked.only)
        ]
    except TraceError as error:
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr)
        return 2
    began = said = time.monotonic()

    def told(done: float) -> None:
        nonlocal said
        if time.monotonic() - said >= TOLD_EVERY_S:
            said = time.monotonic()
            print(f"{said - began:6.0f} s  {done:.0f} runs done", file=sys.stderr)

    try:
        kept = Kept(asked.keep, Result)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        print(
            f"error: {asked.keep}: {error}\nhint: name a file that --keep made, or a new one", file=sys.stderr
        )
        return 2
    results = kept_results(wanted, asked.jobs, kept, told)
    failed = missed(results)
    if asked.output == "json":
        document: dict[str, Any] = {"cells": results, "missed": failed}
        print(msgspec.json.encode(document).decode())
    else:
        print(shown(results))
        print("\n".join(failed) if failed else "goals: all met, or not asked of these policies")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
