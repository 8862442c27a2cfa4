"""What a decoupled backward costs beside a fused one: seconds of a block, and what it holds meanwhile.

    python benchmarks/backward.py [--pairs 40]

A block of GPT-2 and one of Llama, width 256, one process with one thread: forward, backward and the sums of
one micro-batch, the two ways in turns. Held: between I and W against between forward and backward. The last
line is one JSON object; exits 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.ratios import median_interval
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job
from oobleckd.worker import sums
from oobleckd.worker.device.measure import measure
from oobleckd.worker.models import Layer, gradients, input_gradients, load_spec
from oobleckd.worker.state.store import Store

MAX_TIME, MAX_HELD = 1.05, 0.8
WIDTH, HEADS, SEQUENCE, MICRO_BATCH = 256, 8, 256, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_embd": WIDTH, "n_head": HEADS, "n_positions": SEQUENCE, "vocab_size": 256,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"num_hidden_layers": 1, "hidden_size": WIDTH, "num_attention_heads": HEADS, "vocab_size": 256,
              "num_key_value_heads": HEADS, "intermediate_size": 683, "max_position_embeddings": SEQUENCE},
}  # fmt: skip
_BLOCK = 1
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """A family's block: the ratio of the times (median and its interval), I and W as shares of a backward,
    and what is held.
    """

    family: str
    time_ratio: float
    low: float
    high: float
    input_share: float
    held_ratio: float


def job_of(family: str, backward: str) -> Job:
    """A job whose only block is measured."""
    return parse_job(
        {
            "name": family,
            "model": {"family": family, "config": FAMILIES[family]},
            "train": {"steps": 1, "global_batch": 2, "micro_batch": MICRO_BATCH, "sequence": SEQUENCE},
            "schedule": {"backward": backward},
        }
    )


def block(job: Job) -> tuple[Layer, sums.Sum]:
    """The block on this device, and its gradient sums."""
    spec = load_spec(job)
    store = Store(spec, _CPU)
    layers = [index for index in range(spec.num_layers) if index == _BLOCK]
    params = {
        key: leaf.requires_grad_()
        for bucket in spec.buckets_of(_BLOCK)
        for key, leaf in zip(spec.buckets[bucket].keys, store.fresh(bucket).params, strict=True)
    }
    layer = spec.layer(layers[0], params, _CPU)
    return layer, sums.Sum([tuple(leaf.shape) for leaf in layer.leaves], exact=True, device=_CPU)


def fused(layer: Layer, into: sums.Sum, x: torch.Tensor, g: torch.Tensor) -> None:
    """One micro-batch."""
    out = layer(x, None)
    grads = gradients(out, [*layer.leaves, x], g)
    into.add(grads[:-1], [30] * len(layer.leaves), 8)


def decoupled(layer: Layer, into: sums.Sum, x: torch.Tensor, g: torch.Tensor) -> None:
    """The same, as I and W."""
    out, owed = layer.forward_apart(x, None)
    found = input_gradients(out, [*layer.leaves, x], g, owed)
    into.add(owed.complete(layer.leaves, found[:-1]), [30] * len(layer.leaves), 8)


def seconds(step: Callable[[], None], times: int) -> float:
    """Of one call of ``step``."""
    began = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - began) / times


def measured(family: str, pairs: int) -> Row:
    """Both ways in turns; every other pair begins with the other one."""
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCH, SEQUENCE, WIDTH)
    x = torch.randn(shape, generator=generator).requires_grad_()
    g = torch.randn(shape, generator=generator) * 1e-3
    whole, apart = block(job_of(family, "fused")), block(job_of(family, "decoupled"))
    steps = {"fused": lambda: fused(*whole, x, g), "decoupled": lambda: decoupled(*apart, x, g)}
    ratios = []
    for pair in range(-2, pairs):
        order = sorted(steps, reverse=pair % 2 == 0)
        took = {name: seconds(steps[name], 3) for name in order}
        if pair >= 0:
            ratios.append(took["decoupled"] / took["fused"])
    found = median_interval(ratios)
    job = job_of(family, "decoupled")
    cost = measure(load_spec(job), job, _CPU).layers[_BLOCK]
    share = 1 - cost.weight_s / cost.backward_s
    return Row(family, found.median, found.low, found.high, share, cost.kept_bytes / cost.activation_bytes)


def main() -> int:
    """Measure, print, compare with the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(family, args.pairs) for family in FAMILIES]
    cells = [
        [
            row.family,
            f"{row.time_ratio:.3f} ({row.low:.3f} to {row.high:.3f})",
            f"{row.input_share:.0%} : {1 - row.input_share:.0%}",
            f"{row.held_ratio:.2f}",
        ]
        for row in rows
    ]
    print(table(["block", "time, decoupled : fused", "I : W", "held between I and W"], cells))
    slow = statistics.fmean(row.time_ratio for row in rows)
    met = all(row.time_ratio <= MAX_TIME and row.held_ratio <= MAX_HELD for row in rows)
    print(
        f"goals: time at most {MAX_TIME}, held at most {MAX_HELD}: {'met' if met else 'MISSED'} (mean "
        f"{slow:.3f})"
    )
    print(json.dumps({"rows": [asdict(row) for row in rows], "met": met, "load1": os.getloadavg()[0]}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
