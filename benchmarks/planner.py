"""The planner: exactness against a reference and brute force, and CPU time.

    python benchmarks/planner.py [--reference FILE] [--cases 2000] [--no-times]
    python benchmarks/planner.py --write FILE

Exits 1 when a row of the reference is missed or a case differs from brute force. Times are CPU seconds of one
core; the first row is a fixed numpy kernel in the same run, to compare machines. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import reference
from benchmarks.referee import sizes_mismatch, split_mismatch
from benchmarks.tables import table
from oobleckd.planner.plan import Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.sizing.catalogue import Catalogue, entries
from oobleckd.planner.sizing.instantiate import instantiate
from oobleckd.planner.templates.template import templates_for

OWN_REFERENCE = Path(__file__).parent / "planner_reference.json"
OWN_ROWS = 24
GPUS = 8
MAX_IN_CATALOGUE = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT's shape, and the nodes that it is planned for under ``limit_gb`` a device."""

    blocks: int
    hidden: int
    sequence: int
    micro_batch: int
    fewest: int
    most: int
    limit_gb: int


SHAPES = {
    "24 blocks": Shape(24, 1024, 1024, 8, 2, 8, 80),
    "48 blocks": Shape(48, 1600, 1024, 4, 2, 32, 80),
    "96 blocks": Shape(96, 12288, 2048, 1, 7, 32, 80),
    "128 blocks": Shape(128, 25600, 2048, 1, 20, 64, 141),
}
TEMPLATES = (
    ("24 blocks", 0.0, 0.06),
    ("48 blocks", 0.0, 0.5),
    ("96 blocks", 0.0, 2.0),
    ("96 blocks", 0.005, 1.0),
    ("128 blocks", 0.001, 5.0),
)
"""Shape, gap and the aim in CPU seconds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What took how long, in CPU seconds; ``aim``: at most so long is wanted (None: nothing is)."""

    what: str
    cpu_s: float
    aim_s: float | None


def layers_of(shape: Shape) -> list[reference.Row]:
    """Layers in the format of the reference files, modelled after an A100: 312 Tflop/s of which 45 % are
    reached, 0.05 ms a launch, 200 GB/s in a node; times vary by 1 % from block to block.
    """
    tokens, hidden = shape.sequence * shape.micro_batch, shape.hidden
    block = 12 * hidden * hidden + 13 * hidden
    attention = 4 * shape.sequence * tokens * hidden
    words = 50257 * hidden
    parameters = [words + shape.sequence * hidden, *[block] * shape.blocks, words]
    flops = [0, *[2 * tokens * block + attention] * shape.blocks, 2 * tokens * words]
    activations = [2 * tokens * hidden, *[34 * tokens * hidden] * shape.blocks, 4 * tokens * 50257]
    chance = random.Random(shape.blocks)
    rows = []
    for number, params in enumerate(parameters):
        forward = 0.05 + flops[number] / (0.45 * 312e12) * 1e3 * chance.uniform(0.99, 1.01)
        ring = {g: 0.01 + 2 * (g - 1) / g * 2 * params / 200e9 * 1e3 for g in (2, 4, 8)}
        rows.append(
            {
                "forward": forward,
                "backward": 2 * forward,
                "params": params,
                "act_bytes": activations[number],
                "out_bytes": 2 * tokens * hidden,
                "allreduce_in_node": {"1": 0.0, **{str(g): ms for g, ms in ring.items()}},
            }
        )
    return rows


