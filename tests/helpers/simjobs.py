"""Jobs of simulated worlds, and what their layers cost."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.protocol.batchramp import BatchRamp
from oobleckd.protocol.job import Checkpoint, FaultTolerance, Job, PolicyName, Train
from oobleckd.protocol.jobdata import Data
from oobleckd.protocol.jobeval import Eval, EvalSource
from oobleckd.protocol.jobschedule import Resources, Schedule

UNPREPARED = Data(source="jsonl", path="/x.jsonl", tokenizer="/tokenizer")


def profile(num_layers: int, state_bytes: int = 100) -> Profile:
    """Equal layers; the first and the last share a tied weight."""
    layer = LayerCost("layer", 0.001, 0.002, state_bytes // 4, state_bytes, 1, 1)
    buckets = (*((n,) for n in range(num_layers)), (0, num_layers - 1))
    return Profile("sim", "cpu", (layer,) * num_layers, buckets=buckets)


def evaluation(
    *, every: int = 0, sequences: int = 5, sources: int = 2, at_start: bool = False, at_end: bool = True
) -> Eval:
    """Of so many sources, each of so many micro-batches of a job made here."""
    named = tuple(EvalSource(name=f"held-{at}", kind="text", path="/held.txt") for at in range(sources))
    return Eval(every=every, sequences=sequences, at_start=at_start, at_end=at_end, source=named)


def make_job(
    name: str = "job",
    *,
    steps: int = 20,
    f: int = 1,
    every: int | Literal["auto"] = 0,
    keep: int = 2,
    memory: int = 0,
    max_nodes: int = 0,
    min_pipeline_nodes: int = 1,
    policy: PolicyName = "oobleck",
    schedule: Schedule | None = None,
    check_every: int = 1,
    slow: Literal["report", "drain"] = "report",
    data: Data | None = None,
    evaluation: Eval | None = None,
    batch_ramp: BatchRamp | UnsetType = UNSET,
    devices_per_stage: Literal["auto", 1, 2, 4, 8] = 1,
) -> Job:
    return Job(
        name=name,
        train=Train(steps=steps, global_batch=8, micro_batch=1, sequence=8, batch_ramp=batch_ramp),
        fault_tolerance=FaultTolerance(f=f, policy=policy, check_every=check_every, slow=slow),
        # With a third more where a copy of the state is held while a checkpoint is written.
        resources=Resources(
            device_memory=memory * 4 // 3 if every else memory,
            max_nodes=max_nodes,
            min_pipeline_nodes=min_pipeline_nodes,
            devices_per_stage=devices_per_stage,
        ),
        checkpoint=Checkpoint(every=every, keep=keep),
        schedule=schedule or Schedule(),
        data=data or Data(),
        eval=evaluation or Eval(),
    )
