"""Small questions whose answers can be worked out by hand."""

from __future__ import annotations

from typing import Any, Literal

from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.protocol.job import Checkpoint, FaultTolerance, Job, Train
from oobleckd.protocol.jobschedule import Resources, Schedule
from oobleckd.simulator.costs import Costs
from oobleckd.simulator.outcome import Question
from oobleckd.simulator.traces import Trace, TraceEvent, node_names

FREE = Costs(
    detect_s=0.0, silence_s=0.0, report_s=0.0, plan_s=0.0, plan_node_s=0.0, deploy_s=0.0, init_s=0.0,
    start_s=0.0,
    manifest_s=0.0, snapshot_bytes_per_s=1e30, write_bytes_per_s=1e30, load_bytes_per_s=1e30,
)  # fmt: skip
"""Nothing but steps takes time."""
BATCH_S = 0.3
"""For so long the core waits for more nodes after one has joined (``Config.batch_s``)."""
LAYER_S = 0.03
"""Of a layer forward and backward of one micro-batch."""


def even_profile(num_layers: int = 4, *, link_bytes_per_s: float = 1e30) -> Profile:
    """Layers of 10 + 20 ms whose state is 100 bytes, of which 90 are copied; what links carry
    takes no time.
    """
    layer = LayerCost("layer", 0.01, 0.02, 30, 100, 1, 1)
    own = tuple((n,) for n in range(num_layers))
    return Profile("even", "test", (layer,) * num_layers, 0.0, link_bytes_per_s, buckets=own)


def job_of(
    num_micro_batches: int = 4,
    *,
    f: int = 1,
    every: int = 0,
    max_nodes: int = 0,
    schedule: Schedule | None = None,
    limit_bytes: int = 250,
    devices_per_stage: Literal["auto", 1, 2, 4, 8] = 1,
) -> Job:
    return Job(
        name="small",
        train=Train(steps=10, global_batch=num_micro_batches, micro_batch=1, sequence=8),
        fault_tolerance=FaultTolerance(f=f),
        resources=Resources(
            device_memory=limit_bytes, max_nodes=max_nodes, devices_per_stage=devices_per_stage
        ),
        checkpoint=Checkpoint(every=every),
        schedule=schedule or Schedule(),
    )


def trace_of(num_nodes: int, *events: TraceEvent, duration_s: float = 20.0) -> Trace:
    return Trace("by hand", node_names(num_nodes), events, duration_s)


def question(policy: str = "oobleck", trace: Trace | None = None, **changes: Any) -> Question:
    fields: dict[str, Any] = {
        "job": job_of(),
        "profile": even_profile(),
        "costs": FREE,
        "devices_per_node": 1,
    }
    fields |= changes
    limit_bytes = fields["job"].resources.device_memory
    return Question(policy=policy, limit_bytes=limit_bytes, trace=trace or trace_of(4), **fields)
