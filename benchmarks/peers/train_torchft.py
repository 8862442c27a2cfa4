"""torchft, one replica group a process (the first loop of its README): DDP over groups that come and go.

torchrun --nproc-per-node 1 -m benchmarks.peers.train_torchft      once per group, REPLICA_GROUP_ID set
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from benchmarks.peers import shape
from benchmarks.peers.attempts import AttemptLog
from benchmarks.peers.model import Text, adamw, gpt2


def main() -> None:
    group = int(os.environ["REPLICA_GROUP_ID"])
    log = AttemptLog(f"group{group}")
    model, text = gpt2(), Text()
    inner = adamw(model)
    manager = manager_for(model, inner, group)
    replica, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    share, position = shape.GLOBAL_BATCH // shape.NUM_PROCESSES, 0
    while True:
        began_at, before = time.time(), manager.current_step()
        # As in torchft's example: a group reads on whether the step was committed or not.
        tokens = text.batch(position * shape.GLOBAL_BATCH + group * share, share)
        position += 1
        optimizer.zero_grad()
        replica(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        log_step(log, manager, began_at, before)


def manager_for(module: Any, optimizer: Any, group: int) -> Any:
    """A Manager that heals by copying model and optimizer from another group."""

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        replica_id=f"group{group}",
        hostname="localhost",
    )


def log_step(log: AttemptLog, manager: Any, began_at: float, before: int) -> None:
    """Write down an attempt. A group that only heals in it gives no gradient, and is not logged."""
    if manager.is_participating():
        committed = manager.current_step() > before
        log.add(manager.current_step(), began_at, manager.num_participants(), committed=committed)


if __name__ == "__main__":
    main()
