"""What the exchange of gradients costs over limited links, by the number of replicas.

    python benchmarks/exchange.py [--pairs 9] [--steps 2] [--replicas 2,3,4,8] [--megabits 200]
                                  [--check-every 1] [--against CHECKOUT]

A cluster of eight nodes of one device, each in a network namespace whose link sends and receives so many
megabits a second (``limited.py``). A GPT-2 of two blocks of width 512, one micro-batch a replica, one stage a
pipeline: every device holds all layers. Blocks sleep (``asleep``), so that eight devices on few cores do not
disturb each other. With ``--against`` the same jobs run on a cluster of another checkout that is set up
(``make setup`` there), in turns, of which every other goes backwards; what is not in use stands still.
Ratios are formed within a turn. README.md says what is told. The last line is one JSON object; exits 1 where
a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster import ClusterFailed, depths
from benchmarks.limited import LimitedCluster, Links, NoNamespaces, enter
from benchmarks.peers.launch import endable
from benchmarks.sleeping import environment_asleep
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.watch import ScheduleView

NODES = 8
REPLICAS = (2, 3, 4, 8)
BLOCKS, WIDTH, VOCABULARY, SEQUENCE = 2, 512, 256, 8
ASLEEP_S = 0.2
"""Of a block in a forward pass; twice as long in a backward pass: a step of more than a second, which devices
then tell of one by one.
"""
WARM_UP = 1
FASTER, OF_REPLICAS = 3.0, 8
"""So many times faster is the exchange to be with so many replicas."""
NO_MORE, NO_MORE_OF = ("messages", "bytes", "cpu_s"), 2
"""Must not grow with so many replicas."""
OURS, THEIRS = "this", "against"
_TOLD_S = 0.2  # after a commit: all have told of it, and nobody has gradients to send yet


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step, as a mean over the steps of a window. NaN: not told.

    ``exchange_s``: from the end of the last backward pass to the last device's update. ``step_s``: from
    commit to commit. Of a device, as a mean and the most of any: ``bytes`` of gradients a parameter by its
    own counter, ``link_bytes`` a parameter that left by its link, with everything; ``messages`` with
    gradients; ``cpu_s``: CPU seconds.
    """

    exchange_s: float
    step_s: float
    bytes: float
    most_bytes: float
    link_bytes: float
    most_link_bytes: float
    messages: float
    most_messages: float
    cpu_s: float
    most_cpu_s: float


class Reading(NamedTuple):
    """What nodes have come to at a moment, by node: bytes of their links, CPU seconds of their devices, and
    what these counted of gradients.
    """

    link_bytes: Mapping[str, float]
    cpu_s: Mapping[str, float]
    bytes: Mapping[str, float]
    messages: Mapping[str, float]