def cpu_s(work: Callable[[], object], repeats: int = 1) -> float:
    """CPU seconds of ``work``, the mean of ``repeats``."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def time_templates() -> list[Timed]:
    """The templates of every shape, memory on, for 8 micro-batches a node."""
    rows = []
    for name, gap, aim_s in TEMPLATES:
        shape = SHAPES[name]
        setup = setup_of(shape, gap)
        wanted = [(nodes, 8 * nodes) for nodes in range(shape.fewest, shape.most + 1)]
        proof = f"certified {gap:.1%}" if gap else "exact"
        what = f"{name}, {shape.fewest}..{shape.most} nodes of {GPUS}, {proof}"
        rows.append(
            Timed(what, cpu_s(lambda setup=setup, wanted=wanted: templates_for(setup, wanted)), aim_s)
        )
    return rows


def setup_of(shape: Shape, gap: float) -> Setup:
    """The setup of ``shape``."""
    profile = reference.profile_of(layers_of(shape), GPUS, reference.RESERVE_BYTES)
    limit = shape.limit_gb * 10**9
    return Setup(profile, 8 * shape.most, 0, limit, GPUS, 0, max_devices_per_stage=GPUS, gap=gap)


def time_instantiation(made: Sequence[Template]) -> list[Timed]:
    """Sizes and shares on N nodes, 4 micro-batches a node, f = 1; then the catalogue."""
    rows = []
    n0 = made[0].num_nodes
    for nodes in (64, 1024, 4096, 16384):
        reduce_s = reference.reduce_s(layers_of(SHAPES["96 blocks"]), nodes // n0)
        plain = cpu_s(lambda nodes=nodes: instantiate(made, nodes, 1, 4 * nodes), 5)
        rows.append(Timed(f"sizes and shares, N = {nodes:,}", plain, 0.025))
        reduced = cpu_s(lambda nodes=nodes, r=reduce_s: instantiate(made, nodes, 1, 4 * nodes, r))
        rows.append(Timed(f"sizes and shares, N = {nodes:,}, with all-reduce", reduced, 1.0))
    catalogue = Catalogue(n0)
    numbers = range(n0, MAX_IN_CATALOGUE + 1)
    fill_s = cpu_s(lambda: catalogue.add(entries(made, numbers, 1, 4 * MAX_IN_CATALOGUE)))
    rows.append(Timed(f"catalogue, all N up to {MAX_IN_CATALOGUE:,}", fill_s, 5.0))
    look_up_s = cpu_s(lambda: [catalogue.look_up(number) for number in numbers], 20) / len(numbers)
    rows.append(Timed("look-up, mean", look_up_s, 50e-6))
    return rows


def kernel() -> None:
    """What everybody can time: 8 products of 2048 x 2048 doubles."""
    a, b = np.random.default_rng(0).random((2, 2048, 2048))
    for _ in range(8):
        a @ b


def time_everything() -> list[Timed]:
    """All rows of the table."""
    templates_for(setup_of(SHAPES["24 blocks"], 0.0), [(2, 16)])  # what is imported late is imported now
    shape = SHAPES["96 blocks"]
    wanted = [(nodes, 8 * nodes) for nodes in range(shape.fewest, shape.most + 1)]
    made = templates_for(setup_of(shape, 0.005), wanted)
    return [Timed("numpy kernel", cpu_s(kernel), None), *time_templates(), *time_instantiation(made)]


def print_times(rows: Sequence[Timed]) -> None:
    """The table."""
    kernel_s = rows[0].cpu_s
    cells = [
        [row.what, _seconds(row.cpu_s), _seconds(row.aim_s), f"{row.cpu_s / kernel_s:.4f}", _verdict(row)]
        for row in rows
    ]
    print(table(["", "CPU", "aim", "of the kernel", ""], cells))


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return (
        f"{value:.3f} s"
        if value >= 0.1
        else f"{value * 1e3:.2f} ms"
        if value >= 1e-3
        else f"{value * 1e6:.1f} us"
    )


def _verdict(row: Timed) -> str:
    return "" if row.aim_s is None else "met" if row.cpu_s <= row.aim_s else "missed"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", type=Path, default=OWN_REFERENCE, help="a file of exact optima")
    parser.add_argument(
        "--cases", type=int, default=2000, help="random cases of either kind against brute force"
    )
    parser.add_argument("--no-times", action="store_true", help="exactness only")
    parser.add_argument("--write", type=Path, help="write a reference with brute force, and nothing else")
    options = parser.parse_args()
    if options.write:
        reference.write(options.write, OWN_ROWS)
        return 0
    checked = list(reference.check(options.reference))
    missed = [row for row in checked if not row.met]
    for row in missed:
        print(f"missed: {row.what}: {row.ours:.6f} ms, optimum {row.theirs:.6f} ms")
    print(f"{options.reference.name}: {len(checked) - len(missed)} of {len(checked)} rows met")
    seeds = range(options.cases)
    wrong = [*filter(None, map(split_mismatch, seeds)), *filter(None, map(sizes_mismatch, seeds))]
    print(*wrong[:5], f"brute force: {len(wrong)} of {2 * options.cases} cases differ", sep="\n")
    rows = [] if options.no_times else time_everything()
    if rows:
        print_times(rows)
    worst = max((row.ours / row.theirs for row in checked if math.isfinite(row.theirs)), default=1.0)
    result = {"rows": len(checked), "missed": len(missed), "worst_ratio": worst, "differ": len(wrong)}
    print(json.dumps({**result, "cases": 2 * options.cases, "times": [asdict(row) for row in rows]}))
    return 1 if missed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
