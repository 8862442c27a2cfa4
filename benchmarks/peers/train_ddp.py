"""DistributedDataParallel on gloo, a process per device. With a folder it saves checkpoints and starts from
the last one, which is what torchrun's restart needs.

    python -m benchmarks.peers.train_ddp [--checkpoints DIR]
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import shape
from benchmarks.peers.attempts import AttemptLog
from benchmarks.peers.model import Text, adamw, gpt2

GLOO_TIMEOUT = dt.timedelta(hours=1)  # the benchmark stops processes while others are measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path)
    folder: Path | None = parser.parse_args().checkpoints
    log = AttemptLog(f"rank{os.environ['RANK']}")
    model, text = gpt2(), Text()
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=30) if folder else GLOO_TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer, step = adamw(model), 0
    file = folder / "last.pt" if folder else None
    if file and file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replica, share = DistributedDataParallel(model), shape.GLOBAL_BATCH // world
    while True:
        began_at = time.time()
        tokens = text.batch(step * shape.GLOBAL_BATCH + rank * share, share)
        optimizer.zero_grad()
        replica(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        step += 1
        log.add(step, began_at, world)
        if file and rank == 0 and step % shape.CHECKPOINT_EVERY == 0:
            new = file.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            new.replace(file)


if __name__ == "__main__":
    main()
