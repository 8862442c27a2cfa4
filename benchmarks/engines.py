"""The two engines that order F, I and W, on the same pipelines: makespan and CPU.

    python benchmarks/engines.py [--effort N] [--shop-effort N] [--cases 60]

*Letters*: words of one pipeline (``planner/schedules/orders.py``); *shop*: a job shop, of whatever routes
(``planner/schedules/tabu.py``). Pipelines are those of ``schedules.py``: small random ones, and eight equal
stages with one chunk a device, in once and twice the memory, and with two. Prints a row for each pipeline and
one line of JSON, which says whether the shop alone would do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.schedules import random_works
from benchmarks.tables import table
from oobleckd.planner.costs.work import StageWork
from oobleckd.planner.plan import Range, Route, Segment
from oobleckd.planner.schedules import decoupled, routed
from oobleckd.planner.schedules.jobshop import NOBODY, Shop
from oobleckd.planner.schedules.orders import min_makespan_s, run
from oobleckd.planner.schedules.pipe import Pipe, homes

WITHIN, MAX_CPU = 1.005, 2.0
"""The shop alone would do where its worst makespan and its CPU seconds are at most so many times the
letters'.
"""


class Case(NamedTuple):
    """A pipeline: the work of its virtual stages, its micro-batches, stages a device."""

    name: str
    works: Sequence[StageWork]
    num: int
    chunks: int = 1


def cases(num_random: int, seed: int) -> Iterator[Case]:
    """The pipelines of ``schedules.py``."""
    dice = random.Random(seed)
    for number in range(num_random):
        num_stages = dice.choice([2, 3, 3, 4])
        num = dice.randint(3, 6 if num_stages < 4 else 5)
        yield Case(f"random {number}", random_works(dice, num_stages, num), num)
    plain = StageWork(0.01, 0.012, 0.008, activation_bytes=100, kept_bytes=77)
    half = StageWork(0.005, 0.006, 0.004, activation_bytes=5000, kept_bytes=3850, limit_bytes=100 * 800)
    for num in (8, 16, 32, 64):
        for room in (1, 2):
            works = [msgspec.structs.replace(plain, limit_bytes=room * 800)] * 8
            yield Case(f"8 stages, {num}, memory x{room}", works, num)
        yield Case(f"8 devices, {num}, two chunks", [half] * 16, num, 2)


def shop_of_works(works: Sequence[StageWork], num: int, chunks: int) -> Shop:
    """The same pipeline as a job shop."""
    where = homes(len(works), chunks)
    num_devices = len(works) // chunks
    names = tuple(f"n{device}/0" for device in range(num_devices))
    segments = tuple(Segment(names[device], Range(s, s + 1)) for s, device in enumerate(where))
    of_hop = list(product(range(num), range(len(works))))
    seconds: list[float] = []
    source: list[int] = []
    feeds: list[int] = []
    change: list[int] = []
    for hop, (_, stage) in enumerate(of_hop):
        work, first, last = works[stage], 3 * hop, stage == len(works) - 1
        seconds += [work.forward_s + work.send_s, work.input_s + work.return_s, work.weight_s]
        source += [first - 3 if stage else NOBODY, first if last else first + 4, first + 1]
        feeds += [first + 1 if last else first + 3, first - 2 if stage else NOBODY, NOBODY]
        change += [work.changes()[kind] for kind in "FIW"]
    rooms: list[int | None] = []
    for device in range(num_devices):
        mine = [works[stage] for stage, home in enumerate(where) if home == device]
        limit = max(work.limit_bytes for work in mine)
        rooms.append(limit - sum(work.base_bytes for work in mine) if limit else None)
    return Shop(
        tuple(Route(mb, 1, segments) for mb in range(num)),
        names,
        True,
        tuple(of_hop),
        tuple(where[stage] for _, stage in of_hop for _ in range(3)),
        tuple(seconds),
        tuple(source),
        tuple(feeds),
        tuple(len(works) - stage for _, stage in of_hop for _ in range(3)),
        tuple(change),
        tuple(rooms),
        tuple(stage for _, stage in of_hop),
        tuple((frozenset([s]), frozenset([where[s]])) for s in range(len(works))),
        (0.0,) * num_devices,
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """A pipeline in both engines: makespans and CPU seconds. ``over_bound``: of the letters' makespan."""

    name: str
    letters_s: float
    shop_s: float
    over_bound: float
    letters_cpu_s: float
    shop_cpu_s: float

    @property
    def ratio(self) -> float:
        return self.shop_s / self.letters_s


def compared(case: Case, effort: int, shop_effort: int) -> Compared:
    pipe = Pipe.of(case.works, case.chunks)
    began_s = time.process_time()
    orders = decoupled.best_orders(pipe, case.num, effort)
    letters_cpu_s = time.process_time() - began_s
    ran = run(pipe, orders)
    assert ran is not None, "orders that run"
    shop = shop_of_works(case.works, case.num, case.chunks)
    began_s = time.process_time()
    shop_s, found = routed.best_orders(shop, shop_effort, (), staggered=False)
    shop_cpu_s = time.process_time() - began_s
    assert found is not None, "orders that fit"
    over = ran.makespan_s / min_makespan_s(pipe, case.num) - 1
    return Compared(case.name, ran.makespan_s, shop_s, over, letters_cpu_s, shop_cpu_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=60, help="random pipelines")
    parser.add_argument("--effort", type=int, default=decoupled.EFFORT_AT_ONCE, help="of the letters")
    parser.add_argument("--shop-effort", type=int, default=routed.EFFORT_AT_ONCE, help="of the job shop")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = [compared(case, args.effort, args.shop_effort) for case in cases(args.cases, args.seed)]
    rows = [
        [
            each.name, f"{each.letters_s:.3f}", f"{each.shop_s:.3f}", f"{each.ratio:.4f}",
            f"{each.over_bound:.1%}", f"{each.letters_cpu_s:.3f}", f"{each.shop_cpu_s:.3f}",
        ]
        for each in found
    ]  # fmt: skip
    header = ["pipeline", "letters s", "shop s", "shop / letters", "letters / bound", "letters CPU s"]
    print(table([*header, "shop CPU s"], rows), end="\n\n")
    ratios = sorted(each.ratio for each in found)
    letters_s, shop_s = sum(each.letters_cpu_s for each in found), sum(each.shop_cpu_s for each in found)
    report = {
        "bench": "engines", "cases": len(found), "worst": ratios[-1], "median": statistics.median(ratios),
        "best": ratios[0], "letters_cpu_s": letters_s, "shop_cpu_s": shop_s, "cpu": shop_s / letters_s,
        "one_would_do": ratios[-1] <= WITHIN and shop_s <= MAX_CPU * letters_s,
    }  # fmt: skip
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
