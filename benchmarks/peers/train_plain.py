"""A plain loop of torch on one device: autocast to bf16, micro-batches added up by autograd, clipping, AdamW.
Trains when it is asked to (``serving``).

    python -m benchmarks.peers.train_plain --config FILE [--kind cuda]

FILE: JSON with ``family`` and ``model`` (fields of its config in transformers), ``global_batch``,
``micro_batch``, ``sequence`` and ``lr``. Loops: ``plain``; ``deterministic``, with torch's deterministic
algorithms; ``compiled``, those and the whole model compiled. All train the same model, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.serving import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--kind", choices=["cpu", "cuda"], default="cuda")
    args = parser.parse_args()
    job, kind = json.loads(args.config.read_text()), args.kind
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA begins; without it none repeats itself
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    config = AutoConfig.for_model(job["family"], **job["model"], use_cache=False)
    with torch.device(kind):
        net = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=job["lr"], fused=True)
    num_micro_batches = job["global_batch"] // job["micro_batch"]
    size = (job["micro_batch"], job["sequence"])
    draw = torch.Generator().manual_seed(1)

    def step(forward: Callable[..., torch.nn.Module]) -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(num_micro_batches):
            tokens = torch.randint(0, 256, size, generator=draw).to(kind)
            with torch.autocast(kind, torch.bfloat16):
                loss = forward(input_ids=tokens, labels=tokens).loss / num_micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        loss.item()  # the step is over

    forwards = {"plain": net, "deterministic": net, "compiled": torch.compile(net, dynamic=False)}

    def loop_of(name: str) -> Callable[[], None]:
        torch.use_deterministic_algorithms(mode=name != "plain")
        return lambda: step(forwards[name])

    serve(loop_of, kind)


if __name__ == "__main__":
    main()
