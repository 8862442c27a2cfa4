"""Tokens/s of one device on one GPU, without failures, beside a plain loop of torch; in pairs that take
turns.

    python benchmarks/one_gpu.py [--pairs 5] [--steps 10] [--kind cuda]

A GPT-2 of 124 M parameters and an untied head, bf16, 64 sequences of 1,024 tokens in 8 micro-batches. Ours is
a job as a user submits it: exact sums, digests and guards as they are by default; and the same with float
sums. Torch's loop is once as it comes and once with its deterministic algorithms. The last line is one JSON
object. ``--kind cpu`` shrinks all of it, to try the script out and for nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import Cluster, ClusterFailed
from benchmarks.peers.launch import PeerFailed, Programs, endable
from benchmarks.ratios import median_interval
from benchmarks.tables import table
from benchmarks.throughput import Window, peer_window, rate
from oobleckd.protocol.job import parse_job

WARM_UP = 2
PLAIN, DETERMINISTIC = "torch", "torch, deterministic"
EXACT, FLOAT = "oobleckd, exact sums", "oobleckd, float sums"
COMPARED = ((EXACT, PLAIN), (EXACT, DETERMINISTIC), (FLOAT, DETERMINISTIC))


def setting(kind: str) -> dict[str, Any]:
    """Model and batch."""
    small = kind == "cpu"
    size = (
        {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}
        if small
        else {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257}
    )
    sequence = 64 if small else 1024
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    return {
        "model": {**size, "n_positions": sequence, **dropout, **special},
        "global_batch": 64, "micro_batch": 8, "sequence": sequence, "lr": 3e-4,
    }  # fmt: skip


def our_window(cluster: Cluster, job: dict[str, Any], *, exact: bool) -> Window:
    """Each a job of its own on the same cluster."""

    def run(steps: int) -> float:
        shape = {key: job[key] for key in ("global_batch", "micro_batch", "sequence")}
        spec = parse_job({
            "name": "exact" if exact else "float",
            "model": {"family": "gpt2", "config": job["model"]},
            "train": {**shape, "steps": WARM_UP + steps + 1, "precision": "bf16", "exact": exact},
            "optimizer": {"lr": job["lr"]},
            "fault_tolerance": {"f": 0},
            "checkpoint": {"every": 0},
        })  # fmt: skip
        cluster.resume()
        submitted = cluster.submit(spec)
        cluster.in_state(submitted, "done")
        done = cluster.client.steps(submitted)
        cluster.pause()
        return rate([step.at for step in done][WARM_UP:], job["global_batch"])

    return run


def measure(kind: str, pairs: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """Tokens/s of each, once a round; only one is not stopped at a time. Every other round goes backwards."""
    job = setting(kind)
    (folder / "job.json").write_text(json.dumps(job))
    with contextlib.ExitStack() as stack:
        windows: dict[str, Window] = {}
        for name, more in ((PLAIN, []), (DETERMINISTIC, ["--deterministic"])):
            programs = stack.enter_context(Programs(folder / name.replace(", ", "-")))
            argv = [
                "-m",
                "benchmarks.peers.train_plain",
                "--config",
                str(folder / "job.json"),
                "--kind",
                kind,
                *more,
            ]
            programs.start(name, [sys.executable, *argv])
            windows[name] = peer_window(programs, job["global_batch"])
            windows[name](1)
        cluster = stack.enter_context(Cluster(folder / "ours", 1, kind=kind))
        cluster.pause()
        windows |= {EXACT: our_window(cluster, job, exact=True), FLOAT: our_window(cluster, job, exact=False)}
        rates: dict[str, list[float]] = {name: [] for name in windows}
        order = [PLAIN, EXACT, DETERMINISTIC, FLOAT]
        for turn in range(pairs):
            for name in order[::-1] if turn % 2 else order:
                rates[name].append(windows[name](steps) * job["sequence"])
                print(
                    f"{turn + 1}/{pairs} {name}: {rates[name][-1]:,.0f} tokens/s", file=sys.stderr, flush=True
                )
    return rates


def report(kind: str, rates: dict[str, list[float]]) -> dict[str, object]:
    """Print the tables; returns what the JSON line says."""
    medians = {name: median_interval(values).median for name, values in rates.items()}
    print(
        table(["system", "tokens/s"], [[name, f"{value:,.0f}"] for name, value in medians.items()]),
        end="\n\n",
    )
    ratios = {
        f"{ours} / {peer}": median_interval([a / b for a, b in zip(rates[ours], rates[peer], strict=True)])
        for ours, peer in COMPARED
    }
    rows = [
        [name, f"{r.median:.3f}", f"{r.low:.3f}-{r.high:.3f}", f"{r.confidence:.1%}"]
        for name, r in ratios.items()
    ]
    print(table(["ratio", "median", "interval", "confidence"], rows), end="\n\n")
    told = {name: asdict(interval) for name, interval in ratios.items()}
    return {"bench": "one_gpu", "kind": kind, "tokens_per_s": medians, "ratios": told, "rates": rates}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a window")
    parser.add_argument("--kind", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
            rates = measure(args.kind, args.pairs, args.steps, Path(folder))
    except (ClusterFailed, PeerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report(args.kind, rates)))
    return 0


if __name__ == "__main__":
    sys.exit(endable(main))
