"""Exact optima in a file, and whether the planner meets them.

The format: ``templates`` (public models, whose layers lie in profiles.json beside the file),
``instantiation``, ``small_bruteforced``, ``guarantee`` and ``original_planner_partitions``; each may be
missing. Times in ms, 18 bytes of state a parameter, 25e9 bytes/s and 0.02 ms between nodes. ``write`` makes
such a file with brute force.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.brute import SizesCase, SplitCase, best_split_s, best_step_s, random_sizes_case, stages_time_s
from oobleckd.planner.plan import Template
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.sizing.instantiate import instantiate
from oobleckd.planner.templates.guarantee import largest_useful, n_max_down_to_n0, n_max_for_f
from oobleckd.planner.templates.template import templates_for

LATENCY_S, BYTES_PER_S = 0.02e-3, 25e9
STATE_BYTES, WEIGHT_BYTES = 18, 4  # a parameter
RESERVE_BYTES = 2_000_000_000
CLOSE = 1e-6  # the files have six decimals
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """A row of a file: ``ours`` against the optimum ``theirs``, in ms (inf: nothing fits)."""

    what: str
    ours: float
    theirs: float

    @property
    def met(self) -> bool:
        """Equal or better; what cannot be had must not be had."""
        if math.isinf(self.theirs):
            return math.isinf(self.ours)
        return self.ours <= self.theirs * (1 + CLOSE)


def check(path: Path) -> Iterator[Checked]:
    """Every row of the file at ``path``."""
    rows = json.loads(path.read_text())
    beside = path.parent / "profiles.json"
    models = json.loads(beside.read_text()) if beside.exists() else {}
    for row in rows.get("templates", ()):
        yield from _check_templates(row, models)
    for row in rows.get("instantiation", ()):
        yield from _check_instantiation(row, models)
    for number, row in enumerate(rows.get("small_bruteforced", ())):
        yield Checked(f"small case {number}", _template_ms(_small_case(row)), _ms(row["T"]))
    for row in rows.get("guarantee", ()):
        yield from _check_guarantee(row)
    for row in rows.get("original_planner_partitions", ()):
        yield from _check_partitions(row, models)


def write(path: Path, num_rows: int) -> None:
    """Write ``num_rows`` small rows of either kind to ``path``, found by trying everything."""
    small = [_small_row(random.Random(seed)) for seed in range(num_rows)]
    sizes = [_sizes_row(random_sizes_case(random.Random(seed))) for seed in range(num_rows)]
    text = json.dumps({"about": __doc__, "small_bruteforced": small, "instantiation": sizes}, indent=1)
    path.write_text(text + "\n")


def profile_of(layers: Sequence[Row], gpus_per_node: int, reserve_bytes: int) -> Profile:
    """The profile of layers as the files have them, for stages on any divisor of a node's devices."""
    counts = [g for g in range(2, gpus_per_node + 1) if gpus_per_node % g == 0]
    made = tuple(
        LayerCost(
            f"layer {number}",
            layer["forward"] / 1e3,
            layer["backward"] / 1e3,
            WEIGHT_BYTES * layer["params"],
            STATE_BYTES * layer["params"],
            layer["act_bytes"],
            layer["out_bytes"],
            tuple((g, _allreduce_ms(layer["allreduce_in_node"], g) / 1e3) for g in counts),
        )
        for number, layer in enumerate(layers)
    )
    return Profile("reference", "gpu", made, LATENCY_S, BYTES_PER_S, reserve_bytes)


