"""CPU seconds of a step of the device's loop over a plain loop's, on a model so small that nothing but
dispatch is left.

    python benchmarks/dispatch.py [--pairs 9] [--steps 4] [--profile]

A GPT-2 of 12 blocks of width 16, bf16, 8 micro-batches of one row of 8 tokens. Ours is a device without peers
in this process (``alone.py``): its sums are once as they are on this machine, compiled where there is a C
compiler, and once added up by torch's operations, as on a GPU without Triton. The plain loop is autocast,
autograd's own additions, and clipping and AdamW by lists, as torch does them on a GPU. ``--profile`` prints
where ours spends its time, by function. The last line is one JSON object; exits 1 where the goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from benchmarks.alone import Step, device_loop
from benchmarks.tables import table
from oobleckd.protocol.job import Job, parse_job

GOAL = 1.2
NUM_BLOCKS, NUM_MICRO_BATCHES, SEQUENCE, VOCABULARY = 12, 8, 8, 128
LEARNING_RATE = 1e-3
PLAIN, OURS, OURS_TORCH = "plain loop", "oobleckd", "oobleckd, torch's sums"
_WARM_UP, _SHOWN = 2, 40


def model() -> dict[str, Any]:
    """Fields of ``GPT2Config``: no dropout, head and embedding untied."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    size = {"n_layer": NUM_BLOCKS, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    return {**size, **dropout, **special}


def job(folder: Path) -> Job:
    """A job of that model for one device, with everything that it does not need to say left at its
    default.
    """
    (folder / "text").write_bytes(bytes(range(32, 127)) * 40)
    train = {"global_batch": NUM_MICRO_BATCHES, "micro_batch": 1, "sequence": SEQUENCE, "precision": "bf16"}
    return parse_job({
        "name": "dispatch",
        "model": {"family": "gpt2", "config": model()},
        "data": {"source": "text", "path": str(folder / "text")},
        "train": {**train, "steps": 1_000_000},
        "optimizer": {"lr": LEARNING_RATE},
        "checkpoint": {"every": 0},
        "fault_tolerance": {"f": 0},
    })  # fmt: skip


def our_loop(folder: Path, *, whole: bool = False) -> AbstractContextManager[Step]:
    """A device that has all layers and no peers. ``whole``: its sums are added up by torch's operations."""
    return device_loop(job(folder), folder, whole=whole)


def plain_loop() -> Step:
    """The same model, batch and rule in torch alone."""
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(**model())).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, foreach=True)
    tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(NUM_MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(input_ids=tokens, labels=tokens).loss / NUM_MICRO_BATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def cpu_s(step: Step, num_steps: int) -> float:
    """CPU seconds of this process for a step, over so many."""
    began_s = time.process_time()
    for _ in range(num_steps):
        step()
    return (time.process_time() - began_s) / num_steps


def measure(pairs: int, num_steps: int, folder: Path) -> dict[str, list[float]]:
    """CPU seconds of a step of each, in turns; every other round goes backwards."""
    found: dict[str, list[float]] = {name: [] for name in (OURS, PLAIN, OURS_TORCH)}
    with contextlib.ExitStack() as stack:
        loops = {PLAIN: plain_loop()}
        for name, whole in ((OURS, False), (OURS_TORCH, True)):
            (at := folder / ("torch" if whole else "here")).mkdir()
            loops[name] = stack.enter_context(our_loop(at, whole=whole))
        for loop in loops.values():
            cpu_s(loop, _WARM_UP)
        for turn in range(pairs):
            for name in reversed(found) if turn % 2 else found:
                found[name].append(cpu_s(loops[name], num_steps))
    return found


def report(found: dict[str, list[float]]) -> tuple[dict[str, object], bool]:
    """Print the tables; returns what the JSON line says, and whether the goal is met."""
    rows = [[name, f"{statistics.median(each) * 1e3:.1f}"] for name, each in found.items()]
    print(table(["loop", "CPU ms a step"], rows), end="\n\n")
    told: dict[str, dict[str, Any]] = {}
    rows = []
    for name in (OURS, OURS_TORCH):
        ratios = [ours / plain for ours, plain in zip(found[name], found[PLAIN], strict=True)]
        low, median, high = _quartiles(ratios)
        told[name] = {"median": median, "quartiles": [low, high], "ratios": ratios}
        asked = (f"<= {GOAL}", "met" if median <= GOAL else "missed") if name == OURS else ("", "")
        rows.append([f"{name} / {PLAIN}", f"{median:.3f}", f"{low:.3f}-{high:.3f}", *asked])
    print(table(["ratio", "median", "quartiles", "goal", ""], rows), end="\n\n")
    all_of_it = {"bench": "dispatch", "cpu_s": found, "ratios": told, "load1": os.getloadavg()[0]}
    return all_of_it, told[OURS]["median"] <= GOAL


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def profile(num_steps: int, folder: Path) -> None:
    """Print where ours spends its time, by function."""
    with our_loop(folder) as step:
        cpu_s(step, _WARM_UP)
        profiler = cProfile.Profile(time.process_time)
        profiler.runcall(cpu_s, step, num_steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(_SHOWN)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of a window of one loop")
    parser.add_argument("--profile", action="store_true", help="print where ours spends its time instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
        if args.profile:
            profile(args.steps, Path(folder))
            return 0
        found = measure(args.pairs, args.steps, Path(folder))
    told, met = report(found)
    print(json.dumps(told))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
