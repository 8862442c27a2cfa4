"""torchft over replica groups that are pipelines: Schedule1F1B inside a group, all-reduce between groups.

torchrun --nproc-per-node 2 -m benchmarks.peers.train_torchft_1f1b    once per group, REPLICA_GROUP_ID set
"""

from __future__ import annotations

import datetime as dt
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torchft import Optimizer  # type: ignore[import-not-found]

from benchmarks.peers import shape
from benchmarks.peers.attempts import AttemptLog
from benchmarks.peers.model import Stage, Text, adamw, gpt2, loss_of, run
from benchmarks.peers.train_torchft import log_step, manager_for


def main() -> None:
    group, rank = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["RANK"])
    log = AttemptLog(f"group{group}-stage{rank}")
    model, text = gpt2(), Text()
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=30))
    num_stages = dist.get_world_size()
    num_groups = shape.NUM_PROCESSES // num_stages
    part = Stage(model, rank, num_stages)
    stage = PipelineStage(part, rank, num_stages, torch.device("cpu"))
    share, position = shape.GLOBAL_BATCH // num_groups, 0
    schedule = Schedule1F1B(stage, share // shape.MICRO_BATCH, loss_fn=loss_of)
    inner = adamw(part)
    manager = manager_for(part, inner, group)
    optimizer, parameters = Optimizer(manager, inner), list(part.parameters())
    first, last = rank == 0, rank == num_stages - 1
    while True:
        began_at, before = time.time(), manager.current_step()
        tokens = text.batch(position * shape.GLOBAL_BATCH + group * share, share)
        position += 1
        optimizer.zero_grad()
        run(schedule, tokens, first=first, last=last)
        reduce_gradients(manager, parameters)
        optimizer.step()
        log_step(log, manager, began_at, before)


def reduce_gradients(manager: object, parameters: list[torch.nn.Parameter]) -> None:
    """The mean gradient over the groups, in one flat all-reduce."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()  # type: ignore[attr-defined]
    for gradient, reduced in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(reduced.view_as(gradient))


if __name__ == "__main__":
    main()