def reduce_s(layers: Sequence[Row], most: int) -> list[float]:
    """Entry c: the part of an all-reduce among c pipelines that no computation hides, in seconds: a ring
    over the weights of one layer, a typical one, which is the last to have its gradients.
    """
    num_bytes = WEIGHT_BYTES * sorted(layer["params"] for layer in layers)[len(layers) // 2]
    rings = [2 * (c - 1) / c * num_bytes / BYTES_PER_S + LATENCY_S * math.log2(c) for c in range(1, most + 1)]
    return [0.0, *rings]


def _check_templates(row: Row, models: Row) -> Iterator[Checked]:
    layers, gpus = models[row["model"]]["layers"], row["gpus_per_node"]
    for best in row["result"]:
        share = _micro_batches(row["m"], best["n"])
        setup = _setup(profile_of(layers, gpus, RESERVE_BYTES), gpus, row["mem_limit"], share)
        ours = _template_ms(SplitCase(setup, best["n"], share))
        yield Checked(f"{row['model']}, {best['n']} nodes of {gpus}", ours, _ms(best["T"]))


def _check_instantiation(row: Row, models: Row) -> Iterator[Checked]:
    made = [Template(size, 1, (), fill / 1e3, period / 1e3) for size, fill, period in row["templates"]]
    what = f"{row['model'] or 'sizes'}, N = {row['N']}, M = {row['M']}"
    if row["T"] is not None:
        found = instantiate(made, row["N"], row["f"], row["M"])
        yield Checked(what, found.step_s * 1e3, row["T"])
    if row["T_with_allreduce"] is not None:
        most = row["N"] // made[0].num_nodes
        if "allreduce_ms" in row:
            reduce = [value / 1e3 for value in row["allreduce_ms"]]
        else:
            reduce = reduce_s(models[row["model"]]["layers"], most)
        found = instantiate(made, row["N"], row["f"], row["M"], reduce)
        yield Checked(f"{what}, with all-reduce", found.step_s * 1e3, row["T_with_allreduce"])


def _check_guarantee(row: Row) -> Iterator[Checked]:
    n0, f, nodes = row["n0"], row["f"], row["N"]
    answers: dict[str, Callable[[], int]] = {
        "nmax_f_guarantee": lambda: n_max_for_f(n0, f, nodes),
        "nmax_every_node_down_to_n0": lambda: n_max_down_to_n0(n0, nodes),
        "nmax_largest_useful": lambda: largest_useful(n0, f, nodes),
    }
    for name, answer in answers.items():
        differs = math.nan if answer() != row[name] else float(answer())
        yield Checked(f"{name} of n0={n0}, f={f}, N={nodes}", differs, row[name])


def _check_partitions(row: Row, models: Row) -> Iterator[Checked]:
    """Ours against the original's stages, under our model without a memory limit."""
    gpus = row["gpus_per_node"]
    profile = profile_of(models[row["model"]]["layers"], gpus, RESERVE_BYTES)
    for part in row["partitions"]:
        share = 8 * part["n"]
        theirs = stages_time_s(profile, tuple(tuple(stage) for stage in part["stages"]), share) * 1e3
        ours = _template_ms(SplitCase(_setup(profile, gpus, None, share), part["n"], share))
        yield Checked(f"original's {row['model']}, {part['n']} nodes of {gpus}", ours, theirs)


def _small_case(row: Row) -> SplitCase:
    profile = profile_of(row["layers"], row["gpus_per_node"], row["reserve"])
    return SplitCase(_setup(profile, row["gpus_per_node"], row["mem_limit"], row["m"]), row["n"], row["m"])


def _template_ms(case: SplitCase) -> float:
    try:
        (made,) = templates_for(case.setup, [(case.num_nodes, case.share)])
    except PlanError:
        return math.inf
    return made.time_s(case.share) * 1e3


def _setup(profile: Profile, gpus_per_node: int, mem_limit: float | None, num_micro_batches: int) -> Setup:
    limit = int(mem_limit or 0)
    return Setup(profile, num_micro_batches, 0, limit, gpus_per_node, 0, max_devices_per_stage=gpus_per_node)


def _allreduce_ms(known: Mapping[str, float], num_devices: int) -> float:
    """Of ``known`` (devices -> ms); between two of them as in a ring, linear in (g - 1) / g."""
    if str(num_devices) in known:
        return known[str(num_devices)]
    near = sorted(known, key=lambda g: abs(int(g) - num_devices))[:2]
    (x0, y0), (x1, y1) = (((int(g) - 1) / int(g), known[g]) for g in near)
    return y0 + (y1 - y0) * ((num_devices - 1) / num_devices - x0) / (x1 - x0)


def _micro_batches(m: int | str, num_nodes: int) -> int:
    """``m`` of a row: a number, or a multiple such as "8*n"."""
    return int(m.partition("*")[0]) * num_nodes if isinstance(m, str) else m


def _ms(value: float | None) -> float:
    return math.inf if value is None else value


def _small_row(chance: random.Random) -> Row:
    gpus = chance.choice([1, 2, 4, 6])
    num_nodes = chance.randint(1, 1 if gpus > 2 else 2)
    counts = [g for g in range(1, gpus + 1) if gpus % g == 0]
    layers = [
        {
            "forward": round(chance.uniform(1, 3), 3),
            "backward": round(chance.uniform(2, 6), 3),
            "params": 10**7 * chance.randint(1, 5),
            "act_bytes": 10**8 * chance.randint(0, 5),
            "out_bytes": 10**6 * chance.randint(0, 3),
            "allreduce_in_node": {str(g): round(chance.uniform(0, 1), 3) if g > 1 else 0 for g in counts},
        }
        for _ in range(chance.randint(3, 7))
    ]
    limit = chance.choice([None, 10**9 * chance.randint(1, 8)])
    row = {"layers": layers, "gpus_per_node": gpus, "n": num_nodes, "mem_limit": limit, "reserve": 0}
    row["m"] = chance.randint(1, 20)
    best_ms = best_split_s(_small_case(row), counts) * 1e3
    return {**row, "T": None if math.isinf(best_ms) else round(best_ms, 6)}


def _sizes_row(case: SizesCase) -> Row:
    best_ms = round(best_step_s(case)[0] * 1e3, 6)
    row = {
        "model": "",
        "gpus_per_node": 1,
        "N": case.num_nodes,
        "f": case.f,
        "M": case.num_micro_batches,
        "templates": [[t.num_nodes, t.fill_s * 1e3, t.period_s * 1e3] for t in case.templates],
        "T": None if case.reduce_s else best_ms,
        "T_with_allreduce": best_ms if case.reduce_s else None,
    }
    return {**row, "allreduce_ms": [s * 1e3 for s in case.reduce_s]} if case.reduce_s else row
