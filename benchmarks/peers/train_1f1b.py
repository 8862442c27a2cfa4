"""torch.distributed.pipelining with Schedule1F1B on gloo; with more than one replica, DDP over each stage.

python -m benchmarks.peers.train_1f1b --stages 4      one pipeline of four stages
python -m benchmarks.peers.train_1f1b --stages 2      two replicas of two stages, with four processes
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import shape
from benchmarks.peers.attempts import AttemptLog
from benchmarks.peers.model import Stage, Text, adamw, gpt2, loss_of, run
from benchmarks.peers.train_ddp import GLOO_TIMEOUT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, required=True)
    num_stages = parser.parse_args().stages
    log = AttemptLog(f"rank{os.environ['RANK']}")
    model, text = gpt2(), Text()
    dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    replicas = dist.get_world_size() // num_stages
    mesh = init_device_mesh("cpu", (replicas, num_stages), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    part: torch.nn.Module = Stage(model, index, num_stages)
    optimizer = adamw(part)
    if replicas > 1:
        part = DistributedDataParallel(part, process_group=mesh.get_group("replica"))
    stage = PipelineStage(part, index, num_stages, torch.device("cpu"), group=mesh.get_group("stage"))
    share = shape.GLOBAL_BATCH // replicas
    schedule = Schedule1F1B(stage, share // shape.MICRO_BATCH, loss_fn=loss_of)
    first, last, step = index == 0, index == num_stages - 1, 0
    while True:
        began_at = time.time()
        tokens = text.batch(step * shape.GLOBAL_BATCH + replica * share, share)
        optimizer.zero_grad()
        run(schedule, tokens, first=first, last=last)
        optimizer.step()
        step += 1
        log.add(step, began_at, dist.get_world_size())


if __name__ == "__main__":
    main()
