"""A plain loop of torch on one device: autocast to bf16, micro-batches added up by autograd, AdamW. Writes
down when its steps ended.

    python -m benchmarks.peers.train_plain --config FILE [--kind cuda] [--deterministic]

FILE: JSON with ``model`` (fields of ``GPT2Config``), ``global_batch``, ``micro_batch``, ``sequence`` and
``lr``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.peers.attempts import AttemptLog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--kind", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    job = json.loads(args.config.read_text())
    torch.set_num_threads(1)
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**job["model"])).to(args.kind).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"])
    num_micro_batches = job["global_batch"] // job["micro_batch"]
    size = (job["micro_batch"], job["sequence"])
    draw = torch.Generator().manual_seed(1)
    log, step = AttemptLog("rank0"), 0
    while True:
        began_at = time.time()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(num_micro_batches):
            tokens = torch.randint(0, 256, size, generator=draw).to(args.kind)
            with torch.autocast(args.kind, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / num_micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()  # the step is over
        step += 1
        log.add(step, began_at, 1)


if __name__ == "__main__":
    main()