def job_of(replicas: int, steps: int, check_every: int) -> Job:
    """One stage a pipeline, and so many pipelines."""
    config: dict[str, Any] = {
        "n_layer": BLOCKS, "n_embd": WIDTH, "n_head": 8, "vocab_size": VOCABULARY, "n_positions": SEQUENCE,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return parse_job({
        "name": f"exchange-{replicas}",
        "model": {"family": "gpt2", "config": config},
        "train": {"steps": steps, "global_batch": replicas, "micro_batch": 1, "sequence": SEQUENCE},
        "fault_tolerance": {"f": replicas - 1, "check_every": check_every},
        "resources": {"max_nodes": replicas},
        "checkpoint": {"every": 0},
    })  # fmt: skip


def num_parameters() -> int:
    """Of the job's model: embeddings, blocks, the last norm and the head."""
    block = 12 * WIDTH**2 + 13 * WIDTH
    return (VOCABULARY + SEQUENCE) * WIDTH + BLOCKS * block + 2 * WIDTH + VOCABULARY * WIDTH


def window(cluster: LimitedCluster, replicas: int, steps: int, check_every: int) -> Cost:
    """A job of its own, and what ``steps`` steps of it cost."""
    last = WARM_UP + steps
    cluster.resume()
    job = cluster.submit(job_of(replicas, last + 1, check_every))  # behind them a checkpoint is written
    begin = reading(cluster, job, WARM_UP)
    view = cluster.client.job(job)
    if depths(view) != [1] * replicas:
        raise ClusterFailed(f"pipelines of {depths(view)} stages, wanted {replicas} of 1")
    end = reading(cluster, job, last)
    cluster.in_state(job, "done")
    ends = [step.at for step in cluster.client.steps(job)][WARM_UP - 1 : last]
    took_s = [after - before for before, after in pairwise(ends)]
    exchanges_s = [exchange_s(cluster.client.schedule(job, step)) for step in range(WARM_UP + 1, last + 1)]
    cluster.pause()
    return cost_of(begin, end, view.nodes, steps, exchanges_s, took_s)


def cost_of(
    begin: Reading,
    end: Reading,
    nodes: Sequence[str],
    steps: int,
    exchanges_s: Sequence[float],
    took_s: Sequence[float],
) -> Cost:
    """Between two readings, ``steps`` apart, of the ``nodes`` that train."""

    def each(before: Mapping[str, float], after: Mapping[str, float], unit: float = 1.0) -> list[float]:
        return [(after.get(node, math.nan) - before.get(node, math.nan)) / steps / unit for node in nodes]

    sent = each(begin.bytes, end.bytes, num_parameters())
    link = each(begin.link_bytes, end.link_bytes, num_parameters())
    messages, cpu_s = each(begin.messages, end.messages), each(begin.cpu_s, end.cpu_s)
    mean = statistics.fmean
    return Cost(
        mean(exchanges_s), mean(took_s), mean(sent), max(sent), mean(link), max(link), mean(messages),
        max(messages), mean(cpu_s), max(cpu_s),
    )  # fmt: skip


def exchange_s(schedule: ScheduleView) -> float:
    """From the end of the last backward pass of all devices to the beginning of the last one's update."""
    ops = [op for lane in schedule.lanes for op in lane.ops]
    last_backward_s = max(op.stop_s for op in ops if op.kind in {"B", "I", "W"})
    return max(op.start_s for op in ops if op.kind == "U") - last_backward_s


def reading(cluster: LimitedCluster, job: str, step: int) -> Reading:
    """When ``step`` steps are committed, and told of by all."""

    def check() -> bool | None:
        view = cluster.client.job(job)
        if view.state in {"done", "failed", "cancelled"}:
            raise ClusterFailed(f"{view.name} is {view.state}: {view.reason}")
        return True if view.step >= step else None

    cluster.until(check, f"step {step} of {job}")
    time.sleep(_TOLD_S)
    told = dict(counted(cluster.client.metrics()))
    pids = {node.name: node.pids for node in cluster.client.nodes()}
    return Reading(
        cluster.links.sent(),
        {node: sum(map(_cpu_s, of)) for node, of in pids.items()},
        {node: value for (what, node), value in told.items() if what == "bytes"},
        {node: value for (what, node), value in told.items() if what == "messages"},
    )


def counted(text: str) -> Iterator[tuple[tuple[str, str], float]]:
    """What devices counted, by what and node. A daemon of before they did says nothing of it."""
    names = {f"oobleck_job_gradient_{what}": what for what in ("bytes", "messages")}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name in names else ():
            yield (names[family.name], sample.labels["device"].partition("/")[0]), sample.value


def _cpu_s(pid: int) -> float:
    """Of the threads that a process has, in nanoseconds and not in ticks of 10 ms, as ``stat`` has them."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


Found = dict[tuple[str, int], list[Cost]]
"""By checkout and number of replicas, a cost for each turn."""


def measure(args: argparse.Namespace, folder: Path) -> Found:
    """All windows of all turns; what is not measured stands still."""
    programs = {OURS: Path(sys.executable).parent}
    if args.against is not None:
        programs[THEIRS] = args.against / ".venv" / "bin"
    asleep = environment_asleep(folder / "asleep.json", (0.0, ASLEEP_S, 0.0))
    nodes = [f"node-{number}" for number in range(1, max(args.replicas) + 1)]
    with ExitStack() as stack:
        clusters: dict[str, LimitedCluster] = {}
        for name, where in programs.items():
            links = stack.enter_context(Links(name, nodes, args.megabits * 1e6 / 8))
            cluster = LimitedCluster(folder / name, links, where, asleep)
            clusters[name] = stack.enter_context(cluster)
            cluster.pause()
        found: Found = {}
        for turn in range(args.pairs):
            for replicas in args.replicas:
                for name in list(clusters)[:: -1 if turn % 2 else 1]:
                    cost = window(clusters[name], replicas, args.steps, args.check_every)
                    found.setdefault((name, replicas), []).append(cost)
                    print(
                        f"{turn + 1}/{args.pairs} r = {replicas}, {name}: {cost}", file=sys.stderr, flush=True
                    )
        return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first, the median and the third; of one value it thrice."""
    first, median, third = statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
    return first, median, third


def report(found: Found) -> tuple[dict[str, Any], bool]:
    """Print the tables; what the JSON line says of them, and whether all goals are met."""
    told: list[dict[str, Any]] = []
    for replicas in sorted({replicas for _, replicas in found}):
        ours, theirs = found[OURS, replicas], found.get((THEIRS, replicas))
        rows = []
        for field in fields(Cost):
            mine = quartiles([getattr(cost, field.name) for cost in ours])
            row = {"replicas": replicas, "what": field.name, OURS: mine}
            if theirs is not None:
                row[THEIRS] = quartiles([getattr(cost, field.name) for cost in theirs])
                row["ratio"] = quartiles([
                    getattr(a, field.name) / getattr(b, field.name) for a, b in zip(ours, theirs, strict=True)
                ])  # fmt: skip
            told.append(row)
            rows.append([field.name, *(_words(row[name]) for name in (OURS, THEIRS, "ratio") if name in row)])
        header = [f"r = {replicas}", OURS, *((THEIRS, "ratio") if theirs is not None else ())]
        print(table(header, rows), end="\n\n")
    goals = [(goal, met) for row in told for goal, met in goals_of(row)]
    for goal, met in goals:
        print(f"{goal}: {'met' if met else 'MISSED'}")
    costs = {f"{name}, r = {r}": [asdict(cost) for cost in of] for (name, r), of in found.items()}
    return {
        "bench": "exchange", "parameters": num_parameters(), "quartiles": told, "costs": costs,
        "load1": os.getloadavg()[0],
    }, all(met for _, met in goals)  # fmt: skip


def goals_of(row: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """What is asked of a row of ratios: in words, and whether it is so. More than before is what is more in
    three turns of four.
    """
    if "ratio" not in row or math.isnan(row["ratio"][1]):
        return
    first, median, _ = row["ratio"]
    if row["what"] == "exchange_s" and row["replicas"] == OF_REPLICAS:
        yield (
            f"r = {OF_REPLICAS}: the exchange {1 / median:.2f} times faster, at least {FASTER:g}",
            (median * FASTER <= 1),
        )
    if row["what"] in NO_MORE and row["replicas"] == NO_MORE_OF:
        yield f"r = {NO_MORE_OF}: {row['what']} {median:.3f} times what it was, no more", first <= 1


def _words(of: tuple[float, float, float]) -> str:
    if math.isnan(of[1]):
        return "-"
    return f"{of[1]:.3g} ({of[0]:.3g} to {of[2]:.3g})"


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9, help="turns")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a window")
    parser.add_argument("--replicas", type=_replicas, default=REPLICAS, help="such as 2,8")
    parser.add_argument("--megabits", type=float, default=200.0, help="a second, of each link and way")
    parser.add_argument("--check-every", type=int, default=1, help="as in job.toml; 0: never")
    parser.add_argument("--against", type=Path, help="a checkout of another version, with its .venv")
    args = parser.parse_args()
    try:
        enter()
    except NoNamespaces as error:
        print(f"error: no network of its own: {error}\nhint: run it as root", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            found = measure(args, Path(folder))
    except ClusterFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    told, met = report(found)
    print(json.dumps(told))
    return 0 if met else 1


def _replicas(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    if any(not 2 <= number <= NODES for number in numbers):
        raise argparse.ArgumentTypeError(f"between 2 and {NODES}")
    return numbers


if __name__ == "__main__":
    sys.exit(endable(main))
