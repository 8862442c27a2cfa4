"""The schedules of torch.distributed.pipelining on gloo, with layers that sleep in F, I and W.

python -m benchmarks.peers.train_schedules --schedule 1F1B                     four stages
python -m benchmarks.peers.train_schedules --schedule InterleavedZeroBubble    eight stages, two a process
python -m benchmarks.peers.train_schedules --schedule ZBVZeroBubble            the same, in the form of a V
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.peers import shape
from benchmarks.peers.attempts import AttemptLog
from benchmarks.peers.model import Stage, Text, adamw, gpt2, loss_of, run
from benchmarks.peers.train_ddp import GLOO_TIMEOUT


class _Asleep(torch.autograd.Function):
    """What it is given, after a sleep when its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingStage(Stage):
    """A stage that sleeps in its forward, in the backward of its input and in that of a weight of its own."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__(model, index, count)
        self.seconds = shape.ASLEEP_S * shape.NUM_LAYERS / count
        self.weight = torch.nn.Parameter(torch.zeros(shape.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = _Asleep.apply(x, self.seconds) + _Asleep.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", required=True)
    name = parser.parse_args().schedule
    log = AttemptLog(f"rank{os.environ['RANK']}")
    model, text = gpt2(), Text()
    dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    count = size if single else 2 * size
    mine = [rank] if single else [rank, count - 1 - rank if name.startswith("ZBV") else rank + size]
    parts = [SleepingStage(model, index, count) for index in mine]
    stages = [PipelineStage(part, i, count, torch.device("cpu")) for i, part in zip(mine, parts, strict=True)]
    num_micro_batches = shape.GLOBAL_BATCH // shape.MICRO_BATCH
    schedule = kind(stages[0] if single else stages, num_micro_batches, loss_fn=loss_of)
    optimizer = adamw(torch.nn.ModuleList(parts))
    first, last, step = 0 in mine, count - 1 in mine, 0
    while True:
        began_at = time.time()
        tokens = text.batch(step * shape.GLOBAL_BATCH, shape.GLOBAL_BATCH)
        optimizer.zero_grad()
        run(schedule, tokens, first=first, last=last)
        optimizer.step()
        step += 1
        log.add(step, began_at, size)


if __name__ == "__main__":
    main()
